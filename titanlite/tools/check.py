"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Finds every fault that can be found without training, and prints it; with job.print_config the resolved TOML too.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from titanlite.config.read import Faults, refusal, to_toml
from titanlite.config.schema import Config
from titanlite.tools.options import at_least, config_parser, read_command


def main() -> None:
    """Exit code 0 for a valid configuration, 2 for one with faults."""
    parser = config_parser("check")
    parser.add_argument("--local-ranks", type=at_least(1))
    options = parser.parse_known_args()[0]
    with all_faults(options.ranks, options.local_ranks):
        _, path, config = read_command(parser)
    check_here(config, path, options.ranks, options.local_ranks)
    if config.job.print_config:
        print(to_toml(config))


@contextlib.contextmanager
def all_faults(ranks: int, local_ranks: int | None) -> Iterator[None]:
    """While a configuration is read: adds the faults of its rest to a refusal of its keys."""
    try:
        yield
    except Faults as error:
        try:
            if error.rest:
                check_here(error.rest, error.path, ranks, local_ranks)
        except Faults as more:
            raise refusal(error.path, error.faults + more.faults) from None
        raise


def check_here(config: Config, path: str, ranks: int, local_ranks: int | None) -> None:
    """Raises Faults that lists all faults of a configuration for `ranks` ranks, `local_ranks` of them on this machine."""
    # Imported late: a fault in the file itself, or --help, needs no torch.
    from titanlite.launch.run_folder import other_run
    from titanlite.loop.checks import check

    check(config, path, ranks, local_ranks)
    if fault := other_run(Path(config.job.dump_folder)):
        raise refusal(path, [fault])
