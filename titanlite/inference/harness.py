"""A model of ours for EleutherAI's lm-evaluation-harness, the package lm-eval, which brings tasks and their metrics along."""

from collections.abc import Iterator
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from titanlite.inference.generate import Sampling, generate, score
from titanlite.inference.load import Opened

_Pair = tuple[Any, list[int], list[int]]  # (the harness's own key, context, continuation)


class Harness(TemplateLM):
    """What the harness asks of a model. Texts are encoded as transformers' models are given them there.

    max_length: tokens that the model is shown at most; of a longer text the beginning is left out. batch_size: texts at a time.
    """

    def __init__(self, opened: Opened, max_length: int, batch_size: int):
        super().__init__()
        self._opened, self._max_length, self._batch_size = opened, max_length, batch_size
        self._tokenizer = opened.tokenizer.tokenizer
        self._tokenizer.encode_special_tokens = False

    @property
    def eot_token_id(self) -> int:
        return self._opened.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: what the tokenizer puts there, or else what ends the text before."""
        return next(iter(self._tokenizer.encode("").ids), self.eot_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        prefix = self._tokenizer.id_to_token(self.prefix_token_id)
        special = not string.startswith(prefix) if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, add_special_tokens=special).ids

    def _loglikelihood_tokens(self, requests: list[_Pair], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        for numbers in self._batches([len(context) + len(new) for _, context, new in requests], disable_tqdm):
            pairs = [self._shortened(*requests[number][1:]) for number in numbers]
            found |= zip(numbers, score(self._opened.model, pairs, self._opened.tp), strict=True)
        answers = [found[number] for number in range(len(requests))]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def _shortened(self, context: list[int], new: list[int]) -> tuple[list[int], list[int]]:
        """The model is shown all but the last token."""
        assert context and 0 < len(new) <= self._max_length
        return (context + new)[-(self._max_length + 1) : -len(new)], new

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs: list[_Pair] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._max_length, context_len=1)
            every = [(None, *make_disjoint_window(window)) for window in windows]
            pairs += every
            owners += [number] * len(every)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(pairs, disable_tqdm), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        found: dict[int, str] = {}
        for numbers in self._batches([len(context) for context in contexts], disable_tqdm):
            for asked in {repr(requests[number].args[1]): requests[number].args[1] for number in numbers}.values():
                alike = [number for number in numbers if requests[number].args[1] == asked]
                found |= zip(alike, self._texts([contexts[number] for number in alike], asked), strict=True)
        return [found[number] for number in range(len(requests))]

    def _texts(self, contexts: list[list[int]], asked: dict[str, Any]) -> list[str]:
        """Continuations up to the first of the texts that are to end them."""
        keys = normalize_gen_kwargs(asked)
        ends = handle_stop_sequences(keys.get("until"), None)
        tokens = min(keys["max_gen_toks"], self._max_length - 1)
        sampling = Sampling(keys.get("temperature", 0.0), keys.get("top_k") or 0, keys.get("top_p") or 1.0)

        def text_of(new: list[int]) -> str:
            return self._tokenizer.decode(new, skip_special_tokens=False)

        def enough(new: list[int]) -> bool:
            return any(end in text_of(new) for end in ends)

        prompts = [context[-(self._max_length - tokens) :] for context in contexts]
        new = generate(self._opened.model, prompts, tokens, self.eot_token_id, sampling, self._opened.tp, enough)
        texts = [text_of(ids) for ids in new]
        return [text[: min((text.find(end) for end in ends if end in text), default=len(text))] for text in texts]

    def _batches(self, lengths: list[int], quiet: bool) -> Iterator[list[int]]:
        """Numbers of requests, the longest first: what does not fit in memory is found out at once."""
        ordered = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        with tqdm(total=len(lengths), disable=quiet, unit="requests") as bar:
            for first in range(0, len(ordered), self._batch_size):
                batch = ordered[first : first + self._batch_size]
                yield batch
                bar.update(len(batch))
