"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Finds every fault that can be found without training, and prints it; with job.print_config the resolved TOML too.
"""

import argparse
import sys
from pathlib import Path

from titanlite.config.read import read_config, report, to_toml
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.launch.run_folder import other_run


def main() -> None:
    """Exit code 0 for a sound configuration, 2 for one with faults."""
    try:
        path, ranks, local_ranks, options = parse_command("check", sys.argv[1:])
        config = read_config(path, options)
        # Imported late: a fault of the file itself, or --help, should not wait for PyTorch.
        from titanlite.loop.checks import check

        check(config, path, ranks, local_ranks)
        if holder := other_run(Path(config.job.dump_folder)):
            fault = f'job.dump_folder = "{config.job.dump_folder}": another run is training in it ({holder})'
            raise UserError(report(path, [f"{fault}; give this one a folder of its own"]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print_if_asked(config)


def print_if_asked(config: Config) -> None:
    if config.job.print_config:
        print(to_toml(config))


def parse_command(command: str, words: list[str]) -> tuple[str, int, int | None, list[str]]:
    """(configuration file, ranks, ranks on this machine, options of the configuration) of a command's words."""
    parser = argparse.ArgumentParser(prog=f"titanlite {command}", allow_abbrev=False, add_help=False)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--local-ranks", type=int, default=None)
    known, rest = parser.parse_known_args(words)
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-h", "--help")):
        raise UserError("give a configuration first, such as train_configs/llama_debug.toml, then the options")
    if rest[0] in ("-h", "--help"):
        print(f"usage: titanlite {command} CONFIG.toml [--ranks N] [--section.key value ...]")
        sys.exit(0)
    if known.ranks < 1:
        raise UserError(f"--ranks {known.ranks}: must be at least 1")
    return rest[0], known.ranks, known.local_ranks, rest[1:]


if __name__ == "__main__":
    main()
