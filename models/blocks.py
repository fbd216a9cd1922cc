"""What several model families share: normalisation, rotary positions, attention, SwiGLU; head.py has the rest.

Tensors are (batch, seq, ...). Under tensor parallelism a module sees plain local tensors (its own heads, its own slice of
the sequence) while its parameters are DTensors; `local_weight` is the one bridge between the two.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class SeqInfo(NamedTuple):
    """What a model must know about its sequences beside the tokens."""

    positions: Tensor  # (batch, seq) int64, the place of each token in its sequence, or in its document
    documents: Tensor | None = None  # (batch, seq) int32, the number of each token's document; None: attention knows none
    cache: "Cache | None" = None  # keys and values of earlier tokens, when text is generated
    mask: Tensor | BlockMask | None = None  # what `with_mask` makes of all this, for `Attention.core`


class Normal(NamedTuple):
    """Initial distribution: normal with mean 0, cut off at `cutoff` deviations; `std` is that of the uncut one."""

    std: float
    cutoff: float = 3.0


class Constant(NamedTuple):
    """Initial distribution: one value everywhere."""

    value: float


class Flops(NamedTuple):
    """Floating-point operations that training spends on one token, forward and backward, without recomputation."""

    causal: float  # attention counted over the positions that a token may see, on average half the sequence
    palm: float  # attention counted over the whole sequence (Chowdhery et al., arXiv:2204.02311, appendix B)


def transformer_flops(matmul_parameters: int, heads_dim: int, seq_len: int, windows: Iterable[int | None]) -> Flops:
    """FLOPs a token of a decoder: 6 for every parameter that is multiplied, 12 H Q T a layer for attention (PaLM, appendix B).

    heads_dim: the width of all query heads together, H Q. windows: how far each layer's attention looks; None: all the way.
    """
    attention, dense = 12 * heads_dim, 6 * matmul_parameters
    reaches = [min(window or seq_len, seq_len) for window in windows]
    # the first `reach` tokens see 1, 2, ... reach tokens, all later ones `reach`
    seen = sum(reach * (2 * seq_len - reach + 1) / (2 * seq_len) for reach in reaches)
    return Flops(causal=dense + attention * seen, palm=dense + attention * seq_len * len(reaches))


def local_weight(weight: Tensor) -> Tensor:
    """The whole of a weight that every tensor-parallel rank holds, as a plain tensor for local arithmetic.

    Each rank sees other tokens or other heads, so its gradient is one summand of the weight's gradient.
    """
    if isinstance(weight, DTensor):
        assert all(place.is_replicate() for place in weight.placements), "a split weight is not the same for all ranks"
        return weight.to_local(grad_placements=[Partial()])
    return weight


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        weight = local_weight(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps)


# ----------------------------------------------------------------------------------------------------------- positions


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of rotary wavelengths beyond the original context (Llama 3, arXiv:2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angular frequencies of the head's pairs of dimensions, (head_dim / 2,) float32 (Su et al., arXiv:2104.09864).

    With `scaling`, wavelengths above original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are kept, and between the two the frequency is interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of (batch, seq) positions: two (batch, seq, 1, head_dim) float32 tensors, halves repeated."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (batch, seq, heads, head_dim); dimension i pairs with i + head_dim / 2, Hugging Face's layout."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


def positions_in_documents(documents: Tensor) -> Tensor:
    """The place of each token in its document, from 0; documents (batch, seq), equal numbers side by side -> int64."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - torch.where(first, place, 0).cummax(dim=1).values


# ------------------------------------------------------------------------------------------------ what a token looks at


Visible = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]


def visibility(documents: Tensor | None, window: int | None) -> Visible:
    """The mask, as a function of (row, head, query, key) indices that says whether the query looks at the key.

    Whatever kernel computes attention, its mask is made of this one function: a model that wants another one changes it here.
    documents: (batch, seq), attention stays inside them. window: the query and the window - 1 tokens before it are seen.
    """

    def visible(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[row, query] == documents[row, key])
        return seen

    return visible


def with_mask(seq: SeqInfo, window: int | None = None) -> SeqInfo:
    """The same with the mask of its documents and of a window, made once for all layers that look as far.

    Where plain causal attention says the same, it is returned as it is. On CUDA a BlockMask for FlexAttention, which skips the
    blocks that see nothing. Elsewhere (batch or 1, 1, seq, seq) bool for scaled_dot_product_attention, since FlexAttention has
    no backward pass on a CPU. With a cache (batch, 1, seq, slots) bool.
    """
    if seq.cache is not None:
        assert seq.documents is None, "text is generated for one document a row"
        slots = torch.arange(seq.cache.slots, device=seq.positions.device)
        return seq._replace(mask=visibility(None, window)(slots, None, seq.positions[:, None, :, None], slots))
    documents = seq.documents
    if documents is None:
        if window is None or window >= seq.positions.shape[1]:
            return seq
        documents = seq.positions.new_zeros(1, seq.positions.shape[1])  # one document in every row, so one mask for all
    if documents.is_cuda:
        return seq._replace(mask=block_mask(documents, window, _compiled_create_block_mask()))
    return seq._replace(mask=dense_mask(documents, window))


def dense_mask(documents: Tensor, window: int | None = None) -> Tensor:
    """(batch, 1, seq, seq) bool of documents (batch, seq): whether a query, in the third place, looks at a key."""
    rows, length = documents.shape
    row = torch.arange(rows, device=documents.device)[:, None, None, None]
    place = torch.arange(length, device=documents.device)
    return visibility(documents, window)(row, None, place[:, None], place)


def block_mask(documents: Tensor, window: int | None = None, create: Callable[..., BlockMask] = create_block_mask) -> BlockMask:
    """The same for FlexAttention: which blocks of 128 x 128 see all, something or nothing, and `visibility` for the second."""
    rows, length = documents.shape
    return create(visibility(documents, window), rows, None, length, length, device=documents.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    # compiled, since by itself it makes the whole (batch, seq, seq) mask first: 16 GiB a row of 128k tokens
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # compiled, since by itself it makes all scores. The option shows it to selective checkpointing as one operation.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, options={"wrap_inductor_compiled_regions": True})


class Cache:
    """Keys and values of the tokens so far, of every attention module: slot i holds position i.

    A row's later slots may hold anything: the mask hides them, and they are overwritten when the row comes that far. So prompts
    of any lengths stand beside each other, each from slot 0 on.
    """

    _STEP = 256

    def __init__(self) -> None:
        self.slots = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def reserve(self, positions: int) -> None:
        """Makes room for positions 0 to positions - 1."""
        self.slots = max(self.slots, -(-positions // self._STEP) * self._STEP)

    def extend(self, owner: nn.Module, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v (batch, seq, heads, head_dim) to positions (batch, seq); -> both whole, (batch, slots, ...)."""
        kept = self._kept.get(owner, (k[:, :0], v[:, :0]))
        if missing := self.slots - kept[0].shape[1]:
            kept = self._kept[owner] = tuple(F.pad(part, (0, 0, 0, 0, 0, missing)) for part in kept)
        row = torch.arange(len(k), device=k.device)[:, None]
        for part, new in zip(kept, (k, v), strict=True):
            part[row, positions] = new
        return kept


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | BlockMask | None,
    scale: float | None,
    softcap: float | None,
    backend: SDPBackend | None = None,
) -> Tensor:
    """Attention of q (batch, heads, queries, head_dim) over k and v (batch, fewer heads, keys, head_dim); -> q's shape.

    mask: as `with_mask` makes it; None: causal. scale: of the scores, 1 / sqrt(head_dim) where it is None. softcap: scores s
    become softcap x tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2). backend: the only kernel of
    scaled_dot_product_attention that may run; None: any, and FlexAttention for what only that one does well.
    """
    gqa = k.shape[1] != q.shape[1]
    if backend is not None and isinstance(mask, BlockMask):
        mask = _dense(mask)
    if backend is not None and softcap is None:
        if gqa and backend == SDPBackend.EFFICIENT_ATTENTION:  # it knows no groups of queries
            k, v, gqa = *(part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v)), False
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    if backend is None and (isinstance(mask, BlockMask) or (softcap is not None and q.is_cuda and mask is None)):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        modify = None if softcap is None else _capped(softcap, causal=mask is None)
        return flex(q, k, v, score_mod=modify, block_mask=mask, scale=scale, enable_gqa=gqa)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(dim=-1, dtype=torch.float32).type_as(q) @ v


def _dense(mask: BlockMask) -> Tensor:
    """(batch, 1, seq, seq) bool: what a BlockMask says of every pair of tokens."""
    rows, _, queries, keys = mask.shape
    row, query, key = (torch.arange(count, device=mask.kv_indices.device) for count in (rows, queries, keys))
    return mask.mask_mod(row[:, None, None, None], row.new_zeros(()), query[:, None], key)


def _capped(softcap: float, causal: bool) -> Callable[..., Tensor]:
    """The same for FlexAttention, which without a mask is not causal by itself."""

    def modify(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = softcap * torch.tanh(score / softcap)
        return torch.where(query >= key, score, -math.inf) if causal else score

    return modify


# ------------------------------------------------------------------------------------------------------------ the block


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    qkv_bias: whether q, k and v have biases. scale, softcap: see `attend`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        self.head_dim, self.scale, self.softcap = head_dim, scale, softcap
        # The only kernels that may run in training: of plain causal attention, and under a mask. None: see `attend`.
        self.backends: tuple[SDPBackend | None, SDPBackend | None] = (None, None)
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        q, k, v = self.project(x)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return self.wo(self.core(q, k, v, seq).flatten(-2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, seq, dim), before their positions: (batch, seq, heads, head_dim) each."""
        return self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))

    def split(self, x: Tensor) -> Tensor:
        # -1 heads: tensor parallelism leaves each rank its share of them
        return x.unflatten(-1, (-1, self.head_dim))

    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        """The one place for masks, caches and kernels: (batch, seq, heads, head_dim), of k and v fewer heads; -> q's shape."""
        assert seq.mask is not None or (seq.documents is None and seq.cache is None), (
            "Model.forward must make the mask of its documents: seq = with_mask(seq)"
        )
        causal, masked = self.backends
        backend = causal if seq.mask is None else masked
        if seq.cache is not None:
            k, v, backend = *seq.cache.extend(self, k, v, seq.positions), None
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, seq.mask, self.scale, self.softcap, backend).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer w2(silu(w1 x) * w3 x) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim) -> (batch, seq, dim)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
