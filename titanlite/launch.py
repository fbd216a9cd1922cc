"""torchrun with the run's exit code and one line in place of its traceback; run_train.sh starts it. Takes torchrun's words."""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# torchrun looks at the ranks ten times a second, notes whole seconds, and notes the ranks that it ends itself like those
# that failed. What is so close in time is told apart by how it ended.
_TOGETHER = 1  # seconds


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) that most likely brought the others down.

    Of those that failed first, as far as the clock can tell: one that was ended by a signal, since its neighbours then lose
    their connection to it and end with an exit code; then one that said what is wrong and ended with 2; then any other
    exit code; last a rank that got SIGTERM, which is how torchrun ends the survivors.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    candidates = [item for item in failures.items() if item[1].timestamp <= earliest + _TOGETHER]

    def order(item: tuple[int, ProcessFailure]) -> int:
        code = item[1].exitcode
        return 3 if code == -signal.SIGTERM else 0 if code < 0 else 1 if code == 2 else 2

    return min(candidates, key=order)  # of equals, the one that was noted first


def main() -> None:
    # The ranks say themselves what went wrong; what torchrun adds is said below, once.
    logging.disable(logging.CRITICAL)
    try:
        run.run(run.parse_args(None))
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"rank {rank} (process {failure.pid}) {how}; the run is over", file=sys.stderr)
        sys.exit(128 - code if code < 0 else code)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}", file=sys.stderr)
        sys.exit(128 + stop.sigval)
