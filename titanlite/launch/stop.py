"""On a request to stop, a run finishes its step, saves, and exits with a code on which a scheduler starts it again.

The request is one of SIGNALS, to the launcher or to any rank, or job.time_limit_minutes. torch is imported in functions
here: a rank listens from its first moment, and that import takes seconds.
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from titanlite.launch.layout import STORE_OF_START

if TYPE_CHECKING:
    from titanlite.config.schema import Config

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, try again
UNSAVED = 128 + signal.SIGTERM  # stopped without a checkpoint: a scheduler must not start it again

REQUESTS = (signal.SIGUSR1, signal.SIGTERM)
FROM_LAUNCHER = signal.SIGUSR2  # not a request: a scheduler may signal launcher and ranks, which is one request
SIGNALS = (*REQUESTS, FROM_LAUNCHER)  # to the launcher, each is a request
_ONE_REQUEST = 10.0  # seconds in which torchrun sends its ranks SIGTERM for a signal that they got from the scheduler too

_LIMIT_OVER = 1  # a rank's request for the time limit; a signal is encoded as its number and the rank's
_begun = time.monotonic()  # of the command: titanlite/__main__.py imports this first, and the launcher's ranks are forks of it
_received: signal.Signals | None = None
_repeated_until = -math.inf  # on time.monotonic


def listen() -> None:
    """In a rank: remembers a request; a second one ends the process by its signal."""
    for request in SIGNALS:
        signal.signal(request, _receive)
    os.register_at_fork(after_in_child=_restore_defaults)
    # The launcher starts its ranks with these signals blocked: before this line none is lost, and none ends the process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def of_torchrun() -> bool:
    """Whether torchrun has started this rank, which sends SIGTERM to its ranks, and restarts those that have stopped."""
    return "TORCHELASTIC_RUN_ID" in os.environ and STORE_OF_START not in os.environ


def faults(config: "Config") -> Iterator[str]:
    """A time limit that torchrun would take for a failure, and start the run again with the whole limit."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if config.job.time_limit_minutes and of_torchrun() and restarts != "0":
        remedy = "start torchrun without --max-restarts, or set job.time_limit_minutes = 0"
        yield (
            f"job.time_limit_minutes = {config.job.time_limit_minutes:g}: torchrun --max-restarts={restarts} would start a run "
            f"that has stopped at its limit again; {remedy}"
        )


def leave_at_once() -> None:
    """In the launcher, while it has no ranks: there is nothing to finish or save."""
    for request in SIGNALS:
        signal.signal(request, lambda *_: os._exit(EXIT_CODE))


def _receive(number: int, _frame: FrameType | None) -> None:
    global _received, _repeated_until
    if number == FROM_LAUNCHER:
        _received = _received or FROM_LAUNCHER
        return
    if time.monotonic() < _repeated_until:
        return
    second, _received = _received in REQUESTS, signal.Signals(number)
    if of_torchrun() and not second:
        _repeated_until = time.monotonic() + _ONE_REQUEST
        return
    for request in REQUESTS:  # the default action needs no Python: it ends a process that is stuck in a collective
        signal.signal(request, signal.SIG_DFL)
    if second:
        signal.raise_signal(number)


def _restore_defaults() -> None:
    """In a forked child, such as a worker that reads data: its parent ends it by SIGTERM."""
    for request in SIGNALS:
        signal.signal(request, signal.SIG_DFL)


class Stop:
    """Whether the ranks stop after this step. All ranks create it together and call `agreed` after every step.

    limit_minutes: job.time_limit_minutes, counted from the start of the command by the monotonic clock, which never jumps;
    0: no limit.
    """

    def __init__(self, limit_minutes: float):
        import torch
        import torch.distributed as dist

        self.limit_minutes = limit_minutes
        self.ends = _begun + 60 * limit_minutes if limit_minutes else math.inf
        self.rank, world = dist.get_rank(), dist.get_world_size()
        # a group of its own: its pending all-reduce is not ordered among the step's collectives
        self.group = dist.new_group(backend="gloo") if world > 1 else None
        self.pending: tuple[dist.Work, torch.Tensor] | None = None

    def agreed(self) -> str | None:
        """Why the ranks stop, at the same step on all of them; else None.

        The all-reduce of a step is read in the next one, so no rank waits for the others here. Raises RuntimeError if another
        rank did not join it within the timeout of `process.set_timeout`.
        """
        import torch
        import torch.distributed as dist

        own = self._request()
        if self.group is None:
            return self._reason(own)
        previous = self._answer()
        code = torch.tensor(own, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(code, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self.pending = work, code
        return self._reason(previous)

    def close(self) -> None:
        """After the last step: waits for the pending all-reduce, so that no rank leaves while another one needs it."""
        import torch.distributed as dist

        self._answer()
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _request(self) -> int:
        """This rank's request as a number, of which the largest wins; 0: continue."""
        if _received:
            return _received << 32 | self.rank
        return _LIMIT_OVER if time.monotonic() >= self.ends else 0

    def _answer(self) -> int:
        if self.pending is None:
            return 0
        work, code = self.pending
        self.pending = None
        work.wait()
        return int(code)

    def _reason(self, code: int) -> str | None:
        if code == 0:
            return None
        if code == _LIMIT_OVER:
            return f"job.time_limit_minutes = {self.limit_minutes:g} are over"
        number, rank = code >> 32, code & 0xFFFFFFFF
        if number == FROM_LAUNCHER:
            return f"the launcher of rank {rank} was requested to stop"
        return f"rank {rank} got {signal.Signals(number).name}"
