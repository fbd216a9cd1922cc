"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""


def inverse_sqrt(step: int, start: int, end: int, power: float = 0.5) -> float:
    """The share of the rate that is left: 1.0 where the decay starts."""
    return (max(1, start) / step) ** power
