"""What all tests share: where their files are, what ends with them, the pools of ranks, and which tests run side by side."""

import multiprocessing.forkserver as forkserver
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.guard import VARIABLE

_MANY = 60  # calls of a pool
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time, each with ranks of its own


def pytest_configure() -> None:
    """Gives the run a temporary folder and a mark, and starts what removes the one and ends all processes with the other.

    Give --basetemp=FOLDER to look at files that tests have written.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # of a run that has done this
        return
    # A shell starts background jobs with these ignored, and so would be every command that a test sends Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    folder = Path(tempfile.mkdtemp(prefix="titanlite-tests-"))
    os.environ |= {"TMPDIR": str(folder), VARIABLE: folder.name}
    tempfile.tempdir = None  # computed again
    words = [str(Path(__file__).with_name("guard.py")), str(os.getpid()), str(folder), folder.name]
    subprocess.Popen([sys.executable, "-S", *words], stdin=subprocess.DEVNULL, start_new_session=True)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --dist loadgroup, pytest-xdist runs all tests that need ranks in one process, and each other file in one.

    Pools of ranks for every process would share the same few cores. A file's tests share what is made once for all of them.
    """
    for item in items:
        group = "ranks" if "pools" in getattr(item, "fixturenames", ()) else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


_pools = {size: Pool(size) for size in (1, 2, 4, 8)}


@pytest.fixture(scope="session")
def pools() -> dict[int, Pool]:
    """Pools of 1, 2, 4 and 8 ranks; each starts at its first use."""
    return _pools


@pytest.fixture(scope="module", autouse=True)
def end_of_tired_pools() -> Iterator[None]:
    """With the tests of a file, ends the pools that have run much; the next one that asks for such a pool gets new ranks.

    A run leaves process groups in its ranks, each of which wakes up a hundred times a second, for nothing: hundreds of them
    keep half of a machine of two cores busy. But new ranks take seconds until they have done all for the first time.
    """
    yield
    _stop(pool for pool in _pools.values() if pool.calls > _MANY)


@pytest.fixture(scope="session", autouse=True)
def end_of_pools() -> Iterator[None]:
    yield
    _stop(_pools.values())


@pytest.fixture(scope="module")
def no_fork_server() -> None:
    """Ends multiprocessing's fork server, which other tests have started and set up, with all pools: it waits for its forks."""
    _stop(_pools.values())
    forkserver._forkserver._stop()


def _stop(pools: Iterable[Pool]) -> None:
    for pool in pools:
        pool.stop()
