"""How many of history.json's faults the two commands for authors of forks find: `titanlite verify` and `titanlite check-model`.

    python -m tests.mutations.score                     every fault; it resumes after an interruption
    python -m tests.mutations.score --fault h07         this one
    python -m tests.mutations.score --suite             also run the files of tests that each fault names
    python -m tests.mutations.score --table             only print the table of docs/verification.md

Each fault of parallel training that other frameworks have had is one line of titanlite or of a model, in a private copy of the
tree. A command finds it by an exit code other than 0; before, the same words must pass on the copy without the fault. It names
the fault when its output has the pattern that history.json gives, which was written before the first score.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutations.faults import Fault, with_fault
from tests.mutations.run import HERE, ROOT, Copy, _read, judge

HISTORY, SCORE = HERE / "history.json", HERE / "score.json"
_MESHES = ("1", "dp_shard=2", "tp=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2")
_VERIFY = (
    "verify train_configs/llama_debug.toml --steps 3 --model.name tests.tiny --model.flavor large --training.seq_len 32 "
    "--training.local_batch_size 2 --training.global_batch_size 8 "
) + " ".join(f"--mesh {mesh}" for mesh in _MESHES)
_SECONDS = 300  # for one command


class Past(NamedTuple):
    """A fault that another framework has had.

    source: where it was reported. named: a pattern of the part that a command should name, or of the number that is wrong
    where the fault is in no part of a model. verify: options beyond those of `_VERIFY`. model: the argument of check-model.
    """

    fault: Fault
    source: str
    named: str
    verify: str
    model: str

    def words(self) -> dict[str, list[str]]:
        """The command lines, by name."""
        return {"verify": shlex.split(f"{_VERIFY} {self.verify}"), "check-model": ["check-model", self.model]}


class Answer(NamedTuple):
    """What a command said of a copy of the tree."""

    code: int  # its exit code; 124: it did not end in time
    output: str
    seconds: float


def read_history() -> list[Past]:
    return list(_entries(json.loads(HISTORY.read_text(encoding="utf-8"))["faults"]))


def _entries(entries: list[dict[str, Any]]) -> Iterator[Past]:
    for entry in entries:
        of_fault = {key: entry[key] for key in ("id", "file", "line", "fault", "why", "tests", "scope", "nth") if key in entry}
        yield Past(Fault(origin="", **of_fault), **{key: entry[key] for key in ("source", "named", "verify", "model")})


def ask(copy: Copy, words: list[str]) -> Answer:
    """Runs a command in the copy, as a user does."""
    begun = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(copy.root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "titanlite", *words]
    try:
        done = subprocess.run(command, cwd=copy.root, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as ended:
        code, output = 124, f"{ended.stdout!r}{ended.stderr!r}"
    return Answer(code, output, time.monotonic() - begun)


def score(copy: Copy, past: Past, passing: set[str], suite: bool) -> dict[str, Any]:
    """What each command says of a fault. passing: command lines that pass without one; added to here."""
    result: dict[str, Any] = {}
    source = (copy.root / past.fault.file).read_text(encoding="utf-8")
    for name, words in past.words().items():
        line = shlex.join(words)
        if line not in passing:
            alarm = ask(copy, words)
            if alarm.code:
                raise SystemExit(f"fails without a fault: {line}\n{alarm.output[-3000:]}")
            passing.add(line)
        copy.write(past.fault.file, with_fault(source, past.fault))
        try:
            answer = ask(copy, words)
        finally:
            copy.write(past.fault.file, source)
        found, said = answer.code != 0, _said(answer.output)
        named = found and re.search(past.named, said) is not None
        result[name] = {"found": found, "named": named, "seconds": round(answer.seconds), "said": said.strip()[:160]}
    if suite:
        result["suite"] = judge(copy, past.fault, past.fault.tests, set(), 1)
    return result


def _said(output: str) -> str:
    """The lines of an output that tell of a failure."""
    lines = [line for line in output.splitlines() if "passed" not in line and "not run" not in line]
    return "\n".join(line for line in lines if re.search(r"FAILED|differ|not equal|<-|Error|^ {20,}", line))


def table(history: list[Past], known: dict[str, Any]) -> str:
    """The table of docs/verification.md, and its totals."""
    lines = ["| | fault | verify | check-model | tests |", "| --- | --- | --- | --- | --- |"]
    found = named = caught = ran = 0
    for past in history:
        result = known.get(past.fault.id, {})
        cells = [_cell(result.get(name)) for name in ("verify", "check-model")]
        tests = result.get("suite")
        caught, ran = caught + bool(tests and tests["caught"]), ran + (tests is not None)
        found += any(result.get(name, {}).get("found") for name in ("verify", "check-model"))
        named += any(result.get(name, {}).get("named") for name in ("verify", "check-model"))
        cells.append("not run" if tests is None else "found" if tests["caught"] else "**missed**")
        lines.append(f"| {past.fault.id} | {past.fault.why} [report]({past.source}) | {' | '.join(cells)} |")
    total = f"{found} of {len(history)} are found by one of the two commands, {named} of them named"
    return "\n".join([f"{total}; the tests find {caught} of {ran}.", "", *lines])


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return "named" if result["named"] else "found" if result["found"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one, by its id; may be given several times")
    parser.add_argument("--suite", action="store_true", help="also run the tests that each fault names")
    parser.add_argument("--results", type=Path, default=SCORE)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    history, known = read_history(), _read(arguments.results)
    if unknown := set(arguments.fault or ()) - {past.fault.id for past in history}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if arguments.table:
        print(table(history, known["faults"]))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="titanlite-score-") as folder:
        copy = Copy(Path(folder))
        passing: set[str] = set()
        for past in history:
            name = past.fault.id
            done = name in known["faults"] and (not arguments.suite or "suite" in known["faults"][name])
            if name not in (arguments.fault or [name]) or (done and not arguments.fault):
                continue
            known["faults"][name] = {"commit": commit} | score(copy, past, passing, arguments.suite)
            unfinished = arguments.results.with_suffix(".tmp")
            unfinished.write_text(json.dumps(known, indent=1) + "\n")
            unfinished.rename(arguments.results)
            print(name, json.dumps(known["faults"][name]), flush=True)


if __name__ == "__main__":
    main()
