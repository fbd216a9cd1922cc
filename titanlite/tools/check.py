"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Finds every fault that can be found without training, and prints it; with job.print_config the resolved TOML too.
"""

import argparse
import sys
from pathlib import Path

from titanlite.config.read import configuration_file, read_config, report, to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError


def main() -> None:
    """Exit code 0 for a valid configuration, 2 for one with faults."""
    path, ranks, local_ranks, options = parse_command("check", sys.argv[1:])
    config = read_config(path, options)
    check_here(config, path, ranks, local_ranks)
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


def parse_command(command: str, words: list[str]) -> tuple[str, int, int | None, list[str]]:
    """(configuration file, ranks, ranks on this machine, options of the configuration) of a command's words."""
    parser = argparse.ArgumentParser(prog=f"titanlite {command}", allow_abbrev=False, add_help=False)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--local-ranks", type=int, default=None)
    known, rest = parser.parse_known_args(words)
    path = configuration_file(rest, f"titanlite {command} CONFIG.toml [--ranks N] [--section.key value ...]")
    if known.ranks < 1:
        raise UserError(f"--ranks {known.ranks}: must be at least 1")
    return path, known.ranks, known.local_ranks, rest[1:]
