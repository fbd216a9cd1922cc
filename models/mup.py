"""muP: learning rates and initial weights that carry over from a narrow model to a wider one, for a family's tables.

Yang et al., "Tensor Programs V", arXiv:2203.03466, in the form of table 3 with Adam, which needs no multiplier in the model:
m is width / base width. A matrix that maps width to width has 1 / sqrt(m) of the initial deviation at the base width, and 1 / m
of the learning rate. One that maps width to a fixed size (output projection, router) has 1 / m of both. Embeddings, norms and
biases keep theirs. Attention keeps its scale 1 / sqrt(head_dim), so all widths need the same head_dim: n_heads, n_kv_heads and
the hidden width of the feed-forward layer grow by m.
"""

from collections.abc import Sequence


def check_base(base_dim: int | None, tied_embeddings: bool) -> None:
    """Raises ValueError for a base width with tied embeddings: one matrix cannot have an embedding's rate and an output's."""
    if base_dim is not None and tied_embeddings:
        raise ValueError("mup_base_dim needs tied_embeddings = false: embedding and output have other rates and deviations")


def rates(dim: int, base_dim: int | None, hidden: Sequence[str], outputs: Sequence[str]) -> dict[str, float]:
    """`lr_scale`: factors on AdamW's rate. hidden, outputs: patterns of parameter names. base_dim None: the table is empty."""
    return {} if base_dim is None else dict.fromkeys([*hidden, *outputs], base_dim / dim)


def deviations(dim: int, base_dim: int | None, hidden: Sequence[str], outputs: Sequence[str]) -> dict[str, float]:
    """`init_scale`: factors on the deviation of the initial weights. Arguments as for `rates`."""
    if base_dim is None:
        return {}
    return dict.fromkeys(hidden, (base_dim / dim) ** 0.5) | dict.fromkeys(outputs, base_dim / dim)
