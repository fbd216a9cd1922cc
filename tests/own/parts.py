"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""


def inverse_sqrt(step: int, start: int, end: int, power: float = 0.5) -> float:
    """The share of the rate that is left: 1.0 where the decay starts."""
    return (max(1, start) / step) ** power


def smoothed(logits, labels, share: float = 0.1):
    """Cross entropy, of which a share is that of all tokens alike. logits (tokens, vocab) float32; labels (tokens,)."""
    log_probabilities = logits.log_softmax(dim=-1)
    wanted = log_probabilities.gather(1, labels[:, None])[:, 0]
    return -(1 - share) * wanted - share * log_probabilities.mean(dim=-1)


def mean_square(model, microbatch):
    """The mean square of each weight matrix. A rank sums its own shards."""
    sums = {}
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            shard = (p.to_local() if hasattr(p, "to_local") else p).float()
            sums[f"mean_square/{name}"] = shard.square().sum().item(), shard.numel()
    return sums


def logit_entropy(model, microbatch, rows: int = 1):
    """The mean entropy of the predictions, in nats, of the first rows of the microbatch."""
    if model.pipeline is not None:
        return {}  # a stage cannot run alone
    hidden = model(microbatch.inputs, microbatch.seq)
    logs = model.head(hidden[:rows]).float().log_softmax(dim=-1)
    entropies = -(logs.exp() * logs).sum(dim=-1)
    return {"logit_entropy": (entropies.sum().item(), entropies.numel())}


def after_step(step, model, optimizer):
    """Keeps the weights of all norms at 0.5 or more."""
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.clamp_(min=0.5)


def at_report(step, values):
    """How many tokens a day of this speed has."""
    return {"tokens_per_day": values["tokens_per_second"] * 24 * 3600}
