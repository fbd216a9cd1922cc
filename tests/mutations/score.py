"""How many of history.json's faults the two commands for authors of forks find: `titanlite verify` and `titanlite check-model`.

    python -m tests.mutations.score                     every fault; it resumes after an interruption
    python -m tests.mutations.score --fault h07         this one
    python -m tests.mutations.score --suite             run the files of tests that each fault names instead
    python -m tests.mutations.score --correct           run check-model on right models, none of which may fail
    python -m tests.mutations.score --table             only write the tables of docs/verification.md

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
_MESHES = ("1", "dp_shard=2", "tp=2", "cp=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2")
_VERIFY = {
    "--steps": "3",
    "--model.name": "tests.tiny",
    "--model.flavor": "large",
    "--training.seq_len": "32",
    "--training.local_batch_size": "2",
    "--training.global_batch_size": "8",
}
_SECONDS = 900  # for one command, on a busy machine
DOCUMENT, _MARK = ROOT / "docs" / "verification.md", "<!-- made by: python -m tests.mutations.score --table -->\n"
# Right models, each with something that a proof could take for a fault.
CORRECT = {
    "llama3:debug": "grouped heads",
    "qwen3:debug": "norms of queries and keys, tied embeddings",
    "gemma3:debug": "windows, two rotation bases, norms around each part",
    "olmo2:debug": "norms after each part, over all heads",
    "tests.tiny:tied": "tied embeddings",
    "tests.tiny:uneven": "a vocabulary of 515, which no mesh divides",
    "tests.tiny:scaled": "rotations for long sequences",
    "tests.tiny_biased:plain": "biases of queries, keys and values",
    "tests.tiny_chunked:plain": "a loss in chunks of 100 tokens",
    "tests.tiny_dropout:plain": "dropout",
    "tests.tiny_odd:frozen": "frozen parameters",
    "tests.tiny_gemma3:plain": "windows shorter than a sequence",
    "tests.tiny_gemma3:two": "capped logits",
    "tests.tiny_qwen3:plain": "heads wider than the model divided by their number",
    "tests.tiny_olmo2:plain": "norms over all heads, few of them",
    "tests.forks.hybrid:plain": "linear attention in every second layer, without generation",
    "tests.forks.cancelling:plain": "a factor and a mixing matrix whose gradients cancel",
    "tests.forks.scale_free:plain": "a factor whose gradient is nothing but rounding",
    "tests.forks.right.parallel_block:plain": "attention and feed-forward side by side, a gate for each head",
    "tests.forks.right.latent_attention:plain": "latents of low rank (MLA)",
    "tests.forks.right.value_residual:plain": "values of the first layer in all others, a mixing matrix",
    "tests.forks.right.linear_attention:plain": "gated linear attention that generates from a state",
    "tests.forks.right.attention_temperature:plain": "attention that depends on the position in a document",
    "tests.forks.right.dense_mixture:plain": "a mixture of experts that computes all of them",
}


class Past(NamedTuple):
    """A fault that another framework has had.

    source: where it was reported. named: a pattern of the part that a command should name, or of the number that is wrong
    where the fault is in no part of a model. verify: options beyond those of `_VERIFY`, or in their place. model: the argument
    of check-model.
    """

    fault: Fault
    source: str
    named: str
    verify: str
    model: str

    def words(self) -> dict[str, list[str]]:
        """The command lines, by name."""
        given = shlex.split(self.verify)
        options = _VERIFY | dict(zip(given[::2], given[1::2], strict=True))
        pairs = [*options.items(), *(("--mesh", mesh) for mesh in _MESHES)]
        verify = ["verify", "train_configs/llama_debug.toml", *(word for pair in pairs for word in pair)]
        return {"verify": verify, "check-model": ["check-model", self.model]}


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


def score(copy: Copy, past: Past, passing: set[str]) -> dict[str, Any]:
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
        found, said = answer.code != 0, _said(answer)
        named = found and re.search(past.named, said) is not None
        result[name] = {"found": found, "named": named, "seconds": round(answer.seconds), "said": said.strip()[:160]}
    return result


def _said(answer: Answer) -> str:
    """What an output says of a failure: the message of a user error, or the lines that differ from those of a right model."""
    output = re.sub(r"/\S*/(?=tree/|site-packages/)|/tmp/\w+/", "", answer.output)  # folders of the machine that scored
    if answer.code == 2:
        return output
    lines = [line for line in output.splitlines() if "passed" not in line and "not run" not in line]
    return "\n".join(line for line in lines if re.search(r"FAILED|differ|not equal|<-|Error|^ {20,}", line))


def check_correct(copy: Copy, model: str) -> dict[str, Any]:
    """What check-model says of a right model."""
    answer = ask(copy, ["check-model", model])
    return {"passed": answer.code == 0, "seconds": round(answer.seconds), "said": _said(answer).strip()[:400]}


def document(text: str, history: list[Past], known: dict[str, Any]) -> str:
    """docs/verification.md with new tables."""
    before, _, rest = text.partition(_MARK)
    _, _, after = rest.partition(_MARK)
    tables = f"{table(history, known['faults'])}\n\n{correct_table(known.get('correct', {}))}"
    return f"{before}{_MARK}\n{tables}\n\n{_MARK}{after}"


def correct_table(known: dict[str, Any]) -> str:
    """A line for each right model, with the seconds that check-model took."""
    lines = [
        f"| {model} | {what} | {'passed' if known[model]['passed'] else '**failed**'} | {known[model]['seconds']} |"
        for model, what in CORRECT.items()
        if model in known
    ]
    alarms = sum(not known[model]["passed"] for model in known)
    total = f"{alarms} of {len(lines)} right models fail."
    return "\n".join(
        [total, "", "| model | what a proof could take for a fault | check-model | seconds |", "| - | - | - | - |", *lines]
    )


def table(history: list[Past], known: dict[str, Any]) -> str:
    """A line for each fault, and the totals."""
    lines = ["| | fault | verify | check-model | tests |", "| - | - | - | - | - |"]
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
    asked = sum("verify" in known.get(past.fault.id, {}) for past in history)
    total = (
        f"Of {len(history)} faults, {asked} were scored: {found} are found by one of the two commands, {named} of them named"
    )
    return "\n".join([f"{total}; the tests find {caught} of the {ran} for which they have run.", "", *lines])


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return "named" if result["named"] else "found" if result["found"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one, by its id; may be given several times")
    parser.add_argument("--suite", action="store_true", help="run the tests that each fault names instead")
    parser.add_argument("--results", type=Path, default=SCORE)
    parser.add_argument("--correct", action="store_true", help="run check-model on the right models")
    parser.add_argument("--table", action="store_true", help="write the tables of docs/verification.md")
    arguments = parser.parse_args()
    history, known = read_history(), _read(arguments.results)
    if unknown := set(arguments.fault or ()) - {past.fault.id for past in history}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if arguments.table:
        DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8"), history, known), encoding="utf-8")
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    def keep(kind: str, name: str, result: dict[str, Any]) -> None:
        known.setdefault(kind, {})[name] = result
        unfinished = arguments.results.with_suffix(".tmp")
        unfinished.write_text(json.dumps(known, indent=1) + "\n")
        unfinished.rename(arguments.results)
        print(name, json.dumps(result), flush=True)

    with tempfile.TemporaryDirectory(prefix="titanlite-score-") as folder:
        copy = Copy(Path(folder))
        if arguments.correct:
            for model in CORRECT:
                if model not in known.get("correct", {}):
                    keep("correct", model, {"commit": commit} | check_correct(copy, model))
            return
        passing: set[str] = set()
        for past in history:
            name = past.fault.id
            before = known["faults"].get(name, {})
            chosen = name in arguments.fault if arguments.fault else ("suite" if arguments.suite else "verify") not in before
            if not chosen:
                continue
            if arguments.suite:
                suite = judge(copy, past.fault, past.fault.tests, set(), 1)
                keep("faults", name, before | {"suite": {"commit": commit} | suite})
            else:
                keep("faults", name, before | score(copy, past, passing) | {"commit": commit})


if __name__ == "__main__":
    main()
