"""What all tests share: where their files are, what ends with them, the pools of ranks, and which tests run in parallel."""

import gc
import logging
import multiprocessing.forkserver as forkserver
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.guard import VARIABLE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at a time, each with ranks of its own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files, and the tests of each, in a random order")
    parser.addoption("--minutes", type=Path, metavar="FILE", help="write how many minutes each file of tests has taken")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (seed := config.getoption("shuffle")) is not None:
        terminalreporter.write_line(f"this order again: --shuffle {seed}")
    if path := config.getoption("minutes"):
        table = minutes_by_file(report for reports in terminalreporter.stats.values() for report in reports)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(table) + "\n")
        terminalreporter.section(f"minutes of all processes together; more in {path}")
        terminalreporter.write_line("\n".join(table[:11]))


def minutes_by_file(reports: Iterable[object]) -> list[str]:
    """The minutes that tests took with their fixtures: the total, then those of each file, the longest first."""
    minutes: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):  # of a fixture or of the test itself
            minutes[report.nodeid.partition("::")[0]] += report.duration / 60
    return [f"{spent:7.2f} {name}" for name, spent in [("all", sum(minutes.values())), *minutes.most_common()]]


def pytest_configure() -> None:
    """Gives the run a temporary folder and a mark, and starts a guard that removes the folder and ends all marked processes.

    Use --basetemp=FOLDER to inspect files that tests have written.
    """
    if "TITANLITE_TESTS_DISTURB" in os.environ:
        from tests import disturbed  # imports PyTorch

        disturbed.install()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the controller has done this
        return
    # A shell starts background jobs with these signals ignored; commands that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # a socket's path has at most 107 characters, and Python, pytest and titanlite append most of them
    deep = len(tempfile.gettempdir()) > 40
    folder = Path(tempfile.mkdtemp(prefix="titanlite-tests-", dir="/tmp" if deep else None))
    os.environ |= {"TMPDIR": str(folder), VARIABLE: folder.name}
    tempfile.tempdir = None  # computed again
    words = [str(Path(__file__).with_name("guard.py")), str(os.getpid()), str(folder), folder.name]
    subprocess.Popen([sys.executable, "-S", *words], stdin=subprocess.DEVNULL, start_new_session=True)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --dist loadgroup, pytest-xdist runs the tests of a group in one process, and other tests in any free process.

    All tests that need ranks are a group: pools of ranks for every process would share the same few cores. So are the tests of
    a file that share a fixture of the file.
    """
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        places = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], draw.random()))  # a file's tests stay together: they share fixtures
    for item in items:
        assert isinstance(item, pytest.Function)
        if "pools" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif any(fixtures[-1].scope == "module" for fixtures in item._fixtureinfo.name2fixturedefs.values()):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Ends a run whose groups pytest-xdist could not read from the end of the tests' names."""
    gc.freeze()  # as in tests/preload.py
    if session.config.getoption("loadgroup", False):
        groups = {item.nodeid: item.get_closest_marker("xdist_group") for item in session.items}
        lost = [name for name, group in groups.items() if group and not name.endswith(group.args[0])]
        assert not lost, f"several processes would start what {lost[0]} and {len(lost) - 1} other tests share with their groups"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same random numbers for any tests before it. Ranks of pools do so at each call."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undoes, after the test, what `process.set_up_logging` of a command did to the log in this process."""
    logger = logging.getLogger("titanlite")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, _ = before
    logger.setLevel(before[2])


_pools = {size: Pool(size) for size in (1, 2, 4, 8, 16)}


@pytest.fixture(scope="session")
def pools() -> dict[int, Pool]:
    """Pools of 1, 2, 4, 8 and 16 ranks; each starts at its first use."""
    return _pools


@pytest.fixture(scope="session", autouse=True)
def end_of_pools() -> Iterator[None]:
    yield
    _stop(_pools.values())


@pytest.fixture(scope="module")
def no_fork_server() -> None:
    """Ends multiprocessing's fork server, which other tests have started and set up, and all pools, since it waits for its
    forks.
    """
    _stop(_pools.values())
    forkserver._forkserver._stop()


def _stop(pools: Iterable[Pool]) -> None:
    for pool in pools:
        pool.stop()
