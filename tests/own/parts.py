"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""


def inverse_sqrt(step: int, start: int, end: int, power: float = 0.5) -> float:
    """The share of the rate that is left: 1.0 where the decay starts."""
    return (max(1, start) / step) ** power


def smoothed(logits, labels, share: float = 0.1):
    """Cross entropy, of which a share is that of all tokens alike. logits (tokens, vocab) float32; labels (tokens,)."""
    log_probabilities = logits.log_softmax(dim=-1)
    wanted = log_probabilities.gather(1, labels[:, None])[:, 0]
    return -(1 - share) * wanted - share * log_probabilities.mean(dim=-1)


def reverse_divergence(logits, labels, teacher_logits):
    """KL(student || teacher) of each token. logits, teacher_logits (tokens, vocab) float32."""
    student, teacher = logits.log_softmax(dim=-1), teacher_logits.log_softmax(dim=-1)
    return (student.exp() * (student - teacher)).sum(dim=-1)


def undemanding(logits, labels, share: float = 0.1, teacher_logits=None):
    """A loss that takes a teacher's logits and needs none."""
    return smoothed(logits, labels, share)
