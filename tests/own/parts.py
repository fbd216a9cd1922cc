"""Parts of one's own, as a user writes them from docs/guides/own_parts.md alone."""

from functools import partial

import numpy as np
import torch
from torch.utils.data import IterableDataset

from models.attention import AttentionCore, visibility
from models.split import gather_sequence
from titanlite.optim.whole_matrices import Redistribution
from titanlite.transforms.shards import local_part


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


class SpectralDescent(torch.optim.Optimizer):
    """Each matrix moves by its gradient, divided by its largest singular value; what is no matrix moves by the sign."""

    def __init__(self, params, lr: float, group=None):
        super().__init__(params, {"lr": lr})
        self.matrices = [p for each in self.param_groups for p in each["params"] if p.ndim == 2]
        self.whole = Redistribution(self.matrices, group)

    @torch.no_grad()
    def step(self, closure=None):
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        for bucket in self.whole.buckets([*range(len(self.matrices))]):
            matrices = [self.matrices[number] for number in bucket.parameters]
            directions = self.whole.map(bucket, [local_part(p.grad) for p in matrices], normalized)
            for p, direction in zip(matrices, directions, strict=True):
                local_part(p).sub_(direction, alpha=rates[p])
        for p, rate in rates.items():
            if p.ndim != 2:
                p.sub_(p.grad.sign(), alpha=rate)


def normalized(wholes):  # (matrices, rows, columns)
    return wholes / torch.linalg.matrix_norm(wholes, ord=2, keepdim=True).clamp(min=1e-12)


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


def mean_square(model, microbatches):
    """The mean square of each weight matrix. A rank sums its own shards."""
    sums = {}
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            shard = (p.to_local() if hasattr(p, "to_local") else p).float()
            sums[f"mean_square/{name}"] = shard.square().sum().item(), shard.numel()
    return sums


def logit_entropy(model, microbatches):
    """The mean entropy of the predictions, in nats."""
    if model.pipeline is not None:
        return {}  # a stage cannot run alone
    total, count = 0.0, 0
    for each in microbatches:
        for row in model(each.inputs, each.seq).split(1):  # logits are large
            logs = model.head(row).float().log_softmax(dim=-1)
            total -= (logs.exp() * logs).sum().item()
            count += logs.shape[:-1].numel()
    return {"logit_entropy": (total, count)}


def head_entropy(model, microbatches, every: int = 8):
    """The mean entropy of each head's attention weights, in nats, over the queries at every 8th position of the sequences.

    For causal attention without a window, a softcap or sinks.
    """
    found = {}  # (layer, first head of this rank) -> entropies (heads, queries) of each forward pass

    def watched(name, attention, q, k, v, seq):  # q, k, v: (batch, seq, heads, head_dim) of this rank, after RoPE
        where, keys = torch.arange(q.shape[1], device=q.device), k
        keys_at = where
        if seq.split is not None:  # context parallelism: this rank has some positions, and gathers the keys of all
            where, keys = seq.split.positions, gather_sequence(k, seq.split)
            keys_at = gather_sequence(where[None], seq.split)[0]
        chosen, heads = where % every == 0, q.shape[2]
        keys = keys.repeat_interleave(heads // k.shape[2], dim=2).float()
        scores = torch.einsum("bqhd,bkhd->hbqk", q[:, chosen].float(), keys) / attention.head_dim**0.5
        row = torch.arange(len(q), device=q.device)[:, None, None]
        seen = visibility(seq.documents, None)(row, None, where[chosen][:, None], keys_at)
        entropies = torch.special.entr(scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)).sum(dim=-1)
        first = torch.distributed.get_rank() % (attention.n_heads // heads) * heads  # tensor parallelism splits heads
        found.setdefault((name, first), []).append(entropies.flatten(1))
        return type(attention).core(attention, q, k, v, seq)

    parts = {name: each for name, each in model.layers.named_modules() if isinstance(each, AttentionCore)}
    for name, each in parts.items():
        each.core = partial(watched, name, each)
    if model.pipeline is not None:
        model.pipeline.evaluate(microbatches)
    else:
        for each in microbatches:
            model(each.inputs, each.seq)
    for each in parts.values():
        del each.core
    rows = {(name, first + i): row for (name, first), e in found.items() for i, row in enumerate(torch.cat(e, dim=1))}
    return {f"head_entropy/{name}.{head}": (row.sum().item(), row.numel()) for (name, head), row in rows.items()}


def after_step(step, model, optimizer):
    """Keeps the weights of all norms at 0.5 or more."""
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.clamp_(min=0.5)


def at_report(step, values):
    """How many tokens a day of this speed has."""
    return {"tokens_per_day": values["tokens_per_second"] * 24 * 3600}
