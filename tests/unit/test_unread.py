"""A file that the machine cannot read, for lack of memory or a disk error, is not at fault: it is not renamed, removed or
called damaged.
"""

import errno
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.untrusted_files import KINDS, Kind
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import read_bytes

# Parts of messages that blame a file, or that advise the user to change it.
_BLAMES = re.compile(r"damaged|refused|broken|truncated|not a |not an |missing|renam|remov|delet|again", re.IGNORECASE)


# ----------------------------------------------------------------------------------------------------- errors of the machine


class Machine:
    """Makes the n-th opening or reading of a file fail."""

    def __init__(self, error: BaseException):
        self.error, self.left = error, -1

    def may(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.fixture(params=[MemoryError(), OSError(errno.EIO, os.strerror(errno.EIO))], ids=["memory", "EIO"])
def machine(request, monkeypatch) -> Machine:
    machine, open_file = Machine(request.param), os.open

    class File(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            machine.may()
            return super().read(size)

        def readline(self, size: int | None = -1) -> bytes:
            machine.may()
            return super().readline(size)

    def opened(path: object, *words: int, **keys: int) -> int:
        machine.may()
        return open_file(path, *words, **keys)

    monkeypatch.setattr(io, "BufferedReader", File)
    monkeypatch.setattr(os, "open", opened)
    return machine


def _failures(kind: Kind, machine: Machine) -> Iterator[BaseException]:
    """The errors of a reader when its first, second, ... opening or reading fails."""
    for number in range(1, 100):
        machine.left = number
        try:
            kind.read()
        except (UserError, OSError, MemoryError) as error:
            yield error
        if machine.left > 0:  # it does fewer
            return


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "okenizer" not in kind.title], ids=lambda kind: kind.title)
def test_a_machine_error_is_reported_as_such_with_the_file(tmp_path, monkeypatch, machine, kind):
    kind.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    kind.read()
    failures = list(_failures(kind, machine))
    assert failures
    for error in failures:
        assert isinstance(error, UserError), repr(error)
        assert not _BLAMES.search(str(error).replace(str(tmp_path), "")), error
        assert "cannot be read: " in str(error)


def test_a_file_that_grows_or_whose_size_is_unknown_is_read_to_its_end(tmp_path):
    assert read_bytes("/proc/self/environ", 2**24) == Path("/proc/self/environ").read_bytes()
    with pytest.raises(UserError, match="at most 10 are read"):
        read_bytes("/proc/self/environ", 10)
