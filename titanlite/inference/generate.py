"""Text from a model, and what it thinks of a text: prompts of any lengths side by side, with a cache of keys and values.

The model may be whole, split by tensor parallelism, or one that is being trained (FSDP2). All ranks call this together with the
same arguments and return the same tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Cache, SeqInfo
from titanlite.data.tokenizer import LoadedTokenizer
from titanlite.errors import UserError
from titanlite.parallel.fsdp import evaluating

_PREFILL = 512  # tokens of a text that go through the model at a time, which bounds the memory of masks and logits


class Sampling(NamedTuple):
    """How the next token is drawn."""

    temperature: float = 1.0  # logits are divided by it; 0: the likeliest token is taken
    top_k: int = 0  # only so many of the likeliest tokens can be drawn; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability (Holtzman et al., arXiv:1904.09751)
    seed: int = 0  # prompt i is continued by random numbers of (seed, i), whatever the others are


def continue_texts(
    model: nn.Module, vocabulary: int, loaded: LoadedTokenizer, texts: Sequence[str], tokens: int, sampling: Sampling, tp: int
) -> list[str]:
    """Every text with at most `tokens` tokens more. An empty text begins where a document ends, as in training.

    Special tokens are recognised, and those that the tokenizer puts before a text, such as Llama's, are put there. Raises
    UserError where the tokenizer has ids that the model has not.
    """
    tokenizer, end = loaded.tokenizer, loaded.end_of_text
    tokenizer.encode_special_tokens = False
    prompts = [tokenizer.encode(text).ids or [end] for text in texts]
    if (largest := max(max(ids) for ids in prompts)) >= vocabulary:
        raise UserError(f"the tokenizer gives id {largest}, and the model has a vocabulary of {vocabulary}")
    new = generate(model, prompts, tokens, end, sampling, tp)
    # decoded behind the prompt, since by itself a first word may lose the space before it
    both = [(tokenizer.decode(p, skip_special_tokens=False), tokenizer.decode(p + n, skip_special_tokens=False))
            for p, n in zip(prompts, new, strict=True)]  # fmt: skip
    return [text + whole[len(prompt) :] for text, (prompt, whole) in zip(texts, both, strict=True)]


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    end: int | None,
    sampling: Sampling,
    tp: int = 1,
    enough: Callable[[list[int]], bool] = lambda new: False,
) -> list[list[int]]:
    """At most `tokens` new ids for each prompt, which has at least one; what follows the id `end`, and itself, is left out.

    tp: over how many ranks the model's sequence is split, of which a step's width must be a multiple. enough: tells of a row's
    new ids whether it needs no more.
    """
    device = next(model.parameters()).device
    last = torch.tensor([[prompt[-1]] for prompt in prompts])
    places = torch.tensor([[len(prompt) - 1] for prompt in prompts])  # (prompts, 1), the position of each row's last token
    randoms = [torch.Generator().manual_seed(_mixed(sampling.seed, row)) for row in range(len(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    cache = Cache()
    # a compiled block would be compiled anew for every shape of a prompt and of the cache
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        _prefill(model, [prompt[:-1] for prompt in prompts], cache, tp, device)
        for _ in range(tokens):
            # A step of `tp` tokens, of which the first counts; what the others leave in the cache is overwritten later.
            positions = places + torch.arange(tp)
            logits = model.head(_hidden(model, F.pad(last, (0, tp - 1)), positions, cache, device))
            chosen = draw(logits[:, 0].float().cpu(), sampling, randoms)  # on the CPU, so that every device draws alike
            for row in sorted(going):
                if chosen[row] != end:
                    found[row].append(chosen[row])
                if chosen[row] == end or enough(found[row]):
                    going.remove(row)
            if not going:
                break
            last, places = torch.tensor(chosen)[:, None], places + 1
    return found


class Score(NamedTuple):
    """What a model thinks of a continuation."""

    log_probability: float  # natural, of all its tokens together
    likeliest: bool  # whether each of its tokens is the likeliest one


def score(model: nn.Module, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], tp: int = 1) -> list[Score]:
    """Of each (context, continuation), of at least one id each, what the model thinks of the continuation."""
    device = next(model.parameters()).device
    inputs = _rows([[context[-1], *new[:-1]] for context, new in pairs], tp)
    wanted = _rows([list(new) for _, new in pairs], tp).to(device)
    lengths = torch.tensor([len(new) for _, new in pairs], device=device)
    places = torch.tensor([[len(context) - 1] for context, _ in pairs])
    sums = torch.zeros(len(pairs), dtype=torch.float64)
    likeliest = torch.ones(len(pairs), dtype=torch.bool)
    cache = Cache()
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        _prefill(model, [context[:-1] for context, _ in pairs], cache, tp, device)
        for columns in _parts(inputs.shape[1], tp):
            hidden = _hidden(model, inputs[:, columns], places + torch.arange(columns.start, columns.stop), cache, device)
            logits, labels = model.head(hidden).float(), wanted[:, columns]
            counted = torch.arange(columns.start, columns.stop, device=device) < lengths[:, None]
            found = logits.log_softmax(dim=-1).gather(-1, labels[..., None])[..., 0]
            sums += torch.where(counted, found, 0.0).double().sum(1).cpu()
            likeliest &= ((logits.argmax(dim=-1) == labels) | ~counted).all(1).cpu()
    return [Score(*both) for both in zip(sums.tolist(), likeliest.tolist(), strict=True)]


def _prefill(model: nn.Module, texts: Sequence[Sequence[int]], cache: Cache, tp: int, device: torch.device) -> None:
    """Puts texts, which may be empty, into the cache from position 0 on; behind a shorter one it puts anything."""
    rows = _rows(texts, tp)
    for columns in _parts(rows.shape[1], tp):
        positions = torch.arange(columns.start, columns.stop).expand(len(rows), -1)
        _hidden(model, rows[:, columns], positions, cache, device)


def _rows(texts: Sequence[Sequence[int]], tp: int) -> Tensor:
    """(texts, length of the longest, as a multiple of tp) int64, filled up with zeros."""
    rows = torch.zeros(len(texts), -(-max(map(len, texts)) // tp) * tp, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int64)
    return rows


def _parts(width: int, tp: int) -> list[slice]:
    """The columns that go through the model at a time."""
    step = -(-_PREFILL // tp) * tp
    return [slice(first, min(first + step, width)) for first in range(0, width, step)]


def _hidden(model: nn.Module, tokens: Tensor, positions: Tensor, cache: Cache, device: torch.device) -> Tensor:
    cache.reserve(int(positions.max()) + 1)
    return model(tokens.to(device), SeqInfo(positions.to(device), cache=cache))


def draw(logits: Tensor, sampling: Sampling, randoms: Sequence[torch.Generator]) -> list[int]:
    """One id for each row of logits (rows, vocabulary) float32."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        sorted_logits, order = logits.sort(dim=-1, descending=True)
        probabilities = sorted_logits.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # of what is likelier; of the likeliest 0, so it always stays
        logits = logits.scatter(-1, order, sorted_logits.masked_fill(before >= sampling.top_p, -torch.inf))
    return [
        int(torch.multinomial(row, 1, generator=random)) for row, random in zip(logits.softmax(dim=-1), randoms, strict=True)
    ]


def _mixed(seed: int, row: int) -> int:
    """A seed of each row's own, far from its neighbours'."""
    return (seed * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03) % 2**63
