"""Attention: the mask, the kernels, the KV cache for generation, and the module.

Tensors have shape (batch, seq, ...), except in `attend`, where they have shape (batch, heads, seq, head_dim).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from models.blocks import apply_rope, local_weight
from models.split import Split, attend_by_parts, gather_sequence, heads_to_sequence, sequence_to_heads
from models.torch_private import cast_result


class SeqInfo(NamedTuple):
    """What a model knows about its sequences in addition to the tokens."""

    positions: Tensor  # (batch, seq) int64, the position of each token in its sequence or document
    # (batch, seq) int32, each token's document, of the whole sequence also where it is split; None: attention ignores documents
    documents: Tensor | None = None
    cache: "Cache | None" = None  # keys and values of earlier tokens, for generation
    mask: Tensor | BlockMask | None = None  # set by `with_mask`, used by `AttentionCore.core`
    split: Split | None = None  # which positions of the sequence this rank has; None: all, in order


# ---------------------------------------------------------------------------------------------------------------- mask


Visible = Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]


def visibility(documents: Tensor | None, window: int | None) -> Visible:
    """The mask as a function of (row, head, query, key) indices: whether the query attends to the key.

    The masks of all kernels are built from this function, so a fork changes it here only. documents: (batch, seq), attention
    stays within each. window: a query attends to itself and to the window - 1 tokens before it.
    """

    def visible(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[row, query] == documents[row, key])
        return seen

    return visible


def with_mask(seq: SeqInfo, window: int | None = None, plain: bool = True) -> SeqInfo:
    """Returns `seq` with the mask of its documents and a window, built once for all layers that have this window.

    plain: False for attention with a softcap or sinks, which on CUDA is FlexAttention's. The mask stays None where plain causal
    attention is equivalent. On CUDA it is a BlockMask for FlexAttention, which skips empty blocks: without one, that would also
    compute the scores of later tokens. Elsewhere it is a bool tensor (batch or 1, 1, queries, keys) for
    scaled_dot_product_attention, because FlexAttention has no backward pass on CPU. With a cache it is a bool tensor
    (batch, 1, seq, slots). Where keys are gathered from the ranks that a sequence is split over, queries are this rank's
    positions, and CUDA always needs the mask.
    """
    if seq.cache is not None:
        assert seq.documents is None, "generation takes one document per row"
        slots = torch.arange(seq.cache.slots, device=seq.positions.device)
        return seq._replace(mask=visibility(None, window)(slots, None, seq.positions[:, None, :, None], slots))
    documents, length = seq.documents, seq.positions.shape[1] if seq.split is None else seq.split.length
    positions = seq.split.positions if seq.split is not None and seq.split.method == "gather" else None
    if documents is None:
        unmasked = window is None or window >= length
        if unmasked and not (seq.positions.is_cuda and (positions is not None or not plain)):
            return seq
        documents = seq.positions.new_zeros(1, length)  # each row is one document, so all rows share a mask
    if documents.is_cuda:
        return seq._replace(mask=block_mask(documents, window, positions, _compiled_create_block_mask()))
    return seq._replace(mask=dense_mask(documents, window, positions))


def dense_mask(documents: Tensor, window: int | None = None, positions: Tensor | None = None) -> Tensor:
    """The mask of documents (batch, seq) as a bool tensor (batch, 1, queries, keys). positions: of the queries; None: all."""
    rows, length = documents.shape
    row = torch.arange(rows, device=documents.device)[:, None, None, None]
    keys = torch.arange(length, device=documents.device)
    queries = keys if positions is None else positions
    return visibility(documents, window)(row, None, queries[:, None], keys)


def block_mask(
    documents: Tensor,
    window: int | None = None,
    positions: Tensor | None = None,
    create: Callable[..., BlockMask] = create_block_mask,
) -> BlockMask:
    """The same mask for FlexAttention: blocks of 128 x 128 are full, empty or partial; partial ones apply `visibility`."""
    rows, length = documents.shape
    visible = visibility(documents, window)
    if positions is None:
        return create(visible, rows, None, length, length, device=documents.device)

    def of_positions(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(row, head, positions[query], key)

    return create(of_positions, rows, None, len(positions), length, device=documents.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    # compiled, because eager mode first builds the whole (batch, seq, seq) mask: 16 GiB per row of 128k tokens
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)


@functools.cache
def _compiled_flex_attention() -> Any:
    # compiled, because eager mode holds all scores. The option makes it one operation for selective checkpointing.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True, options={"wrap_inductor_compiled_regions": True})


class State(NamedTuple):
    """What a module keeps of earlier tokens that is not keys and values, such as the state of a recurrence."""

    tensors: dict[str, Tensor]  # after the tokens before this pass, {} at a row's first; the module stores the later ones here
    real: Tensor  # (batch, seq) bool; False: padding, after a row's last token in this pass, which must not change the tensors


class Cache:
    """What a model keeps of earlier tokens: keys and values of every attention module, slot i for position i, and states.

    Slots after a row's last position hold arbitrary values: the mask hides them, and later tokens overwrite them. A batch can
    therefore mix prompts of different lengths, each starting at slot 0. A state cannot be overwritten, so `State.real` marks
    the padding. A module that runs several times in a forward pass, since blocks share or repeat it, keeps something each time.
    """

    _STEP = 256

    def __init__(self) -> None:
        self.slots = 0
        self.real: Tensor | None = None  # (batch, seq) bool, of the current forward pass: see State
        self._uses: Counter[nn.Module] = Counter()  # in the current forward pass
        self._entries: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self._states: dict[tuple[nn.Module, int], dict[str, Tensor]] = {}

    @property
    def empty(self) -> bool:
        """Whether no module has kept anything."""
        return not any(self._entries.values()) and not any(self._states.values())

    def state(self, owner: nn.Module) -> State:
        """The state of a module. The module reads it once each time that it runs, and stores the tensors after its tokens."""
        assert self.real is not None, "set Cache.real before each forward pass of a model that keeps a state"
        return State(self._states.setdefault(self._use(owner), {}), self.real)

    def reserve(self, positions: int) -> None:
        """Makes the cache hold at least `positions` positions. Call it before each forward pass."""
        self.slots = max(self.slots, -(-positions // self._STEP) * self._STEP)
        self._uses.clear()

    def extend(self, owner: nn.Module, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v (batch, seq, heads, head_dim) at positions (batch, seq); returns all of both, (batch, slots, ...)."""
        use = self._use(owner)
        keys, values = self._entries.get(use, (k[:, :0], v[:, :0]))
        if missing := self.slots - keys.shape[1]:
            padding = (0, 0, 0, 0, 0, missing)
            keys, values = self._entries[use] = (F.pad(keys, padding), F.pad(values, padding))
        row = torch.arange(len(k), device=k.device)[:, None]
        keys[row, positions], values[row, positions] = k, v
        return keys, values

    def _use(self, owner: nn.Module) -> tuple[nn.Module, int]:
        self._uses[owner] += 1
        return owner, self._uses[owner]


# ------------------------------------------------------------------------------------------------------------- kernels


TILES: Final = "tiles"  # `_attend_by_tiles`
FLEX_FLASH: Final = "flex_flash"  # FlexAttention by FlashAttention 4's kernels instead of Triton's, for block masks
_TILE = 128  # queries
Backend = SDPBackend | Literal["tiles", "flex_flash"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | BlockMask | None,
    scale: float | None,
    softcap: float | None,
    backend: Backend | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q (batch, heads, queries, head_dim) over k and v (batch, kv heads, keys, ...), which may differ in width.

    Returns (batch, heads, queries, v's width). mask: from `with_mask`; None: causal. scale: factor of the scores; None:
    1 / sqrt(head_dim). softcap: a score s becomes softcap x tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2). backend:
    the only kernel that may run, one of scaled_dot_product_attention's, TILES or FLEX_FLASH; None: PyTorch chooses, and
    FlexAttention runs where no other kernel is efficient. sinks: (heads,), scores of one more key, of which the value is 0, so
    that the weights of a query may sum to less than 1 (Xiao et al., arXiv:2309.17453; learned, as in arXiv:2508.10925,
    section 2.2).
    """
    plain = softcap is None and sinks is None
    if backend == TILES:
        assert mask is None and plain, "TILES computes causal attention without a softcap and sinks"
        return _attend_by_tiles(q, k, v, scale)
    gqa = k.shape[1] != q.shape[1]
    options: Any = None
    if backend == FLEX_FLASH:  # for masks that are not FlexAttention's, it is no choice
        backend, options = None, {"BACKEND": "FLASH"}
    if backend is None and (isinstance(mask, BlockMask) or (not plain and q.is_cuda and mask is None)):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        modify = _modified(softcap, causal=mask is None)
        if sinks is None:
            return flex(q, k, v, score_mod=modify, block_mask=mask, scale=scale, enable_gqa=gqa, kernel_options=options)
        wanted = AuxRequest(lse=True)
        out, found = flex(q, k, v, score_mod=modify, block_mask=mask, scale=scale, enable_gqa=gqa, return_aux=wanted)
        # the share of the real keys in the denominator: exp(lse) / (exp(lse) + exp(sink))
        return out * (found.lse - sinks[:, None]).sigmoid()[..., None].type_as(out)
    if isinstance(mask, BlockMask):
        mask = _dense(mask)
    if plain:
        if backend is None and gqa and mask is not None and q.is_cuda:
            return _attend_by_groups(q, k, v, mask, scale)
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
        if gqa and backend == SDPBackend.EFFICIENT_ATTENTION:  # it has no grouped-query attention
            k, v, gqa = *(part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v)), False
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(len(q), -1, q.shape[-2], 1).type_as(scores)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32).type_as(q)[..., : k.shape[-2]] @ v


def _attend_by_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Grouped queries under a dense mask: the queries of all heads that share keys are more queries of one head.

    CUDA's kernels that take a dense mask know no grouped queries, so PyTorch would repeat keys and values and hold all scores.
    """
    groups = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)  # (batch, kv heads, groups x queries, head_dim)
    result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale)
    return result.unflatten(2, (groups, -1)).flatten(1, 2)


def _attend_by_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention, one tile of queries at a time over the keys that the tile attends to.

    When compiled, it is faster than the CPU flash kernel for a few hundred tokens in bfloat16, because the blocks of that
    kernel are too large for them. It is slower for long sequences.
    """
    groups, length, scale = q.shape[1] // k.shape[1], q.shape[2], scale or q.shape[-1] ** -0.5
    # (batch, kv heads, queries x groups, head_dim): the rows of a tile are neighbors, so a tile is a view
    rows = q.unflatten(1, (-1, groups)).transpose(2, 3).flatten(2, 3)
    key, tiles = torch.arange(length, device=q.device), []
    query = torch.arange(length * groups, device=q.device) // groups
    for start in range(0, length, _TILE):
        stop = min(start + _TILE, length)
        part = slice(start * groups, stop * groups)
        weights = _TileWeights.apply(rows[:, :, part], k[:, :, :stop], query[part, None] >= key[:stop], scale)
        tiles.append(weights @ v[:, :, :stop])
    return torch.cat(tiles, dim=2).unflatten(2, (length, groups)).transpose(2, 3).flatten(1, 2)


class _TileWeights(torch.autograd.Function):
    """Softmax of the float32 scores of q (..., queries, head_dim) and k (..., keys, head_dim), in the precision of q.

    Autograd would keep float32 weights and multiply float32 gradients of the scores. This keeps the rounded weights, which the
    product with the values keeps anyway, and rounds those gradients, as flash attention does.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
        scores = q.float() @ k.float().transpose(-2, -1) * scale
        weights = cast_result(torch.where(visible, scores, -math.inf).softmax(dim=-1), q.dtype)
        ctx.save_for_backward(q, k, weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, k, weights = ctx.saved_tensors
        weights = weights.float()
        weighted = weights * gradient
        of_scores = ((weighted - weights * weighted.sum(dim=-1, keepdim=True)) * ctx.scale).type_as(q)
        return of_scores @ k, of_scores.transpose(-2, -1) @ q, None, None


def _dense(mask: BlockMask) -> Tensor:
    """A BlockMask as a bool tensor (batch, 1, queries, keys)."""
    rows, _, queries, keys = mask.shape
    row, query, key = (torch.arange(count, device=mask.kv_indices.device) for count in (rows, queries, keys))
    return mask.mask_mod(row[:, None, None, None], row.new_zeros(()), query[:, None], key)


def _modified(softcap: float | None, causal: bool) -> Callable[..., Tensor] | None:
    """The softcap as a score_mod of FlexAttention, which without a block mask needs the causal mask here (see `with_mask`)."""

    def modify(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return torch.where(query >= key, score, -math.inf) if causal else score

    return modify if causal or softcap is not None else None


# ------------------------------------------------------------------------------------------------------------ the module


class AttentionCore(nn.Module):
    """The base of every attention module: masks, caches and kernels, without projections or positions.

    n_heads, n_kv_heads: of the whole model. head_dim: of queries and keys. value_dim: of values and of the result; None:
    head_dim. scale, softcap: see `attend`. sinks: learns a sink for each head; in the sharding table it is "features".
    """

    sinks: Tensor | None

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.scale, self.softcap = scale, softcap
        self.sinks = nn.Parameter(torch.empty(n_heads)) if sinks else None
        # The `backend` of `attend` in training: (for plain causal attention, with a mask).
        self.backends: tuple[Backend | None, Backend | None] = (None, None)

    @property
    def plain(self) -> bool:
        """Whether every kernel computes it: the weights are a softmax of the scores as they are."""
        return self.softcap is None and self.sinks is None

    def core(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo) -> Tensor:
        """The only place for masks, caches and kernels. q, k: (batch, seq, heads, head_dim); v and the result: value_dim."""
        gathers_on_gpu = seq.split is not None and seq.split.method == "gather" and q.is_cuda
        assert seq.mask is not None or (seq.documents is None and seq.cache is None and not gathers_on_gpu), (
            "Model.forward must build the mask of the documents: seq = with_mask(seq)"
        )
        sinks = None if self.sinks is None else local_weight(self.sinks)
        if seq.split is None:
            return self._core_of_sequence(q, k, v, seq, sinks)
        if seq.split.method == "gather":
            return self._core_over_ranks(q, k, v, seq, seq.split, sinks)
        q, k, v = (sequence_to_heads(x, seq.split) for x in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(seq.split.mesh.size())[seq.split.mesh.get_local_rank()]
        return heads_to_sequence(self._core_of_sequence(q, k, v, seq, sinks), seq.split)

    def _core_of_sequence(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo, sinks: Tensor | None) -> Tensor:
        """`core` where this rank has all positions of the sequence."""
        causal, masked = self.backends
        backend = causal if seq.mask is None else masked
        if seq.cache is not None:
            k, v, backend = *seq.cache.extend(self, k, v, seq.positions), None
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, seq.mask, self.scale, self.softcap, backend, sinks).transpose(1, 2)

    def _core_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, seq: SeqInfo, split: Split, sinks: Tensor | None) -> Tensor:
        """`core` where this rank has only some positions of the sequence."""
        both = gather_sequence(torch.cat([k, v], dim=-1), split)  # one collective
        q, both = q.transpose(1, 2), both.transpose(1, 2)
        k, v = both.split([k.shape[-1], v.shape[-1]], dim=-1)
        causal, masked = self.backends
        if seq.mask is not None:
            return attend(q, k, v, seq.mask, self.scale, self.softcap, masked, sinks).transpose(1, 2)
        if causal in (None, SDPBackend.FLASH_ATTENTION) and self.plain and self.value_dim == self.head_dim:
            return attend_by_parts(q, k, v, split, self.scale).transpose(1, 2)
        mask = dense_mask(q.new_zeros(1, split.length), None, split.positions)
        return attend(q, k, v, mask, self.scale, self.softcap, causal, sinks).transpose(1, 2)


class Attention(AttentionCore):
    """Causal grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    qkv_bias: adds biases to queries, keys and values. scale, softcap: see `attend`. sinks: see `AttentionCore`.
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
        sinks: bool = False,
    ):
        super().__init__(n_heads, n_kv_heads, head_dim, scale=scale, softcap=softcap, sinks=sinks)
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo) -> Tensor:
        q, k, v = self.project(x)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        return self.wo(self.core(q, k, v, seq).flatten(-2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (batch, seq, dim), before RoPE: (batch, seq, heads, head_dim) each."""
        return self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))

    def split(self, x: Tensor) -> Tensor:
        # -1: under tensor parallelism, each rank has only its share of the heads
        return x.unflatten(-1, (-1, self.head_dim))
