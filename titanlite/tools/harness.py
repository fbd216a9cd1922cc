"""A model for EleutherAI's lm-evaluation-harness (the package lm-eval), which defines the tasks and their metrics."""

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from titanlite.ground.errors import UserError
from titanlite.inference.generate import Sampling, generate, score
from titanlite.launch.process import rank_and_world
from titanlite.tools.open_model import LoadedModel

log = logging.getLogger(__name__)

# What generate_until knows of a task's generation_kwargs, after lm-eval has given the aliases of max_gen_toks one name.
_OPTIONS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
_Pair = tuple[Any, list[int], list[int]]  # (cache key of lm-eval or None, context, continuation)


class Harness(TemplateLM):
    """The interface of lm-eval to a model. Texts are encoded as in lm-eval's `hf` model.

    max_length: the most tokens of a forward pass; longer texts are truncated on the left. batch_size: texts per forward pass.
    """

    def __init__(self, loaded: LoadedModel, max_length: int, batch_size: int):
        super().__init__()
        self._loaded, self._max_length, self._batch_size = loaded, max_length, batch_size

    @property
    def eot_token_id(self) -> int:
        return self._loaded.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """Precedes a text without context: as in lm-eval's `hf` model, the tokenizer's bos_token, or else the end of text."""
        named = self._loaded.tokenizer.bos_token
        return self.eot_token_id if named is None else named

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        prefix = self._loaded.tokenizer.spelled([self.prefix_token_id])
        special = not string.startswith(prefix) if add_special_tokens is None else add_special_tokens
        ids = self._loaded.tokenizer.encode(string)
        return self._loaded.tokenizer.begun(ids) if special else ids

    def _loglikelihood_tokens(self, requests: list[_Pair], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        ordered = Collator(requests, sort_fn=lambda request: -len(request[1]) - len(request[2]))
        scores: list[tuple[float, bool]] = []
        for batch in self._batches(ordered, disable_tqdm):
            scores += score(self._loaded.model, [self._shortened(*pair) for _, *pair in batch])
        answers = ordered.get_original(scores)
        for (key, *_pair), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        self._report([len(context) + len(new) > self._max_length + 1 for _, context, new in requests])
        return answers

    def _shortened(self, context: list[int], new: list[int]) -> tuple[list[int], list[int]]:
        """Truncates the context so that the input, all tokens but the last, has at most max_length tokens."""
        assert context and new
        if len(new) > self._max_length:
            raise UserError(f"--max-length {self._max_length}: a task has an answer of {len(new)} tokens")
        return (context + new)[-(self._max_length + 1) : -len(new)], new

    def _report(self, cut: Sequence[bool]) -> None:
        """Warns of requests that were truncated on the left: few-shot examples and the task's description are lost first."""
        if any(cut) and rank_and_world()[0] == 0:
            log.warning(
                "%s of %s requests were cut on the left to fit %s tokens; a higher --max-length reads more",
                f"{sum(cut):,}", f"{len(cut):,}", f"{self._max_length:,}",
            )  # fmt: skip

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs: list[_Pair] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._max_length, context_len=1)
            of_text = [(None, *make_disjoint_window(window)) for window in windows]
            pairs += of_text
            owners += [number] * len(of_text)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(pairs, disable_tqdm), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        for options in (normalize_gen_kwargs(request.args[1]) for request in requests):
            if options["max_gen_toks"] >= self._max_length:
                new = f"a task asks for {options['max_gen_toks']} new tokens, which leaves no room for a prompt"
                raise UserError(f"--max-length {self._max_length}: {new}")
            if unknown := [name for name in options if name not in _OPTIONS and (name, options[name]) != ("num_beams", 1)]:
                known = f"titanlite eval knows {', '.join(_OPTIONS)}"
                raise UserError(f'--tasks: a task sets "{unknown[0]}" in its generation_kwargs; {known}')
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        # Requests have numbers, so that those of a task with repeats, which are equal, are sampled independently.
        numbered = [(context, request.args[1], n) for n, (context, request) in enumerate(zip(contexts, requests, strict=True))]
        ordered = Collator(numbered, sort_fn=lambda each: -len(each[0]), group_by="gen_kwargs")  # by the generation options
        texts: list[str] = []
        ends = self._loaded.tokenizer.ends  # once: it reads a file
        for batch in self._batches(ordered, disable_tqdm):
            texts += self._continue([each[0] for each in batch], batch[0][1], ends, [each[2] for each in batch])
        room = [self._max_length - normalize_gen_kwargs(request.args[1])["max_gen_toks"] for request in requests]
        self._report([len(context) > most for context, most in zip(contexts, room, strict=True)])
        return ordered.get_original(texts)

    def _continue(
        self, contexts: Sequence[list[int]], options: dict[str, Any], ends: Collection[int], numbers: Sequence[int]
    ) -> list[str]:
        """The continuation of each context, up to the first stop sequence or one of the ids `ends`."""
        cfg: dict[str, Any] = {**normalize_gen_kwargs(options)}
        stops = handle_stop_sequences(cfg.get("until"), None)
        tokens = cfg["max_gen_toks"]
        sampling = Sampling(cfg.get("temperature", 0.0), cfg.get("top_k") or 0, cfg.get("top_p") or 1.0)

        def is_done(new: list[int]) -> bool:
            # with special tokens, which may be stop sequences
            text = self._loaded.tokenizer.decode(new, skip_special_tokens=False) if stops else ""
            return any(stop in text for stop in stops)

        prompts = [context[-(self._max_length - tokens) :] for context in contexts]
        new = generate(self._loaded.model, prompts, tokens, ends, sampling, is_done, numbers)
        texts = [self._loaded.tokenizer.decode(ids) for ids in new]
        return [text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))] for text in texts]

    def _batches(self, ordered: Collator, quiet: bool) -> Iterator[list[Any]]:
        """Batches of requests; the longest are first, so that a batch too large for memory fails at once."""
        with tqdm(total=len(ordered), disable=quiet, unit="requests") as bar:
            for batch in ordered.get_batched(self._batch_size):
                yield batch
                bar.update(len(batch))
