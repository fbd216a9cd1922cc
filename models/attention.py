"""Attention: which tokens a token looks at, the kernels that compute it, the cache of a text that is being written.

Tensors are (batch, seq, ...), inside of `attend` (batch, heads, seq, head_dim).
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from models.blocks import apply_rope


class SeqInfo(NamedTuple):
    """What a model must know about its sequences beside the tokens."""

    positions: Tensor  # (batch, seq) int64, the place of each token in its sequence, or in its document
    documents: Tensor | None = None  # (batch, seq) int32, the number of each token's document; None: attention knows none
    cache: "Cache | None" = None  # keys and values of earlier tokens, when text is generated
    mask: Tensor | BlockMask | None = None  # what `with_mask` makes of all this, for `Attention.core`


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


TILES = "tiles"  # attention by `_attend_by_tiles`
_TILE = 64  # queries
Backend = SDPBackend | Literal["tiles"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | BlockMask | None,
    scale: float | None,
    softcap: float | None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of q (batch, heads, queries, head_dim) over k and v (batch, fewer heads, keys, head_dim); -> q's shape.

    mask: as `with_mask` makes it; None: causal. scale: of the scores, 1 / sqrt(head_dim) where it is None. softcap: scores s
    become softcap x tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2). backend: the only kernel of
    scaled_dot_product_attention that may run, or TILES; None: any, and FlexAttention for what only that one does well.
    """
    if backend == TILES:
        assert mask is None and softcap is None, "tiles are for causal attention without a cap"
        return _attend_by_tiles(q, k, v, scale)
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


def _attend_by_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention, so many queries at a time over the keys that they see, with scores in float32.

    Once compiled, faster than the flash kernel of CPUs for a few hundred tokens in bfloat16, which spends its time on blocks
    that are too large for them; for long sequences it is slower.
    """
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    q, wide = (q * (scale or q.shape[-1] ** -0.5)).float(), k.float()
    place, tiles = torch.arange(length, device=q.device), []
    for start in range(0, length, _TILE):
        stop = min(start + _TILE, length)
        rows = q[:, :, start:stop].unflatten(1, (-1, groups)).flatten(2, 3)  # (batch, kv heads, groups x tile, head_dim)
        scores = rows @ wide[:, :, :stop].transpose(-2, -1)
        visible = (place[start:stop, None] >= place[:stop]).repeat(groups, 1)
        weights = torch.where(visible, scores, -math.inf).softmax(dim=-1).type_as(v)
        tiles.append((weights @ v[:, :, :stop]).unflatten(2, (groups, -1)).flatten(1, 2))
    return torch.cat(tiles, dim=2)


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


# ------------------------------------------------------------------------------------------------------------ the module


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
        self.backends: tuple[Backend | None, Backend | None] = (None, None)
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
