"""Scores what finds the faults of history.json: `titanlite verify` and `titanlite check-model`, for authors of forks, and the
tests.

    python -m tests.mutations.score                     the two commands, every fault; it resumes after an interruption
    python -m tests.mutations.score --suite             the tests that each fault names instead
    python -m tests.mutations.score --correct           check-model on right models, none of which may fail
    python -m tests.mutations.score --fault h07         this one; with or without --suite
    python -m tests.mutations.score --again             also faults scored at another commit; with the other options
    python -m tests.mutations.score --table             only write the tables of docs/design/verification.md

Each fault is planted in a private copy of the tree. A command finds it by an exit code other than 0; the same command must pass
on the copy without the fault. It names the fault if its output matches the pattern in history.json, which was written before
the first score. A test finds a fault if it fails with it and passes without it.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mutations.faults import ROOT, Fault, read_faults
from tests.mutations.private_copy import Answer, Copy

SCORE = Path(__file__).with_name("score.json")
COMMANDS = ("verify", "check-model")
_MESHES = ("1", "dp_shard=2", "tp=2", "cp=2", "dp_replicate=2", "dp_replicate=2,dp_shard=2")
_VERIFY = {
    "--steps": "3",
    "--model.name": "tests.tiny",
    "--model.flavor": "large",
    "--training.seq_len": "32",
    "--training.local_batch_size": "2",
    "--training.global_batch_size": "8",
}
DOCUMENT, _MARK = ROOT / "docs" / "design" / "verification.md", "<!-- made by: python -m tests.mutations.score --table -->\n"
# Correct models, each with something that a command could mistake for a fault.
CORRECT = {
    "llama3:debug": "grouped heads",
    "qwen3:debug": "norms of queries and keys",
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
    "tests.forks.right.dense_mixture:plain": "an MoE layer that computes all experts",
}


Known = dict[str, dict[str, dict[str, Any]]]


def words(fault: Fault) -> dict[str, list[str]]:
    """The command lines that should find a fault, by the command's name."""
    given = shlex.split(fault.verify)
    own = list(zip(given[::2], given[1::2], strict=True))
    options = _VERIFY | {name: value for name, value in own if name != "--mesh"}
    meshes = [*_MESHES, *(value for name, value in own if name == "--mesh")]  # the first one is the reference
    pairs = [*options.items(), *(("--mesh", mesh) for mesh in meshes)]
    verify = ["verify", "train_configs/llama_debug.toml", *(word for pair in pairs for word in pair)]
    return {"verify": verify, "check-model": ["check-model", fault.model]}


def by_commands(copy: Copy, fault: Fault, passing: set[str]) -> dict[str, str]:
    """The result of each command: missed, found or named. passing: command lines that pass without a fault; extended here."""
    result = {}
    for name, command in words(fault).items():
        line = shlex.join(command)
        if line not in passing:
            alarm = copy.titanlite(command)
            if alarm.code:
                raise SystemExit(f"fails without a fault: {line}\n{alarm.output[-3000:]}")
            passing.add(line)
        with copy.fault(fault):
            answer = copy.titanlite(command)
        said = _said(answer)
        if answer.code:
            print(f"{fault.id} {name}, {answer.seconds:.0f} seconds: {said.strip()[:300]}", file=sys.stderr)
        result[name] = "missed" if not answer.code else "named" if re.search(fault.named, said) else "found"
    return result


def _said(answer: Answer) -> str:
    """The failure in an output: the message of a user error, or the lines that differ from those of a correct model."""
    if answer.code == 2:
        return answer.output
    lines = [line for line in answer.output.splitlines() if "passed" not in line and "not run" not in line]
    return "\n".join(line for line in lines if re.search(r"FAILED|differ|not equal|<-|Error|^ {20,}", line))


def by_tests(copy: Copy, fault: Fault, sound: set[str]) -> str:
    """The test that finds a fault, or "". sound: tests that pass without a fault; extended here."""
    for target in fault.tests:
        with copy.fault(fault):
            failed = copy.failing([target])
        if failed and not sound.issuperset(failed):
            unsound = copy.failing(failed)
            if unsound:
                print(f"{fault.id}: fails without a fault too: {', '.join(unsound)}", file=sys.stderr)
                continue
            sound |= set(failed)
        if failed:
            return failed[0]
    return ""


def check_correct(copy: Copy, model: str) -> dict[str, Any]:
    """The result of check-model for a correct model."""
    answer = copy.titanlite(["check-model", model])
    if answer.code:
        print(f"{model}: {_said(answer)}", file=sys.stderr)
    return {"passed": answer.code == 0, "seconds": round(answer.seconds)}


def document(text: str, faults: list[Fault], known: Known) -> str:
    """docs/design/verification.md with new tables."""
    before, _, rest = text.partition(_MARK)
    _, _, after = rest.partition(_MARK)
    tables = f"{table(faults, known['faults'])}\n\n{correct_table(known['correct'])}"
    return f"{before}{_MARK}\n{tables}\n\n{_MARK}{after}"


def table(faults: list[Fault], known: dict[str, dict[str, Any]]) -> str:
    """A line for each fault, and the totals. Our own faults, without a report, are only for the tests."""
    lines, reported = [], [fault for fault in faults if fault.source]
    for fault in faults:
        result = known.get(fault.id, {})
        cells = [result.get(name, "not run") if fault.source else "" for name in COMMANDS]
        test = result.get("test")
        cells.append("not run" if test is None else "found" if test else "**missed**")
        report = f" [report]({fault.source})" if fault.source else ""
        lines.append(f"| {fault.id} | {fault.why}{report} | {' | '.join(cells)} |")
    answers = [{known.get(fault.id, {}).get(name) for name in COMMANDS} for fault in reported]
    asked, found = sum(answer != {None} for answer in answers), sum(bool(answer & {"found", "named"}) for answer in answers)
    named, tests = sum("named" in answer for answer in answers), [known.get(fault.id, {}).get("test") for fault in faults]
    ran = sum(test is not None for test in tests)
    total = (
        f"Of {len(reported)} faults of other frameworks, {asked} were scored: {found} are found by one of the two commands, "
        f"{named} of them named. The tests find {sum(map(bool, tests))} of the {ran} faults for which they have run."
    )
    return "\n".join([total, "", "| | fault | verify | check-model | tests |", "| - | - | - | - | - |", *lines])


def correct_table(known: dict[str, dict[str, Any]]) -> str:
    """A line for each correct model, with the seconds of check-model."""
    lines = [
        f"| {model} | {what} | {'passed' if known[model]['passed'] else '**failed**'} | {known[model]['seconds']} |"
        for model, what in CORRECT.items()
        if model in known
    ]
    alarms = sum(not known[model]["passed"] for model in known)
    total = f"{alarms} of {len(lines)} right models fail."
    head = ["| model | what a proof could take for a fault | check-model | seconds |", "| - | - | - | - |"]
    return "\n".join([total, "", *head, *lines])


def read_score() -> Known:
    return json.loads(SCORE.read_text(encoding="utf-8")) if SCORE.exists() else {"faults": {}, "correct": {}}


def _write_score(known: Known) -> None:
    """One line for each result."""
    parts = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(of)}" for name, of in results.items())
        + "\n }"
        for kind, results in known.items()
    ]
    unfinished = SCORE.with_suffix(".tmp")
    unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    unfinished.rename(SCORE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", help="only this one, by its id; may be given several times")
    parser.add_argument("--suite", action="store_true", help="run the tests that each fault names")
    parser.add_argument("--correct", action="store_true", help="run check-model on the right models")
    parser.add_argument("--again", action="store_true", help="also what another commit has scored")
    parser.add_argument("--table", action="store_true", help="write the tables of docs/design/verification.md")
    arguments = parser.parse_args()
    faults, known = read_faults(), read_score()
    if unknown := set(arguments.fault or ()) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if arguments.table:
        DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8"), faults, known), encoding="utf-8")
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    passing: set[str] = set()

    def score(kind: str, name: str, key: str, measure: Any) -> None:
        """Stores a new result with its commit (`key`)."""
        before = known[kind].get(name, {})
        if not arguments.fault and key in before and not (arguments.again and before[key] != commit):
            return
        known[kind][name] = before | measure() | {key: commit}
        _write_score(known)
        print(name, json.dumps(known[kind][name]), flush=True)

    with tempfile.TemporaryDirectory(prefix="titanlite-score-") as folder:
        copy = Copy(Path(folder))
        for model in CORRECT if arguments.correct else ():
            score("correct", model, "commit", lambda model=model: check_correct(copy, model))
        for fault in () if arguments.correct else faults:
            if arguments.fault and fault.id not in arguments.fault:
                continue
            if arguments.suite:
                score("faults", fault.id, "test commit", lambda fault=fault: {"test": by_tests(copy, fault, passing)})
            elif fault.source:
                score("faults", fault.id, "commit", lambda fault=fault: by_commands(copy, fault, passing))


if __name__ == "__main__":
    main()
