"""UserError, for faults that the user can correct; and notes of the current position, for the report of any other exception."""

import contextlib
import difflib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """A fault in the user's input: a key, a file, a model module, a mesh that does not fit the machine.

    Its text says what is wrong, what is allowed and, if there is a guess, what was meant. Commands print the text without a
    traceback and exit with code 2. launch/failure.py reports any other exception.
    """


class HelpRequested(SystemExit):
    """The options contain --help: `titanlite/tools/help.py` prints every option."""

    def __init__(self, values: dict[str, Any]):
        """values: of the configuration file, not validated."""
        super().__init__(0)
        self.values = values


class MachineFault(str):
    """A fault of a configuration that another machine may not have, such as one with a GPU."""


def listed(title: str, faults: Iterable[object], remedy: str = "") -> str:
    """The text of a UserError with a line for each fault."""
    return "\n".join([title, *(f"  {fault}" for fault in faults), *([remedy] if remedy else [])])


# -------------------------------------------------------------------------------------- what pydantic has found wrong

_SHOWN = 80  # characters of a value in a message


def sentence(errors: list[Any], key: str, origin: str = "", unknown: str = "no such key") -> str:
    """One sentence for pydantic's errors in one value: its key, the value, what is allowed, what was probably meant.

    key: "" for the whole of a file. origin: the file or option that has set it. unknown: what is said of a key that the model
    does not have.
    """
    kind, value = errors[0]["type"], json.dumps(errors[0]["input"], default=str)
    if kind == "missing":
        return f"has no {key}"
    if kind == "value_error":  # of a validator, whose text names the value
        return f"{key}: {errors[0]['ctx']['error']}" if key else str(errors[0]["ctx"]["error"])
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    wrong = unknown if kind == "extra_forbidden" else f"must be {allowed(errors)}"
    return f"{key or 'its content'} = {shown}{origin and f' ({origin})'}: {wrong}"


def allowed(errors: list[Any]) -> str:
    """What may stand in place of a value, by pydantic's errors in it."""
    words = [word for error in errors for word in re.findall("'([^']+)'", error.get("ctx", {}).get("expected", ""))]
    close = difflib.get_close_matches(str(errors[0]["input"]).lower(), lower := [word.lower() for word in words], n=1)
    hint = f"; did you mean '{words[lower.index(close[0])]}'?" if close else ""
    texts = dict.fromkeys(error["msg"].replace("Input should be ", "") for error in errors)
    return " or ".join("a table" if text.startswith("a valid dictionary") else text for text in texts) + hint


# --------------------------------------------------------------------------------------------------- notes for a report

last_file = ""  # that the reader of untrusted.py has opened
_PYTHON = (os.path.join(sys.base_prefix, "lib") + os.sep, *{sysconfig.get_path(name) for name in ("purelib", "platlib")})
_LIBRARIES = ("<", os.path.dirname(os.path.dirname(__file__)) + os.sep, *_PYTHON)
_position = (0, "starting")


def at(step: int, what: str) -> None:
    """Notes what this process does from now on, such as "forward and backward"; step 0: before the first one."""
    global _position
    _position = step, what


def current_step() -> int:
    """The step of the latest note; 0 before the first one."""
    return _position[0]


def where(who: str) -> str:
    """A process, its step, and what `at` or `phase` noted last, such as "rank 0, step 37, forward and backward"."""
    step, what = _position
    return ", ".join(dict.fromkeys((who, f"step {step}" if step else "starting", what)))  # not "starting" twice


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Notes what this process does within; also a decorator. After an error the note stays, for the report."""
    before = _position
    at(before[0], what)
    yield
    at(*before)


def is_users(file: str) -> bool:
    """Whether a frame's file is code of the user's own, or of models/: no library, and nothing of titanlite."""
    return not file.startswith(_LIBRARIES)
