"""Wrong values of every argument of every command; both come from the commands' own tables."""

import argparse
import contextlib
import functools
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.hostile.judge import Case
from titanlite import __main__
from titanlite.__main__ import COMMANDS
from titanlite.ground import errors
from titanlite.launch import stacks
from titanlite.tools import options
from titanlite.tools.options import Real, WholeNumber, existing_folder, existing_path, new_file, new_path, nonempty

_NO_NUMBERS = ("", " ", "nan", "inf", "-1", "-0", "x", "0x10", "1_0", "+1", "\u0663", "1e", "e3", "1e400", "1e-320", "9" * 5000)
_NO_TEXT = ("", " ", "a\0b", "x" * 5000)
_NO_PATHS = (*_NO_TEXT, "x" * 300, "file.txt/x", "loop/x")
_NOTHING_NEW = (*_NO_PATHS, ".", "..", "/", "a/..", "/proc/x", "/dev/null/x", "/sys/x")
WRONG: dict[Any, tuple[str, ...]] = {
    nonempty: _NO_TEXT,
    existing_path: (*_NO_PATHS, "nowhere", "loop"),
    existing_folder: (*_NO_PATHS, "nowhere", "loop", "file.txt", "/dev/null"),
    new_path: _NOTHING_NEW,
    new_file: (*_NOTHING_NEW, "folder", "nowhere/x"),
}
RIGHT = {nonempty: "run.toml", existing_path: "run.toml", existing_folder: "folder", new_path: "new", new_file: "new", str: "x"}
# Texts that a kind accepts but that name nothing in the folder: no library's own error may appear for them.
TEXTS = (
    *("hub:", "hub:::", "hub:a b", "://", "s3://", "*[", "[", "..", "~", "%s", "-", ".a", "no.module", "\udcff"),
    *(":", ",", "="),
)


def run_command(*words: str) -> None:
    """`titanlite` with these words, in this process."""
    with contextlib.ExitStack() as stack:
        for name in ("signal.signal", "titanlite.launch.stop.listen", "titanlite.launch.stop.leave_at_once"):
            stack.enter_context(mock.patch(name))
        stack.enter_context(mock.patch.object(os, "_exit", sys.exit))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        stack.enter_context(mock.patch.object(sys, "argv", ["titanlite", *words]))
        stack.enter_context(mock.patch.object(errors, "_position", (0, "starting")))
        stack.callback(stacks.close_dump)
        __main__.main()


class _Captured(Exception):
    pass


def with_configurations() -> Iterator[list[str]]:
    """The words before the configuration, for each command that takes one first."""
    inner = {before[0]: parser for before, parser in parsers()}
    yield from ([command] for command in COMMANDS if command not in inner)
    yield from (before for before, parser in parsers() if not parser.add_help)


def parsers() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """(words before the arguments, parser) of every command that has arguments besides a configuration."""
    for command in COMMANDS:
        if (parser := _parser_of(command)) is None:
            continue
        yield [command], parser
        first = next((action for action in parser._actions if not action.option_strings), None)
        for choice in (first.choices or ()) if first else ():  # each may have its own arguments
            if (inner := _parser_of(command, choice, skipped=1)) is not None:
                yield [command, choice], inner


def _parser_of(*words: str, skipped: int = 0) -> argparse.ArgumentParser | None:
    """The parser that a command calls after this many others."""
    called: list[argparse.ArgumentParser] = []
    original = options._Parser.parse_known_args

    def parse(self: Any, words: Any = None, namespace: Any = None) -> Any:
        called.append(self)
        if len(called) > skipped:
            raise _Captured
        return original(self, words, namespace)

    quiet = contextlib.redirect_stderr(None), contextlib.redirect_stdout(None)
    patched = mock.patch.object(options._Parser, "parse_known_args", parse)
    no_log = mock.patch("titanlite.launch.process.set_up_logging")  # it would persist
    with patched, no_log, quiet[0], quiet[1], contextlib.suppress(SystemExit, _Captured):
        run_command(*words)
    return called[skipped] if len(called) > skipped else None


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Arguments that take a value that is not from a list of choices."""
    return [action for action in parser._actions if action.nargs != 0 and not action.choices]


def wrong(kind: Any) -> tuple[str, ...]:
    if isinstance(kind, WholeNumber):
        below = (str(kind.least - 1),) if kind.least else ()
        return (*_NO_NUMBERS, *below, "1.5", "01", str(kind.most + 1), f"1e{len(str(kind.most))}")
    if isinstance(kind, Real):
        return (*_NO_NUMBERS, *(() if kind.zero else ("0", "0.0")), repr(kind.least * 0.9), repr(kind.most * 1.1))
    return WRONG.get(kind, ())


def _right(action: argparse.Action) -> list[str]:
    """The words of an argument with a value that its kind accepts."""
    kind: Any = action.type
    value = str(next(iter(action.choices))) if action.choices else RIGHT.get(kind) or str(kind.least)
    return [action.option_strings[0], value] if action.option_strings else [value]


def words_of(parser: argparse.ArgumentParser, tested: argparse.Action | None, value: str) -> list[str]:
    """A value of one argument, with correct ones of required arguments."""
    words = [] if parser.add_help else ["run.toml"]  # a configuration comes first
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    chosen = [group[0] for group in groups if tested not in group]
    for action in parser._actions:
        if action is tested:
            words += [f"{action.option_strings[0]}={value}"] if action.option_strings else [value]
        elif action in chosen or (action.required and not any(action in group for group in groups)):
            words += _right(action)
    return words


def _within(action: Callable[[], object]) -> Callable[[Path], Callable[[], object]]:
    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text("")
        (folder / "file.txt").write_text("")
        (folder / "folder").mkdir()
        (folder / "loop").symlink_to("loop")
        return action

    return make


def _shown(value: str) -> str:
    return f"{value[:20]!a} of {len(value)}" if len(value) > 20 else f"{value!a}"


def cases(seed: int) -> Iterator[Case]:
    """Every wrong value for one argument of each kind, and one for each other argument of that kind: they share its check."""
    draw, seen = random.Random(f"arguments {seed}"), set()

    def drawn(kind: object, values: tuple[str, ...]) -> Iterable[str]:
        first = kind not in seen
        seen.add(kind)
        return values if first else draw.sample(values, min(1, len(values)))

    for before in with_configurations():
        for value in drawn("configuration", (*WRONG[existing_path], *TEXTS, "folder", "/dev/null/x", "--", "--ranks")):
            name = f"{' '.join(before)} {_shown(value)} as configuration"
            yield Case(name, _within(functools.partial(run_command, *before, value)), "")
    for before, parser in parsers():
        right = functools.partial(parser.parse_known_args, words_of(parser, None, ""))
        yield Case(f"{' '.join(before)}: right ones", _within(right), "-", right=True)
        for action in arguments(parser):
            # a float, an int or a path without bounds is not a kind
            assert action.type is str or wrong(action.type), f"{' '.join(before)}: {action.dest} has no kind"
            kind = type(action.type) if isinstance(action.type, WholeNumber | Real) else action.type
            label = action.option_strings[0] if action.option_strings else action.dest
            for value in drawn(kind, wrong(action.type)):  # by the parser: what the command refuses later would hide a gap
                parse = functools.partial(parser.parse_known_args, words_of(parser, action, value))
                yield Case(f"{' '.join(before)} {label}={_shown(value)}", _within(parse), re.escape(label))
            for value in drawn(f"texts of {kind}", TEXTS) if kind in (nonempty, str) else ():
                command = functools.partial(run_command, *before, *words_of(parser, action, value))
                yield Case(f"{' '.join(before)} {label}={_shown(value)}", _within(command), "")
