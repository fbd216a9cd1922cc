"""Text from a model: prompts of any lengths side by side, with a cache of keys and values.

The model may be whole, split by tensor parallelism, or one that is being trained (FSDP2). All ranks call this together with the
same arguments and return the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.blocks import Cache, SeqInfo
from titanlite.data.tokenizer import LoadedTokenizer
from titanlite.errors import UserError
from titanlite.validation import evaluating

_PREFILL = 512  # tokens of a prompt that go through the model at a time, which bounds the memory of its mask


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
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, end: int | None, sampling: Sampling, tp: int = 1
) -> list[list[int]]:
    """At most `tokens` new ids for each prompt, which has at least one; what follows the id `end`, and itself, is left out.

    tp: over how many ranks the model's sequence is split, to which a step's width must be a multiple.
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
        _prefill(model, prompts, cache, tp, device)
        for _ in range(tokens):
            # A step of `tp` tokens, of which the first counts; what the others leave in the cache is overwritten later.
            positions = places + torch.arange(tp)
            logits = _logits(model, torch.nn.functional.pad(last, (0, tp - 1)), positions, cache, device)
            chosen = draw(logits, sampling, randoms)
            for row in sorted(going):
                if chosen[row] == end:
                    going.remove(row)
                else:
                    found[row].append(chosen[row])
            if not going:
                break
            last, places = torch.tensor(chosen)[:, None], places + 1
    return found


def _prefill(model: nn.Module, prompts: Sequence[Sequence[int]], cache: Cache, tp: int, device: torch.device) -> None:
    """Puts all but the last token of every prompt into the cache; a shorter prompt's row is filled up with anything."""
    longest = max(len(prompt) for prompt in prompts) - 1
    width = -(-_PREFILL // tp) * tp
    rows = torch.zeros(len(prompts), -(-longest // tp) * tp, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt) - 1] = torch.tensor(prompt[:-1], dtype=torch.int64)
    for first in range(0, longest, width):
        part = rows[:, first : first + width]
        positions = torch.arange(first, first + part.shape[1]).expand(part.shape)
        _hidden(model, part, positions, cache, device)


def _hidden(model: nn.Module, tokens: Tensor, positions: Tensor, cache: Cache, device: torch.device) -> Tensor:
    cache.reserve(int(positions.max()) + 1)
    return model(tokens.to(device), SeqInfo(positions.to(device), cache=cache))


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor, cache: Cache, device: torch.device) -> Tensor:
    """Of each row's first token: (rows, vocabulary) float32 on the CPU, so that every device draws alike."""
    return model.head(_hidden(model, tokens, positions, cache, device))[:, 0].float().cpu()


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
