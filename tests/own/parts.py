"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""

import numpy as np
import torch
from torch.utils.data import IterableDataset


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675: the sign of a mean of gradients."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.betas = betas

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                direction = torch.lerp(p.grad, state["mean"], self.betas[0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["mean"].lerp_(p.grad, 1 - self.betas[1])


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


class Sums:
    """Sums such as 12+30=42, of which the result is learned. Ids: the digits, 10 for +, 11 for =, 12 for the end."""

    def __init__(self, seq_len: int, digits: int = 2, count: int = 100_000):
        self.length, self.limit, self.count = seq_len + 1, 10**digits, count

    def __len__(self):
        return self.count

    def read(self, i: int):
        random = np.random.default_rng(i)
        ids, loss, ends = [], [], []
        while len(ids) < self.length:
            a, b = random.integers(self.limit, size=2)
            question = [*map(int, str(a)), 10, *map(int, str(b)), 11]
            answer = [*map(int, str(a + b)), 12]
            ids += question + answer
            loss += [False] * len(question) + [True] * len(answer)
            ends.append(len(ids))
        return ids[: self.length], loss[: self.length], [end for end in ends if end < self.length]


class Walks(IterableDataset):
    """Random walks over 13 ids."""

    def __init__(self, seq_len: int, rank: int, degree: int, seed: int = 0):
        self.length, self.rank, self.degree, self.seed, self.rows = seq_len + 1, rank, degree, seed, 0

    def __iter__(self):
        while True:
            random = np.random.default_rng([self.seed, self.rows * self.degree + self.rank])
            self.rows += 1  # before the row is given: the state is the one after it
            yield random.integers(3, size=self.length).cumsum() % 13

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]

    @staticmethod
    def reshard(states, degree):
        return [{"rows": sum(state["rows"] for state in states) // degree}] * degree


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
