"""The output head and its loss: final norm, projection onto the vocabulary, cross entropy without ever holding all logits."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

IGNORE = -100  # a label that counts for nothing, as in PyTorch's own cross entropy


class Sizes(NamedTuple):
    """How much the head makes at a time, in numbers."""

    logits: int  # of a chunk
    product: int  # of a summand of the weight's gradient, where products are less precise than their sum


SIZES = {
    # Larger chunks are a little faster still, and take as much more memory (benchmarks/NOTES.md).
    "cpu": Sizes(logits=2**26, product=2**23),
    # Not measured: each chunk reads and writes the weight's gradient, which for 8B takes as long as the products of 250 tokens.
    "cuda": Sizes(logits=2**28, product=2**62),
}


class Head(nn.Module):
    """Final norm, projection onto the vocabulary, and the loss, as one unit for FSDP.

    With labels the logits of all tokens never exist at once: they are made in chunks of at most `Sizes.logits` numbers, used
    for loss and gradients, and dropped. However many chunks, the projection's weight is gathered once and its gradient
    reduced once. The product is in the precision of the hidden states, whatever that of the weight is.

    softcap: logits x become softcap x tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2). z_loss: this times the square
    of the log-sum-exp of the logits is added to each label's loss, which keeps it near 0 (PaLM, arXiv:2204.02311, section 5).
    """

    def __init__(self, norm: nn.Module, dim: int, vocab_size: int, softcap: float | None = None):
        super().__init__()
        self.vocab_size, self.softcap, self.z_loss = vocab_size, softcap, 0.0
        self.sizes: Sizes | None = None  # None: those of SIZES for the device
        self.kernels = Kernels(row_sums, to_slopes, accumulate)
        self.norm = norm
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab) of hidden (batch, seq, dim); with labels (batch, seq), the float32 sum of the losses.

        Labels equal to IGNORE add nothing. Under tensor parallelism hidden is this rank's slice of the sequence, labels
        are whole, and every rank returns the same sum. The z-loss is in it only where gradients are asked for.
        """
        hidden, weight = self.norm(hidden), self.output.weight
        if labels is None:
            logits = F.linear(hidden, weight.to(hidden.dtype))
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        first, group = 0, None
        if isinstance(weight, DTensor):
            assert isinstance(hidden, DTensor), "head.norm must gather the sequence: its sharding style is 'sequence'"
            mesh = weight.device_mesh
            group = mesh.get_group()
            first = mesh.get_local_rank() * -(-self.vocab_size // mesh.size())  # Shard gives all ranks but the last ones this
            # Each rank's gradient covers its own part of the vocabulary: one summand of the hidden states' gradient.
            hidden = hidden.to_local(grad_placements=[Partial()])
            weight = weight.to_local(grad_placements=[Shard(0)])
        sizes = self.sizes or SIZES[hidden.device.type]
        chunk = chunk_of(labels.numel(), self.vocab_size, sizes)
        plan = Plan(first, group, chunk, sizes.product, self.softcap, self.z_loss, self.kernels, torch.is_grad_enabled())
        return _LinearCrossEntropy.apply(hidden.flatten(0, 1), weight, labels.flatten(), plan)


def chunk_of(tokens: int, vocab_size: int, sizes: Sizes) -> int:
    """Tokens in a chunk: as many as `sizes` allows, or somewhat less if all chunks are equal then."""
    most = max(1, sizes.logits // vocab_size)
    fewest = -(-tokens // most)
    # a chunk of another size, the last one, would be compiled for itself
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // count)


# ------------------------------------------------------------------- what is done with a chunk's logits, apart from products


def row_sums(logits: Tensor, column: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Each row's log-sum-exp and its logit in `column`: of logits (chunk, rows) and column (chunk,) two (chunk,) float32."""
    wide = _capped(logits.to(torch.float32, copy=True), softcap)
    wanted = wide.gather(1, column[:, None])[:, 0]
    largest = wide.amax(dim=-1)
    return wide.sub_(largest[:, None]).exp_().sum(dim=-1).log_().add_(largest), wanted


def to_slopes(logits: Tensor, normaliser: Tensor, factor: Tensor, softcap: float | None) -> None:
    """Overwrites logits x (chunk, rows) with factor * exp(x - normaliser), the slopes of log-sum-exps; both (chunk,)."""
    if softcap is None:
        slope = logits.to(torch.float32, copy=True).sub_(normaliser[:, None]).exp_().mul_(factor[:, None])
    else:
        capped = _capped(logits.to(torch.float32, copy=True), softcap)
        bend = 1 - (capped / softcap).square_()
        slope = capped.sub_(normaliser[:, None]).exp_().mul_(factor[:, None]).mul_(bend)
    logits.copy_(slope)


def accumulate(total: Tensor, part: Tensor) -> None:
    """Adds part to a float32 total, in place."""
    total.add_(part)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class Kernels(NamedTuple):
    """The functions above as they are, or compiled: each then reads the logits once and writes no float32 copy of them."""

    row_sums: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    to_slopes: Callable[[Tensor, Tensor, Tensor, float | None], None]
    accumulate: Callable[[Tensor, Tensor], None]


# -------------------------------------------------------------------------------------------------- the autograd function


class Plan(NamedTuple):
    """What `_LinearCrossEntropy` needs beside tensors."""

    first: int  # this rank's first row of the vocabulary
    group: dist.ProcessGroup | None  # among whose ranks the vocabulary is split
    chunk: int  # tokens
    product: int  # as in Sizes
    softcap: float | None
    z_loss: float
    kernels: Kernels
    training: bool  # whether autograd records; inside of a Function it never does, and ctx does not tell


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of `hidden @ weight.T`, with weight split by rows over a group.

    The gradients are computed in the forward pass, chunk by chunk, while the logits are there, and only scaled in the
    backward pass (idea: Liger kernel's fused linear cross entropy, arXiv:2410.10989). The logits of a chunk become its slopes
    in the same memory, and all chunks use the same.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, plan: Plan) -> Tensor:
        """hidden (tokens, dim); weight (rows, dim), the rows `first`.. of the vocabulary; labels (tokens,) -> () float32."""
        with_gradient = plan.training and any(ctx.needs_input_grad[:2])
        used = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if with_gradient else None
        # of a frozen weight there is none to be made, nor to be kept
        grad_weight = _WeightGradient(used, plan) if with_gradient and ctx.needs_input_grad[1] else None
        room = hidden.new_empty(min(plan.chunk, len(hidden)), len(used))
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), plan.chunk):
            part, label = hidden[start : start + plan.chunk], labels[start : start + plan.chunk]
            logits = torch.mm(part, used.T, out=room[: len(part)])
            loss += _loss_and_slopes(logits, label, plan, with_gradient)
            if grad_hidden is not None:
                torch.mm(logits, used, out=grad_hidden[start : start + plan.chunk])
            if grad_weight is not None:
                grad_weight.add(logits, part)
        if with_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight and grad_weight.total)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = (grad_hidden * scale).to(grad_hidden.dtype)
        if grad_weight is not None:  # in place, since nothing else reads it: a second backward pass is refused by autograd
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _loss_and_slopes(logits: Tensor, label: Tensor, plan: Plan, with_gradient: bool) -> Tensor:
    """The summed loss of a chunk, () float32; with gradients the logits (chunk, rows) become the loss's slopes in them."""
    valid = label != IGNORE
    column = label - plan.first
    mine = valid & (column >= 0) & (column < logits.shape[1])
    column = torch.where(mine, column, 0)
    normaliser, wanted = plan.kernels.row_sums(logits, column, plan.softcap)
    local_wanted = wanted
    if plan.group is not None:
        normaliser, wanted = _combine(normaliser, torch.where(mine, wanted, 0.0), plan.group)
    loss = normaliser - wanted
    factor = valid.float()
    if plan.z_loss and plan.training:
        loss = loss + plan.z_loss * normaliser.square()
        factor = factor * (1 + 2 * plan.z_loss * normaliser)
    if with_gradient:
        plan.kernels.to_slopes(logits, normaliser, factor, plan.softcap)
        # The wanted logits' slopes are made anew: softmax - 1 of a softmax that was rounded loses all digits near 1.
        slope = (local_wanted - normaliser).exp() * factor - 1
        if plan.softcap is not None:
            slope = slope * (1 - (local_wanted / plan.softcap).square())
        where = (torch.arange(len(logits), device=logits.device), column)  # not scatter_, which copies all logits on a CPU
        logits[where] = torch.where(mine, slope.to(logits.dtype), logits[where])
    return torch.where(valid, loss, 0.0).sum()


class _WeightGradient:
    """The sum over chunks of slopes.T @ hidden: `total` (rows, dim) is float32, whatever the precision of the products."""

    def __init__(self, weight: Tensor, plan: Plan):
        self.total = torch.empty_like(weight, dtype=torch.float32)
        self._accumulate, self._begun = plan.kernels.accumulate, False
        # so few rows at a time that what is added is in a CPU's cache still
        self._rows = min(len(weight), max(1, plan.product // weight.shape[1]))
        self._product = weight.new_empty(self._rows, weight.shape[1]) if weight.dtype != torch.float32 else None

    def add(self, slopes: Tensor, hidden: Tensor) -> None:
        """slopes (chunk, rows), hidden (chunk, dim)."""
        if self._product is None:
            torch.addmm(self.total, slopes.T, hidden, beta=int(self._begun), out=self.total)
        else:
            for slope, total in zip(slopes.T.split(self._rows), self.total.split(self._rows), strict=True):
                product = torch.mm(slope, hidden, out=self._product[: len(slope)])
                if self._begun:
                    self._accumulate(total, product)
                else:
                    total.copy_(product)
        self._begun = True


def _combine(normaliser: Tensor, wanted: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """From each rank's log-sum-exp and wanted logit, (tokens,) each, those of the whole vocabulary, in one collective."""
    mine = torch.stack([normaliser, wanted])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    every = torch.stack(parts)  # (ranks, 2, tokens)
    return every[:, 0].logsumexp(dim=0), every[:, 1].sum(dim=0)
