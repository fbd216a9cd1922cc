"""A sequence split over ranks ("context parallelism"): which positions a rank has, and how its queries reach all keys.

Two methods. "gather" (Llama 3, arXiv:2407.21783, section 3.3.2): every rank gathers all keys and values; of 2 x ranks equal
parts of the sequence, rank r has parts r and 2 x ranks - 1 - r, so that all ranks have as many keys to attend to. "ulysses"
(Jacobs et al., arXiv:2309.14509): ranks have the sequence in order, and exchange it for heads around the attention.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from models.torch_private import all_to_all_single, cast_result, cpu_attention, cpu_attention_backward, wait_tensor

_SEQUENCE, _HEADS = 1, 2  # dimensions of (batch, seq, heads, head_dim)


class Split(NamedTuple):
    """How a sequence is split, and which positions this rank has."""

    mesh: DeviceMesh  # one dimension, the ranks that have a sequence together
    method: Literal["gather", "ulysses"]
    parts: tuple[int, int]  # the numbers of this rank's parts of 2 x ranks; its tokens are in this order
    positions: Tensor  # (seq / ranks,) int64: of this rank's tokens in the sequence

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return len(self.positions) * self.mesh.size()


def split_sequence(mesh: DeviceMesh, method: Literal["gather", "ulysses"], length: int, device: torch.device) -> Split:
    """The split of sequences of `length` tokens, a multiple of 2 x ranks."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    parts = (rank, 2 * ranks - 1 - rank) if method == "gather" else (2 * rank, 2 * rank + 1)
    every = torch.arange(length, device=device).chunk(2 * ranks)
    return Split(mesh, method, parts, torch.cat([every[part] for part in parts]))


def gather_sequence(x: Tensor, split: Split) -> Tensor:
    """(batch, seq, ...) in the order of the sequence, of the ranks' (batch, seq / ranks, ...); their gradients are summed."""
    gathered = DTensor.from_local(x, split.mesh, [Shard(_SEQUENCE)], run_check=False).redistribute(split.mesh, [Replicate()])
    parts = gathered.to_local(grad_placements=[Partial()]).chunk(2 * split.mesh.size(), dim=_SEQUENCE)
    # rank by rank an early and a late part: the early ones ascend, the late ones descend
    return torch.cat([*parts[::2], *parts[1::2][::-1]], dim=_SEQUENCE)


def sequence_to_heads(x: Tensor, split: Split) -> Tensor:
    """(batch, seq, heads / ranks, ...) of (batch, seq / ranks, heads, ...): an all-to-all."""
    return _exchange(x, split.mesh, _SEQUENCE, _HEADS)


def heads_to_sequence(x: Tensor, split: Split) -> Tensor:
    """(batch, seq / ranks, heads, ...) of (batch, seq, heads / ranks, ...): an all-to-all."""
    return _exchange(x, split.mesh, _HEADS, _SEQUENCE)


def _exchange(x: Tensor, mesh: DeviceMesh, before: int, after: int) -> Tensor:
    """Gathers dimension `before`, which is split over the ranks, and splits `after`, which is whole."""
    received = _AllToAll.apply(torch.stack(x.chunk(mesh.size(), dim=after)), mesh)
    return torch.cat(received.unbind(), dim=before)


class _AllToAll(torch.autograd.Function):
    """(ranks, ...), the part for each rank -> the part from each. DTensor's gathers everything where there is no GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return wait_tensor(all_to_all_single(x, None, None, mesh))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait_tensor(all_to_all_single(grad.contiguous(), None, None, ctx.mesh)), None


def attend_by_parts(q: Tensor, k: Tensor, v: Tensor, split: Split, scale: float | None) -> Tensor:
    """Causal attention of this rank's two parts of the queries over all keys, on CPUs, without a mask.

    q: (batch, heads, seq / ranks, head_dim). k, v: (batch, kv heads, seq, head_dim), in the order of the sequence.
    """
    size = q.shape[2] // 2
    return torch.cat(
        [
            _CausalAtTheEnd.apply(queries, k[:, :, : (part + 1) * size], v[:, :, : (part + 1) * size], scale)
            for part, queries in zip(split.parts, q.chunk(2, dim=2), strict=True)
        ],
        dim=2,
    )


class _CausalAtTheEnd(torch.autograd.Function):
    """Attention of queries that have the last positions of the keys; shapes (batch, heads or kv heads, tokens, head_dim).

    The CPU's flash kernel aligns its causal mask with the first key. So it computes the keys before the queries without a mask,
    the queries' own with one, and both are merged by their log-sum-exps, as blocks are within the kernel (Dao et al.,
    arXiv:2205.14135, section 3.1). The kernel's backward pass recomputes the weights of a block from the log-sum-exp of all.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        outs, sums = [], []
        for keys, causal in _blocks(q, k):
            out, logsumexp = cpu_attention(
                q, _for_each_head(k[:, :, keys], q), _for_each_head(v[:, :, keys], q), 0.0, causal, scale=scale
            )
            outs.append(out)
            sums.append(logsumexp)
        total = torch.stack(sums).logsumexp(0)
        merged = torch.stack([out * (part - total).exp()[..., None] for out, part in zip(outs, sums, strict=True)]).sum(0)
        merged = cast_result(merged, q.dtype)
        ctx.save_for_backward(q, k, v, merged, total)
        ctx.scale = scale
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        of_q = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        of_k: list[Tensor] = []
        of_v: list[Tensor] = []
        for keys, causal in _blocks(q, k):
            wide = (_for_each_head(x[:, :, keys], q) for x in (k, v))
            parts = cpu_attention_backward(grad, q, *wide, out, logsumexp, 0.0, causal, scale=ctx.scale)
            of_q += parts[0]
            for found, gradient in zip((of_k, of_v), parts[1:], strict=True):
                found.append(gradient.unflatten(1, (k.shape[1], -1)).sum(2))
        return of_q.type_as(q), torch.cat(of_k, dim=2), torch.cat(of_v, dim=2), None


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, repeated for the queries that share them: the kernel knows no groups."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[slice, bool]]:
    """(keys, whether the causal mask applies): those before the queries, if any, and the queries' own."""
    before = k.shape[2] - q.shape[2]
    own = (slice(before, None), True)
    return [(slice(before), False), own] if before else [own]
