"""torchrun with the run's exit code and one line in place of its traceback; run_train.sh starts it. Takes torchrun's words."""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    # The ranks say themselves what went wrong; what torchrun adds is said below, once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(None))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"rank {rank} (process {failure.pid}) {how}; the run is over", file=sys.stderr)
        sys.exit(128 - code if code < 0 else code)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}", file=sys.stderr)
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    main()
