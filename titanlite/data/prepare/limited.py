"""A tokenizer from elsewhere in commands and ranks: a worker process, which `limits` ends, tries it out, encodes and decodes.

A file is tried out once; the cache folder remembers its contents. Then the process of the command loads it, for its tables. The
worker starts with the first text. It imports little: it starts in 0.1 s, and a request takes 50 microseconds more than the same
work in this process.
"""

import contextlib
import hashlib
import json
import os
import reprlib
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from titanlite.data.prepare import limits
from titanlite.errors import UserError
from titanlite.files import cache_folder
from titanlite.launch import children

# -I: neither the working folder nor the environment decides what is imported; the modules of this process do.
_START = "import sys; _, parent, seconds, size, *sys.path = sys.argv; from titanlite.data.prepare import limited; "
_CODE = f"{_START}limited.serve(int(parent), float(seconds), int(size))"


class LimitedTokenizer:
    """A tokenizer whose `encode` and `decode` have the limits of a document."""

    def __init__(self, tokenizer: Tokenizer, source: str = ""):
        """source: its file; empty: titanlite's own tokenizer, which needs no limits."""
        self.source = source
        self.unlimited = tokenizer  # for its tables, and for the workers of the data preparation
        self._worker: _Worker | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: special tokens are recognised in it, none are added. Raises UserError."""
        return self._use("encode", text, f"the text {reprlib.repr(text)}")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Raises UserError."""
        return self._use("decode" if skip_special_tokens else "decode all", list(ids), f"the ids {reprlib.repr(list(ids))}")

    def _use(self, action: str, argument: Any, what: str) -> Any:
        if not self.source:
            result, fault = _attempt(self.unlimited, action, argument)
        else:
            worker, self._worker = self._worker or self._start(), None  # after an exception another one starts
            result, fault = worker.request(action, argument, what)
            self._worker = worker
        if fault is not None:
            source = self.source or "titanlite's own"
            raise UserError(f"{what}: the tokenizer cannot {action.split()[0]} it: {fault} ({source})")
        return result

    def _start(self) -> "_Worker":
        worker = _Worker(self.source)
        worker.request("load", self.unlimited.to_str(), "its loading")
        return worker


def try_out(action: str, text: str, source: str) -> None:
    """Loads a tokenizer ("tokenizer") or a chat template ("template") in a worker, unless it has passed there before.

    Raises UserError where it takes more than the limits. Other faults are not reported: loading it in this process finds them.
    text: of the file `source`.
    """
    key = f"{action} {limits.DOCUMENT} {tokenizers.__version__} {text}".encode(errors="surrogatepass")
    passed = cache_folder() / f"tried-{hashlib.blake2b(key, digest_size=16).hexdigest()}"
    if passed.exists():
        return
    worker = _Worker(source)
    try:
        _, fault = worker.request(action, text, "its loading")
    finally:
        worker.end()
    if fault is None:
        with contextlib.suppress(OSError):  # without a cache folder, each start tries it again
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def decoded_vocabulary(tokenizer: Tokenizer) -> tuple[dict[str, int], dict[str, bool], str, list[str]]:
    """(ids without the special ones, of added tokens whether they are special, the text of the first id, for each id the text
    of the first one and it).
    """
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    vocabulary = {token: number for token, number in tokenizer.get_vocab().items() if not added.get(token)}
    first = next(iter(vocabulary.values()))
    pairs = [[first, number] for number in vocabulary.values()]
    texts = tokenizer.decode_batch(pairs, skip_special_tokens=False)
    return vocabulary, added, tokenizer.decode([first], skip_special_tokens=False), texts


# ------------------------------------------------------------------------------------------------------------ the process


class _Worker:
    """A process that answers requests, one line of JSON each."""

    def __init__(self, source: str):
        self.source, self.limits = source, limits.DOCUMENT
        seconds, size = map(str, self.limits)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, str(os.getpid()), seconds, size, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library prints a backtrace beside its exceptions
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.end = weakref.finalize(self, _end, self.process)

    def request(self, action: str, argument: Any, what: str) -> tuple[Any, str | None]:
        """(what the action returns, or its fault). Raises UserError, which names `what`, where the process has ended."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended: so does reading its answers
            self.process.stdin.write(json.dumps([action, argument]).encode() + b"\n")
            self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            code = self.process.wait()
            reason = self.limits.excess(code) or f"has ended with exit code {code}, perhaps because memory ran out"
            raise UserError(f"{what}: the tokenizer, or its chat template, {reason} ({self.source})")
        result, fault = json.loads(answer)
        return result, fault


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(BrokenPipeError):  # a request that it has not read
            pipe.close()


def serve(parent: int, seconds: float, size: int) -> None:
    """The worker's main function: requests come from its standard input. It ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C, which the command handles
    children.end_with_parent(parent)
    limit, tokenizer = limits.Limits(seconds, size), Tokenizer(tokenizers.models.BPE())
    for line in sys.stdin.buffer:
        action, argument = json.loads(line)
        if action == "template":
            pass  # takes 0.5 s, which is no work on the file
        try:
            with limit.on(len(line) if action in _USES else 0):  # a large file gets no more time than any other
                answer = _attempt(tokenizer, action, argument)
        except MemoryError:
            os.abort()  # as the library ends by itself
        if action == "load":
            tokenizer, answer = answer[0], (None, answer[1])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _attempt(tokenizer: Tokenizer, action: str, argument: Any) -> tuple[Any, str | None]:
    """(what an action returns, None), or (None, its fault)."""
    try:
        return (_USES | _LOADS)[action](tokenizer, argument), None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        return None, str(error)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = False  # a document's special tokens are text, a prompt's are not
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = before


def _try_tokenizer(_: Tokenizer, text: str) -> None:
    """All that is done with a tokenizer outside of a worker."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode("")
    decoded_vocabulary(tokenizer)


def _try_template(tokenizer: Tokenizer, text: str) -> None:
    from titanlite.data.prepare.chat import ChatTemplate

    ChatTemplate(text, {}, tokenizer)


_Action = Callable[[Tokenizer, Any], Any]
_USES: dict[str, _Action] = {
    "encode": _encode,
    "decode": lambda tokenizer, ids: tokenizer.decode(ids),
    "decode all": lambda tokenizer, ids: tokenizer.decode(ids, skip_special_tokens=False),
}
_LOADS: dict[str, _Action] = {
    "load": lambda _, text: Tokenizer.from_str(text),
    "tokenizer": _try_tokenizer,
    "template": _try_template,
}
