"""What the command lines of the tools share."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from titanlite.config.read import read_words
from titanlite.config.schema import Config
from titanlite.launch.layout import shown, whole_number

_DIGITS = 15
_MOST = 10**_DIGITS


class _Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, unless it collects its values."""

    def parse_known_args(self, words: Any = None, namespace: Any = None) -> Any:
        given = [word.partition("=")[0] for word in (sys.argv[1:] if words is None else words)]
        for option, action in self._option_string_actions.items():
            if given.count(option) > 1 and not isinstance(action, argparse._AppendAction):
                self.error(f"{option}: given twice; give it once")
        return super().parse_known_args(words, namespace)


def command_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help prints the docstring of the command's file, of which the first paragraph is the usage."""
    usage, _, description = (doc or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    return _Parser(f"titanlite {command}", usage, description, allow_abbrev=False, formatter_class=formatter)


def config_parser(command: str) -> argparse.ArgumentParser:
    """A parser for `read_command`."""
    parser = _Parser(f"titanlite {command}", allow_abbrev=False, add_help=False)
    parser.add_argument("--ranks", type=at_least(1), default=1)
    return parser


def read_command(parser: argparse.ArgumentParser, words: list[str] | None = None) -> tuple[argparse.Namespace, str, Config]:
    """(options that the parser knows, configuration file, configuration) of a command's words, by default those of the process.

    All other options are those of the configuration.
    """
    known, rest = parser.parse_known_args(words)
    return known, *read_words(rest, f"{parser.prog} CONFIG.toml [--ranks N] [--section.key value ...]")


def at_least(least: int) -> Callable[[str], int]:
    """The argparse type of a whole number, such as 1000 or 1e9, with this minimum."""

    def number(word: str) -> int:
        digits, _, exponent = word.partition("e")
        power = whole_number(exponent or "0", 0, _DIGITS)
        value = whole_number(digits, 0, _MOST)
        if value is None or power is None or not least <= value * 10**power <= _MOST:
            raise argparse.ArgumentTypeError(
                f"{shown(word)}: must be a whole number of at least {least}, such as 1000 or 1e9, and at most 1e{_DIGITS}"
            )
        return value * 10**power

    return number
