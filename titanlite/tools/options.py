"""Options and parsers that the commands share."""

import argparse
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config import bounds
from titanlite.config.read import read_words
from titanlite.config.schema import Config
from titanlite.launch.layout import shown, whole_number

# ----------------------------------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class WholeNumber:
    """The argparse type of a whole number within bounds, such as 1000 or 1e9."""

    least: int
    most: int

    def __call__(self, word: str) -> int:
        digits, given, exponent = word.partition("e")
        value, power = whole_number(digits, 0, self.most), whole_number(exponent if given else "0", 0, len(str(self.most)))
        if value is None or power is None or not self.least <= value * 10**power <= self.most:
            within = f"of at least {self.least} and at most {self.most}"
            raise _wrong(word, f"must be a whole number {within}, such as 10 or 1e1")
        return value * 10**power


@dataclass(frozen=True)
class Real:
    """The argparse type of a decimal number within bounds. zero: 0 is allowed too."""

    least: float
    most: float
    zero: bool = False

    def __call__(self, word: str) -> float:
        value = float(word) if re.fullmatch(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]{1,4})?", word, re.ASCII | re.I) else math.nan
        if not (self.least <= value <= self.most or (self.zero and value == 0)):
            raise _wrong(word, f"must be {'0, or ' if self.zero else ''}a number from {self.least:g} to {self.most:g}")
        return value


def nonempty(word: str) -> str:
    """The argparse type of any text that could be a name or a pattern."""
    if not word.strip() or "\0" in word or len(word) > 4096:
        raise _wrong(word, "must be text")
    return word


def existing_path(word: str) -> Path:
    """The argparse type of a file or folder that exists."""
    path = Path(nonempty(word))
    try:
        path.stat()
    except OSError as error:
        raise _wrong(word, f"cannot be read: {error.strerror}") from None
    return path


def existing_folder(word: str) -> Path:
    """The argparse type of a folder that exists."""
    path = existing_path(word)
    if not path.is_dir():
        raise _wrong(word, "must be a folder")
    return path


def new_path(word: str) -> Path:
    """The argparse type of a file or folder that a command creates, or refuses or replaces if it exists."""
    path = Path(nonempty(word))
    if path.name in ("", ".."):
        raise _wrong(word, "must be the name of something new")
    try:
        above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        path.is_dir()  # raises OSError if the name is too long
        with tempfile.TemporaryDirectory(prefix=".", dir=above):
            pass
    except OSError as error:
        raise _wrong(word, f"cannot be created: {error.strerror}") from None
    return path


def new_file(word: str) -> Path:
    """The argparse type of a file that a command writes when its work is done: it must be possible before the work begins."""
    path = new_path(word)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise _wrong(word, "must be a file in an existing folder")
    return path


def _wrong(word: str, why: str | None) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{shown(word) or repr(word)}: {why}")


# Bounds of options of several commands. A prediction takes about 2 ms for each rank.
RANKS, PREDICTED = WholeNumber(1, 2**20), WholeNumber(1, 2**14)
LOCAL_RANKS = WholeNumber(1, bounds.MOST_LOCAL_RANKS)
STEPS, TOKENS, SEED = WholeNumber(1, bounds.MOST_STEPS), WholeNumber(1, 2**24), WholeNumber(0, 2**63 - 1)

# ------------------------------------------------------------------------------------------------------------------- parsers


class _Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, unless it collects its values."""

    def parse_known_args(self, words: Any = None, namespace: Any = None) -> Any:
        given = [word.partition("=")[0] for word in (sys.argv[1:] if words is None else words)]
        for option, action in self._option_string_actions.items():
            if given.count(option) > 1 and not isinstance(action, argparse._AppendAction):
                self.error(f"{option}: given twice; give it once")
        return super().parse_known_args(words, namespace)


def command_parser(command: str, doc: str | None, **words: Any) -> argparse.ArgumentParser:
    """A parser whose --help prints the docstring of the command's file; the first paragraph is the usage."""
    usage, _, description = (doc or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    return _Parser(f"titanlite {command}", usage, description, allow_abbrev=False, formatter_class=formatter, **words)


def config_parser(
    command: str, doc: str | None, ranks: WholeNumber = RANKS, option: str = "--ranks"
) -> argparse.ArgumentParser:
    """A parser for `read_command`, which reads --help: behind CONFIG.toml it is about the configuration."""
    parser = command_parser(command, doc, add_help=False)
    parser.add_argument(option, type=ranks, default=1)
    return parser


def read_command(parser: argparse.ArgumentParser, words: list[str] | None = None) -> tuple[argparse.Namespace, str, Config]:
    """(options that the parser knows, configuration file, configuration) of a command's words, by default those of the process.

    All other options are those of the configuration.
    """
    known, rest = parser.parse_known_args(words)
    return known, *read_words(rest, help_of(parser))


def help_of(parser: argparse.ArgumentParser) -> str:
    """The usage for `read_words`."""
    return parser.format_help().removeprefix("usage: ").rstrip()
