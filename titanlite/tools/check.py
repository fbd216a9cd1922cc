"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Finds every fault that can be found without training, and prints it; with job.print_config the resolved TOML too.
"""

import argparse
import sys
from pathlib import Path

from titanlite.config.read import read_config, report, to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError


def main() -> None:
    """Exit code 0 for a valid configuration, 2 for one with faults."""
    try:
        path, ranks, local_ranks, options = parse_command("check", sys.argv[1:])
        config = read_config(path, options)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if code := check_here(config, path, ranks, local_ranks):
        sys.exit(code)
    if config.job.print_config:
        print(to_toml(config))


def check_here(config: Config, path: str, ranks: int, local_ranks: int | None = None) -> int:
    """Prints all faults of a configuration for `ranks` ranks, `local_ranks` of them on this machine; -> exit code, 0 or 2."""
    # Imported late: a fault in the file itself, or --help, needs no torch.
    from titanlite.launch.run_folder import other_run
    from titanlite.loop.checks import check

    try:
        check(config, path, ranks, local_ranks)
        if holder := other_run(Path(config.job.dump_folder)):
            fault = f'job.dump_folder = "{config.job.dump_folder}": another run is training in it ({holder})'
            raise UserError(report(path, [f"{fault}; give this one a folder of its own"]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


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


def configuration_file(words: list[str], usage: str) -> str:
    """The first of a command's words. Raises UserError if it is an option; for --help prints the usage and exits."""
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {usage}\n       with --help behind CONFIG.toml: every option with its meaning and value")
        sys.exit(0)
    if not words or words[0].startswith("-"):
        raise UserError("give a configuration first, such as train_configs/llama_debug.toml, then the options")
    return words[0]


if __name__ == "__main__":
    main()
