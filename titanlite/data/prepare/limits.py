"""What one document may take of a tokenizer or chat template from elsewhere: processor time and memory.

Both are programs: a template may loop for ever, a regular expression may try every way to split a text. No exception or timer
of Python interrupts the compiled code in which they run. So a worker limits itself, and the kernel ends it, whatever code it
is in; the command starts another worker. Timers and limits cost microseconds, as a short document does: so one limit is for
some hundred documents, and only documents that break it are encoded again, each under a limit of its own.
"""

import contextlib
import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import NamedTuple

_CHARACTERS_PER_SECOND = 20_000  # more time for long documents; tokenizers encode about a million on one core
_BYTES_PER_CHARACTER = 200  # more memory for long documents; an encoding takes about 100


class Limits(NamedTuple):
    """Of one document."""

    seconds: float = 60.0  # of processor time, which a busy machine or a suspended job does not use up
    bytes: int = 4 * 2**30  # beyond what the worker holds already

    def of_many(self) -> "Limits":
        """Of documents that are encoded together, in about 0.1 s. Less time, since the one that breaks it spends it again."""
        return self._replace(seconds=self.seconds / 10)

    @contextlib.contextmanager
    def on(self, characters: int) -> Iterator[None]:
        """Around the work on documents of this length. Too much time ends this process by SIGPROF; too much memory raises
        MemoryError, or ends it by SIGABRT.
        """
        signal.setitimer(signal.ITIMER_PROF, self.seconds + characters / _CHARACTERS_PER_SECOND)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if sys.platform == "linux":  # private memory; a file that is mapped for reading does not count
            held = int(os.pread(_statm(), 200, 0).split()[5]) * resource.getpagesize()
            most = held + self.bytes + characters * _BYTES_PER_CHARACTER
            resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def excess(self, exit_code: int | None) -> str:
        """What a worker that has ended took too much of; "" where its end says something else."""
        return {
            -signal.SIGPROF: f"takes more than {self.seconds:g} s of processor time for it",
            -signal.SIGABRT: f"takes more than {self.bytes / 2**30:g} GiB of memory for it, or than this machine has",
            -signal.SIGSEGV: "crashes with it",
        }.get(exit_code or 0, "")


@functools.cache
def _statm() -> int:
    """What Linux says of this process's memory; open for good, since opening it takes ten times as long as reading."""
    return os.open("/proc/self/statm", os.O_RDONLY)


DOCUMENT = Limits()
