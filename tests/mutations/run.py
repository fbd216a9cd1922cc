"""Puts each fault of faults.json into a private copy of the tree and runs tests until some fail.

    python -m tests.mutations.run                        every fault, with the tests that its entry names
    python -m tests.mutations.run --fault c01 --fault d07
    python -m tests.mutations.run --suite all            after those, every file of tests until one fails
    python -m tests.mutations.run --again                forget what is known, and begin with the first fault
    python -m tests.mutations.run --table                only print the tables of README.md

A fault is caught when a test fails with it and passes without it: what fails is run again on the copy without the fault. The
result is written after each fault (after.json), so an interrupted run goes on where it was. The copy is removed at the end.
PyTorch is imported once, and each run of tests is a fork of this process.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.mutations.faults import Fault, read_faults, with_fault

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FOLDERS = ("tests/unit", "tests/distributed", "tests/end_to_end")  # cheap ones first
_NOT_COPIED = (".git", ".venv", "__pycache__", "build", "outputs", "*.egg-info", ".*_cache")
# What most tests import and no fault changes.
_HEAVY = (
    "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "tokenizers",
    "safetensors.torch", "pydantic",
)  # fmt: skip
_PATIENCE = 900  # seconds for one file of tests


class Copy:
    """A private copy of the tree, in which one file at a time is changed."""

    def __init__(self, folder: Path):
        self.root = folder / "tree"
        self.log = folder / "tests.log"
        self._cache = folder / "cache"
        self._cache.mkdir()
        self._clock = int(time.time()) - 10**6
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        if sys.prefix != sys.base_prefix:
            (self.root / ".venv").symlink_to(sys.prefix)  # where run_train.sh finds its interpreter

    def write(self, name: str, text: str) -> None:
        """Each writing has a time of its own: Python takes a compiled file for right whose source has its time and size."""
        self._clock += 1
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._clock, self._clock))

    def failing(self, targets: Sequence[str], most: int, sound: bool = False) -> list[str]:
        """The tests of files, or of single tests, that fail, at most so many; one that hangs is among them.

        sound: whether the tree is without a fault; only then what the tests put into titanlite's cache is kept for later ones.
        """
        cache = self._cache
        if not sound:
            cache = cache.with_name("faulty")
            shutil.copytree(self._cache, cache)
        events = self.root.parent / "events"
        events.write_text("")
        child = os.fork()
        if child == 0:
            self._run_tests(targets, most, events, cache)
        deadline = time.monotonic() + _PATIENCE
        try:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            _end(child)
        if not sound:
            shutil.rmtree(cache, ignore_errors=True)
        lines = [line.partition(" ") for line in events.read_text().splitlines()]
        failed = [name for kind, _, name in lines if kind == "failed"]
        if not failed and ("finished", " ", "0") not in lines:  # it hung, or pytest itself could not begin
            failed.append(next((name for kind, _, name in reversed(lines) if kind == "begun"), targets[0]))
        return list(dict.fromkeys(failed))

    def _run_tests(self, targets: Sequence[str], most: int, events: Path, cache: Path) -> NoReturn:
        """What the forked process does: pytest in the copy, whose modules are imported again."""
        os.setsid()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "titanlite", "models")]:
            del sys.modules[name]
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": str(self.root), "TITANLITE_CACHE": str(cache)}
        with open(self.log, "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import pytest

        options = ["-q", f"--maxfail={most}", "--timeout=240", "-m", "not slow", "-p", "no:cacheprovider"]
        with open(events, "a", buffering=1) as file:
            code = pytest.main([*options, *targets], [_Events(file)])
            file.write(f"finished {code:d}\n")
        os._exit(0)


class _Events:
    """A plugin of pytest that writes down which tests begin and fail."""

    def __init__(self, file: Any):
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(f"begun {nodeid}\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._file.write(f"failed {report.nodeid}\n")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._file.write(f"failed {report.nodeid}\n")


def _end(child: int) -> None:
    """Ends a run of tests that has not ended, and what it has left in its session."""
    for number, seconds in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(child, number)
        except ProcessLookupError:
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    break
            except ChildProcessError:
                break
            time.sleep(0.1)


def judge(copy: Copy, fault: Fault, targets: Sequence[str], sound: set[str], most: int) -> dict[str, Any]:
    """Runs the targets one after the other until one fails; sound: tests that pass without a fault, added to here."""
    source = (copy.root / fault.file).read_text(encoding="utf-8")
    tried = []
    for target in targets:
        tried.append(target)
        copy.write(fault.file, with_fault(source, fault))
        try:
            failed = copy.failing([target], most)
        finally:
            copy.write(fault.file, source)
        if unknown := [name for name in failed if name not in sound]:
            unsound = copy.failing(unknown, len(unknown), sound=True)
            sound |= set(unknown) - set(unsound)
            if unsound:
                print(f"fail without a fault too: {', '.join(unsound)}", file=sys.stderr)
        if caught := [name for name in failed if name in sound]:
            return {"caught": True, "failed": caught, "tried": tried}
    return {"caught": False, "failed": [], "tried": tried}


def results_table(faults: Sequence[Fault], results: Path) -> str:
    """The tables of README.md. results: those of the tests as they are now."""
    before, after = (_read(path)["faults"] for path in (HERE / "before.json", results))
    lines = []
    for title, chosen in (("Chosen", True), ("Drawn", False)):
        head = "| | place | fault | tests that fail, before | after |"
        lines += [f"### {title}", "", head, "| --- | --- | --- | --- | --- |"]
        for fault in faults:
            if (fault.kind == "chosen") == chosen:
                text = fault.why or f"`{fault.line}` becomes `{fault.fault}`".replace("|", "\\|")
                cells = [_cell(results.get(fault.id)) for results in (before, after)]
                where = fault.origin + (", rewritten" if fault.rewritten else "")
                lines.append(f"| {fault.id} | {where} | {text} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    names = [name.removeprefix("tests/") for name in (result["failed"] or result["tried"])]
    text = "<br>".join(names) if result["caught"] else f"**survives**: {', '.join(names)}"
    return text.replace("|", "\\|").replace("\n", " ")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"sound": [], "faults": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one, by its id; may be given several times")
    parser.add_argument("--suite", choices=("chosen", "all"), default="chosen")
    parser.add_argument("--tests", nargs="+", default=[], help="files or single tests that are tried first")
    parser.add_argument("--most", type=int, default=1, help="failing tests of a file after which it is given up")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no fault after so many minutes")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--results", type=Path, default=HERE / "after.json")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()

    faults = read_faults()
    if unknown := set(arguments.fault or ()) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if arguments.table:
        print(results_table(faults, arguments.results))
        return
    for name in _HEAVY:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy is removed then too
    begin, known = time.monotonic(), _read(arguments.results)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="titanlite-mutations-") as folder:
        copy = Copy(Path(folder))
        files = [str(path.relative_to(ROOT)) for name in FOLDERS for path in sorted((ROOT / name).rglob("test_*.py"))]
        for fault in faults:
            wanted = fault.id in (arguments.fault or [fault.id])
            if not wanted or (fault.id in known["faults"] and not arguments.again and not arguments.fault):
                continue
            if time.monotonic() - begin > 60 * arguments.minutes:
                break
            targets = [*arguments.tests, *fault.tests]
            targets += files if arguments.suite == "all" else []
            sound = set(known["sound"])
            result = judge(copy, fault, list(dict.fromkeys(targets)), sound, arguments.most)
            known["faults"][fault.id], known["sound"] = {"commit": commit} | result, sorted(sound)
            known["faults"] = dict(sorted(known["faults"].items()))
            unfinished = arguments.results.with_suffix(".tmp")
            unfinished.write_text(json.dumps(known, indent=1) + "\n")
            unfinished.rename(arguments.results)
            print(fault.id, _cell(result), flush=True)


if __name__ == "__main__":
    main()
