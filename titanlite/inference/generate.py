"""Generation and scoring with a KV cache, for batches of texts of different lengths.

The model may be unsharded, split by tensor parallelism, or in training (FSDP2). All ranks call these functions together with
the same arguments and get the same results.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.attention import Cache, SeqInfo
from models.decoder import Decoder
from models.rope import TextCache
from titanlite.data.tokenizer import LoadedTokenizer
from titanlite.ground.errors import UserError, phase
from titanlite.parallel.fsdp import evaluating
from titanlite.registry.limits import no_generation

_PREFILL = 512  # tokens of each text per forward pass of the prefill, which bounds the memory of masks and logits


class Sampling(NamedTuple):
    """How the next token is sampled."""

    temperature: float = 1.0  # logits are divided by it; 0: greedy
    top_k: int = 0  # only the k likeliest tokens are sampled; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability (Holtzman et al., arXiv:1904.09751)
    seed: int = 0  # prompt number i is sampled with a generator seeded by (seed, i), independent of the batch


@phase("generating")
def continue_texts(model: Decoder, loaded: LoadedTokenizer, texts: Sequence[str], tokens: int, sampling: Sampling) -> list[str]:
    """Each text, continued by at most `tokens` tokens. It begins as a document in training does; an empty one with the
    end-of-text token.

    The tokenizer recognizes special tokens. Raises UserError for ids outside of the model's vocabulary, and for a text that the
    tokenizer cannot encode.
    """
    prompts = [loaded.begun(loaded.encode(text)) or [loaded.end_of_text] for text in texts]
    if (largest := max(max(ids) for ids in prompts)) >= (vocabulary := model.config.vocab_size):
        raise UserError(f"the tokenizer gives id {largest}, but the model has a vocabulary of {vocabulary}")
    new = generate(model, prompts, tokens, loaded.ends, sampling)
    # decoded with the prompt, because the first word of a separate text may lose the space before it
    both = [(loaded.decode(p, skip_special_tokens=False), loaded.decode(p + n, skip_special_tokens=False))
            for p, n in zip(prompts, new, strict=True)]  # fmt: skip
    return [text + whole[len(prompt) :] for text, (prompt, whole) in zip(texts, both, strict=True)]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Collection[int],
    sampling: Sampling,
    is_done: Callable[[list[int]], bool] = lambda new: False,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """At most `tokens` new ids for each prompt of at least one id, up to but not including the first of `ends`.

    is_done: whether generation of a row may stop, given its new ids. numbers: of the prompts, which seed their generators
    (default: 0, 1, 2, ...).
    """
    last = torch.tensor([[prompt[-1]] for prompt in prompts])
    position = torch.tensor([[len(prompt) - 1] for prompt in prompts])  # (prompts, 1), of the last token of each row
    generators = [torch.Generator().manual_seed(_mixed(sampling.seed, number)) for number in numbers or range(len(prompts))]
    new: list[list[int]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    real = torch.ones_like(last, dtype=torch.bool)
    cache = _open_cache(model, [len(prompt) + tokens - 1 for prompt in prompts])  # the last token is not read
    # a compiled block would be recompiled for every shape of a prompt and of the cache
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        _prefill(model, [prompt[:-1] for prompt in prompts], cache)
        for _ in range(tokens):
            logits = _logits(model, last, position, real, cache)
            chosen = draw(logits[:, 0].float().cpu(), sampling, generators)  # on CPU, so that all devices draw the same
            for row in sorted(active):
                if chosen[row] not in ends:
                    new[row].append(chosen[row])
                if chosen[row] in ends or is_done(new[row]):
                    active.remove(row)
            if not active:
                break
            last, position = torch.tensor(chosen)[:, None], position + 1
    return new


def score(model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """The log-probability of each continuation after its context, and whether it equals that of greedy sampling. The logarithm
    is natural, summed over the tokens. Contexts and continuations have at least one id.
    """
    inputs, real = _rows([[context[-1], *new[:-1]] for context, new in pairs])
    targets, _ = _rows([new for _, new in pairs])
    position = torch.tensor([[len(context) - 1] for context, _ in pairs])
    sums = torch.zeros(len(pairs), dtype=torch.float64)
    greedy = torch.ones(len(pairs), dtype=torch.bool)
    cache = _open_cache(model, [len(context) + len(new) - 1 for context, new in pairs])
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        _prefill(model, [context[:-1] for context, _ in pairs], cache)
        for columns in _parts(inputs):
            logits = _logits(model, inputs[:, columns], position + columns.start, real[:, columns], cache).float()
            labels, counted = targets[:, columns].to(logits.device), real[:, columns].to(logits.device)
            target_logprobs = logits.log_softmax(dim=-1).gather(-1, labels[..., None])[..., 0]
            sums += torch.where(counted, target_logprobs, 0.0).double().sum(1).cpu()
            greedy &= ((logits.argmax(dim=-1) == labels) | ~counted).all(1).cpu()
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))


def _open_cache(model: Decoder, lengths: Sequence[int]) -> Cache:
    """An empty cache. lengths: tokens of each row, at most. Raises UserError for a model that cannot generate."""
    if reason := no_generation(model.limits):
        raise UserError(f"{_family_of(model)}: cannot generate or score: it {reason}")
    return TextCache(torch.tensor(lengths, device=_device_of(model)))


def _device_of(model: Decoder) -> torch.device:
    """Where a model computes; with parallelism.cpu_offload its parameters are elsewhere."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def _family_of(model: Decoder) -> str:
    """The module of the model's class; FSDP2 and others substitute subclasses of their own."""
    modules = (kind.__module__ for kind in type(model).__mro__)
    return next(name for name in modules if name.partition(".")[0] not in ("torch", "titanlite"))


def _prefill(model: Decoder, texts: Sequence[Sequence[int]], cache: Cache) -> None:
    """Writes texts, which may be empty, into the cache from position 0 on. The slots after a shorter text hold padding."""
    rows, real = _rows(texts)
    for columns in _parts(rows):
        first = torch.full((len(rows), 1), columns.start)
        _hidden(model, rows[:, columns], first, real[:, columns], cache)


def _rows(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(the texts padded with zeros, int64; False for this padding, bool), (texts, length of the longest) each."""
    lengths = [len(text) for text in texts]
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = torch.zeros(real.shape, dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int64)
    return rows, real


def _parts(rows: Tensor) -> list[slice]:
    """The columns of each forward pass."""
    return [slice(first, first + _PREFILL) for first in range(0, rows.shape[1], _PREFILL)]


def _hidden(model: Decoder, tokens: Tensor, first: Tensor, real: Tensor, cache: Cache) -> Tensor:
    """Hidden states of tokens (batch, seq) at positions from `first` (batch, 1) on; real: (batch, seq) bool, False for padding.

    Tensor parallelism needs a multiple of its degree: more padding follows, which later tokens overwrite in the cache.
    """
    device = _device_of(model)
    fill = (0, -tokens.shape[1] % model.tensor_parallel)
    tokens, real = F.pad(tokens, fill), F.pad(real, fill)
    positions = first + torch.arange(tokens.shape[1])
    cache.reserve(int(positions.max()) + 1)
    cache.real = real.to(device)
    hidden = model(tokens.to(device), SeqInfo(positions.to(device), cache=cache))
    if cache.empty:
        remedy = "use AttentionCore.core or seq.cache.state (docs/reference/styles.md), or LIMITS = {'generates': False}"
        raise UserError(f"{_family_of(model)}: its layers store nothing in seq.cache; {remedy}")
    return hidden


def _logits(model: Decoder, tokens: Tensor, first: Tensor, real: Tensor, cache: Cache) -> Tensor:
    assert model.head is not None, "a pipeline stage without head has no logits"
    return model.head(_hidden(model, tokens, first, real, cache))[:, : tokens.shape[1]]


def draw(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """One id for each row of logits (rows, vocabulary) float32."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        sorted_logits, order = logits.sort(dim=-1, descending=True)
        probabilities = sorted_logits.softmax(dim=-1)
        excluded = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p  # by the sum over all likelier tokens
        excluded[..., 0] = False  # also where top_p is 0
        logits = logits.scatter(-1, order, sorted_logits.masked_fill(excluded, -torch.inf))
    rows = zip(logits.softmax(dim=-1), generators, strict=True)
    return [int(torch.multinomial(row, 1, generator=generator)) for row, generator in rows]


def _mixed(seed: int, number: int) -> int:
    """The seed of a prompt, far from those of its neighbors."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**63
