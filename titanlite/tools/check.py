"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Finds every fault that can be found without training, and prints it; with job.print_config the resolved TOML too.
"""

from pathlib import Path

from titanlite.config.read import report, to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.tools.options import at_least, config_parser, read_command


def main() -> None:
    """Exit code 0 for a valid configuration, 2 for one with faults."""
    parser = config_parser("check")
    parser.add_argument("--local-ranks", type=at_least(1))
    options, path, config = read_command(parser)
    check_here(config, path, options.ranks, options.local_ranks)
    if config.job.print_config:
        print(to_toml(config))


def check_here(config: Config, path: str, ranks: int, local_ranks: int | None) -> None:
    """Raises UserError that lists all faults of a configuration for `ranks` ranks, `local_ranks` of them on this machine."""
    # Imported late: a fault in the file itself, or --help, needs no torch.
    from titanlite.launch.run_folder import other_run
    from titanlite.loop.checks import check

    check(config, path, ranks, local_ranks)
    if fault := other_run(Path(config.job.dump_folder)):
        raise UserError(report(path, [fault]))
