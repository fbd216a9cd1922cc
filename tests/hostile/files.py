"""Every file that others may have written x every way in which it can be wrong: truncated, flipped bits, a FIFO, deep, huge,
...
"""

import functools
import json
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.judge import Case, working_in
from tests.untrusted_files import KINDS, Kind
from titanlite.config.read import read_config

_WRONG: list[Any] = ["x", -1, 1.5, True, None, [], {}, [[]], {"x": 1}, 10**30]
_EXTREME: list[Any] = [-1, 0, 2**31, 2**53, 10**18, 10**39, 10**41, 1e308, -0.5, float("nan"), float("inf")]
_FLIPS, _CUTS, _PLACES = 2, 2, 4  # draws per file


def cases(seed: int) -> Iterator[Case]:
    for kind in KINDS:
        draw = random.Random(f"{seed} {kind.title}")
        yield from any_file(kind, draw)
        if kind.text:
            yield from _any_text(kind)
        if kind.json:
            yield from _any_json(kind, draw)
        if kind.json:
            yield case(kind, "a key twice", _twice, right=kind.keys_may_repeat)
        for title, change in kind.contradictions.items():
            yield _of_values(kind, f"contradiction: {title}", change, right=False)
    for key, words in _OPTIONS.items():
        for name, text in words.items():
            action = functools.partial(read_config, "run.toml", [f"--{key}", text])
            yield Case(f"option {key}, {name}", functools.partial(_with_configuration, action), re.escape(key))


# ------------------------------------------------------------------------------------------------------------- any file


def any_file(kind: Kind, draw: random.Random) -> Iterator[Case]:
    """The ways in which a file can be missing, or something else."""
    yield case(kind, "a FIFO", _replaced(os.mkfifo))
    yield case(kind, "a folder", _replaced(Path.mkdir))
    yield case(kind, "an endless device", _replaced(lambda path: path.symlink_to("/dev/zero")))
    yield case(kind, "a link to a FIFO", _replaced(_link_to_fifo))
    yield case(kind, "a link to itself", _replaced(lambda path: path.symlink_to(path.name)))
    yield case(kind, "a link to nothing", _replaced(lambda path: path.symlink_to("nowhere")), right=kind.optional)
    yield case(kind, "a link to the file", _linked, right=True, same=True)
    yield case(kind, "empty", lambda path: path.write_bytes(b""), right=kind.empty_is_right)
    if kind.limit:
        yield case(kind, "huge", lambda path: os.truncate(path, kind.limit + 1))
    for name, content in _FOREIGN.items():
        yield case(
            kind,
            f"foreign: {name}",
            functools.partial(write, content=content),
            right=kind.any_text or (kind.lines and name in _TORN),
        )
    size, a_part_is_right = len(sound(kind)[1]), kind.lines or kind.any_text or kind.cut_is_right
    for number in range(_CUTS):
        cut = functools.partial(_cut, at=draw.randrange(10**9) * size // 10**9)
        yield case(kind, f"cut {number}", cut, right=a_part_is_right)
    for number in range(_FLIPS):
        change = functools.partial(flip, at=draw.randrange(10**9) * size // 10**9, bit=draw.randrange(8))
        yield case(kind, f"a flipped bit {number}", change, right=not kind.sealed)


_FOREIGN = {
    "a picture": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(64),
    "a program": b"\x7fELF\x02\x01\x01" + bytes(200),
    "a pickle": pickle.dumps({"a": [1, 2, 3]}),
    "a page": b"<!DOCTYPE html>\n<html><body>404: not found</body></html>\n",
    "UTF-16": "{}".encode("utf-16"),
    "Latin-1": '{"größe": 12345}'.encode("latin-1"),
    "zeros": bytes(4096),
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:8f0e\nsize 12345\n",
}
_TORN = ("Latin-1", "zeros")  # may be the last line of a killed run


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


def _linked(path: Path) -> None:
    """As in Hugging Face's cache, whose files are links."""
    path.rename(path.with_name("blob"))
    path.symlink_to("blob")


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _cut(path: Path, at: int) -> None:
    os.truncate(path, at)


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------------- any text, any JSON


def _any_text(kind: Kind) -> Iterator[Case]:
    texts = {
        "20,000 levels": "[" * 20_000,
        "20,000 tables": ('{"a":' if kind.json else "a." if not kind.any_text else "{{ ") * 20_000,
        "5,000 digits": '{"a": ' + "9" * 5_000 + "}" if kind.json else "a = " + "9" * 5_000,
        "half a character": '{"a": "\udcff"}',
        "a mark of UTF-8 alone": "\ufeff\ufeff",
    }
    for name, text in texts.items():
        content = (text + "\n" * kind.lines).encode("utf-8", "surrogateescape")
        yield case(kind, name, functools.partial(write, content=content), right=kind.any_text)


def _any_json(kind: Kind, draw: random.Random) -> Iterator[Case]:
    for text in ("null", "[]", '"text"', "{}", "[{}]"):
        content = (text + "\n" * kind.lines).encode()
        yield case(kind, f"only {text}", functools.partial(write, content=content), right=text in kind.right_texts)
    values = json.loads(sound(kind)[1].splitlines()[-1] if kind.lines else kind.unsealed(sound(kind)[1]))
    places = list(_places(values))
    for place in draw.sample(places, min(_PLACES, len(places))):
        name, before = ".".join(map(str, place)), _at(values, place)
        wrong = [value for value in _WRONG if _type(value) != _type(before)]
        value = draw.choice(wrong)
        set_before_and_after = value is not None and before is not None  # null: the default
        change = functools.partial(_put, place=place, value=value)
        yield _of_values(kind, f"{name} = {json.dumps(value)}", change, right=True, same=set_before_and_after)
        if _type(before) == "number":
            change = functools.partial(_put, place=place, value=(value := draw.choice(_EXTREME)))
            yield _of_values(kind, f"{name} = {value!r}, a number", change, right=True)
        if isinstance(place[-1], str):
            yield _of_values(kind, f"no {name}", functools.partial(_remove, place=place), right=True)
    yield _of_values(kind, "500 levels", lambda values: _put(values, ("of a later version",), _nested(500)), right=False)
    yield _of_values(kind, "an integer of 41 digits", lambda values: _put(values, ("later",), 10**40), right=False)


_OPTIONS = {
    key: {
        "5,000 digits": "9" * 5_000,
        "20,000 levels": "[" * 20_000,
        "20,000 tables": "{a=" * 20_000,
        "20,000 names": "a." * 20_000,
    }
    for key in ("training.steps", "training.sources", "optimizer.name")
}


def _with_configuration(action: Callable[[], object], folder: Path) -> Callable[[], object]:
    (folder / "run.toml").write_text("")
    return action


def _twice(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"{", b'{"twice": 1, "twice": 2, ', 1))


def _places(values: Any, above: tuple = ()) -> Iterator[tuple]:
    """Every location in a JSON value: all keys of tables, the first entry of lists."""
    inside = values.items() if isinstance(values, dict) else enumerate(values[:1]) if isinstance(values, list) else ()
    for key, value in list(inside)[:40]:
        yield (*above, key)
        yield from _places(value, (*above, key))


def _type(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def _at(values: Any, place: tuple) -> Any:
    return functools.reduce(lambda value, key: value[key], place, values)


def _put(values: Any, place: tuple, value: Any) -> None:
    table = _at(values, place[:-1])
    if isinstance(table, list) and isinstance(place[-1], str):  # the file is a list of tables
        table = table[-1]
    table[place[-1]] = value


def _remove(values: Any, place: tuple) -> None:
    del _at(values, place[:-1])[place[-1]]


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


# ----------------------------------------------------------------------------------------------------------------- cases


@functools.cache
def sound(kind: Kind) -> tuple[Path, bytes, Any]:
    """(a folder with all valid files of a kind, the contents of its file, what reading it gives); created once per process."""
    folder = Path(tempfile.mkdtemp(prefix="titanlite-hostile-"))
    kind.write(folder)
    with working_in(folder):
        return folder, (folder / kind.file).read_bytes(), kind.read()


def _of_values(kind: Kind, name: str, change: Callable[[Any], None], right: bool, same: bool = False) -> Case:
    """A case in which a JSON file has other values."""

    def write(path: Path) -> None:
        content = path.read_bytes()
        *first, last = content.splitlines(keepends=True) if kind.lines else [kind.unsealed(content)]
        values = json.loads(last)
        change(values)
        text = json.dumps(values) + "\n" * kind.lines
        path.write_bytes(b"".join(first) + kind.sealed_again(text.encode()))

    return case(kind, name, write, right, same)


def case(kind: Kind, name: str, change: Callable[[Path], object], right: bool = False, same: bool = False) -> Case:
    """same: an accepted file must read like the valid one."""

    def make(folder: Path) -> Callable[[], object]:
        shutil.copytree(sound(kind)[0], folder, dirs_exist_ok=True, symlinks=True)
        change(folder / kind.file)

        def action() -> None:
            result = kind.read()
            assert not same or result == sound(kind)[2], f"{result} instead of {sound(kind)[2]}"

        return action

    return Case(f"{kind.title}, {name}", make, kind.named or re.escape(kind.file), right)
