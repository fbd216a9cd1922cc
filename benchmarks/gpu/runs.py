"""One run: its command, its time limit, and its results."""

import gzip
import importlib.util
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.costs import costs, kinds
from benchmarks.gpu.plan import Run, options_of, words_of
from benchmarks.processes import ROOT
from titanlite.launch import children

_FOLDER = "FOLDER"  # replaces a run's work folder in the command that the results record
_LOG = "log.txt"
_TAIL = 40  # lines of a failed run's log in the results


class RunIdentity(NamedTuple):
    """The settings of all runs."""

    work: Path  # folder of logs, traces, run folders
    gpus: int
    rehearse: bool


# ----------------------------------------------------------------------------------------------------------- the commands


def _train(run: Run, setting: RunIdentity) -> list[str]:
    options = options_of(run, setting.rehearse) | {"job.dump_folder": _FOLDER}
    return ["./run_train.sh", f"train_configs/{run.config}.toml", *words_of(options)]


def _device(run: Run, setting: RunIdentity) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.device", f"{_FOLDER}/device.json"]


def _tests(run: Run, setting: RunIdentity) -> list[str]:
    some = ["-k", "waits_for_the_device"] if setting.rehearse else []
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={_FOLDER}/tests.xml", "tests/distributed/test_cuda.py"]
    return [sys.executable, "-m", "pytest", *words, *some]


def _estimates(run: Run, setting: RunIdentity) -> list[str]:
    some = ["--rehearse"] if setting.rehearse else []
    return [sys.executable, "-m", "benchmarks.gpu.estimates", f"{_FOLDER}/estimates.json", "--gpus", str(setting.gpus), *some]


def _operations(run: Run, setting: RunIdentity) -> list[str]:
    some = ["--rehearse"] if setting.rehearse else []
    return [sys.executable, "-m", "benchmarks.gpu.operations", f"{_FOLDER}/operations.json", *some]


def _throughput(run: Run, setting: RunIdentity) -> list[str]:
    tiny = "--device cpu --peers plain --model llama3:debug --vocab 512 --batch 1 --seq 32 --rounds 1 --steps 2 --no-warm "
    tiny += "--precision float32 --check-steps 2 --titanlite '--compile.enable false'"  # some CPUs lack bfloat16's instructions
    words = tiny if setting.rehearse else run.options["words"]
    return [sys.executable, "-m", "benchmarks.throughput", *shlex.split(words), "--output", f"{_FOLDER}/throughput.json"]


def command_of(run: Run, setting: RunIdentity) -> str:
    """The command of a run as the results record it."""
    return shlex.join("python" if word == sys.executable else word for word in KINDS[run.kind].words(run, setting))


# ------------------------------------------------------------------------------------------------------------ the figures


def read_training(folder: Path) -> dict[str, Any]:
    """Speed, utilization and memory of a run folder, also of an interrupted run. Raises ValueError without a report.

    Rates are medians of the reports after the second one: the first two include compilation.
    """
    path = folder / "metrics.jsonl"
    reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not reports:
        raise ValueError("no step was reported")
    steady = reports[2:] or reports[1:] or reports
    names = ("tokens_per_second", "tokens_per_second_per_device", "mfu_causal", "mfu_palm", "data_wait_fraction")
    found = {name: statistics.median(r[name] for r in steady) for name in names if name in reports[0]}
    start = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))[-1]
    first = reports[0]
    return found | {
        "reports": len(steady),
        "peak_memory_gib": max(r["peak_memory_gib"] for r in reports),
        "recompilations": reports[-1].get("recompilations", 0),
        "startup_seconds": first["startup_seconds"],
        "first_step_seconds": first["tokens_seen"] / first["tokens_per_second"],
        "losses": [r["loss"] for r in reports],
        "values": {name: start["values"][name] for name in ("attention", "recomputed", "precision", "device")},
    }


def read_trace(folder: Path) -> dict[str, Any]:
    """A training run's results, the largest costs of its traced step, and their shares by kind."""
    paths = sorted(folder.glob("profile_traces/*/rank-0.json.gz"))
    if not paths:
        raise ValueError("no step was traced")
    with gzip.open(paths[-1]) as file:
        trace = json.load(file)
    spent, calls = costs(trace)
    return read_training(folder) | {
        "microseconds": sum(spent.values()),
        "kinds": kinds(trace),
        "largest": [[name, time, calls[name]] for name, time in spent.most_common(20)],
    }


def read_tests(folder: Path) -> dict[str, Any]:
    """How many tests passed, were skipped and failed, and the message of each that failed."""
    suite = next(xml.etree.ElementTree.parse(folder / "tests.xml").getroot().iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    failed = {
        case.attrib["name"]: fault.attrib.get("message", "")
        for case in suite.iter("testcase")
        for fault in [*case.findall("failure"), *case.findall("error")]
    }
    return counts | {"failed": failed}


def _read_json(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: json.loads((folder / name).read_text(encoding="utf-8"))


class Kind(NamedTuple):
    """How a kind of run is started and read."""

    words: Callable[[Run, RunIdentity], list[str]]
    read: Callable[[Path], dict[str, Any]]


KINDS = {
    "train": Kind(_train, read_training),
    "trace": Kind(_train, read_trace),
    "device": Kind(_device, _read_json("device.json")),
    "tests": Kind(_tests, read_tests),
    "estimates": Kind(_estimates, _read_json("estimates.json")),
    "operations": Kind(_operations, _read_json("operations.json")),
    "throughput": Kind(_throughput, _read_json("throughput.json")),
}


# --------------------------------------------------------------------------------------------------------------- the work


def carry_out(run: Run, part: str, setting: RunIdentity, seconds: float) -> dict[str, Any]:
    """Runs a command for at most `seconds` -> its result, whose status is done, failed, out of time or left out.

    A run that failed or ran out of time has the results that it reported before, if any.
    """
    missing = [name for name in run.needs if importlib.util.find_spec(name) is None]
    if missing and not setting.rehearse:
        return {"status": "left out", "reason": f"not installed: {', '.join(missing)}", "seconds": 0.0}
    if setting.gpus < run.gpus:
        return {"status": "left out", "reason": f"needs {run.gpus} GPUs: --gpus {run.gpus}", "seconds": 0.0}
    kind = KINDS[run.kind]
    folder = setting.work / part / run.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin = time.monotonic()
    code = _execute([word.replace(_FOLDER, str(folder)) for word in kind.words(run, setting)], folder / _LOG, setting, seconds)
    result: dict[str, Any] = {
        "status": "out of time" if code is None else "failed" if code else "done",
        "command": command_of(run, setting),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - begin, 1),
    }
    if code is None:
        result["reason"] = f"did not end within {seconds:.0f} s"
    if code:
        result |= {"reason": _reason(folder / _LOG, code), "log": _lines(folder / _LOG)[-_TAIL:]}
    try:
        result["figures"] = kind.read(folder)
    except (OSError, ValueError, KeyError, xml.etree.ElementTree.ParseError) as error:
        if code == 0:  # otherwise it has not written results
            result |= {"status": "failed", "reason": f"no figures: {error}", "log": _lines(folder / _LOG)[-_TAIL:]}
    return result


def _execute(words: list[str], log: Path, setting: RunIdentity, seconds: float) -> int | None:
    """The exit code of a command, or None if its time ran out; its processes end with this one, even by SIGKILL."""
    variables = {"PYTHON": sys.executable, "NGPU": str(setting.gpus)}
    if setting.rehearse:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | variables,
            start_new_session=True,
            preexec_fn=children.end_with_parent,
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def _reason(log: Path, code: int) -> str:
    """The most informative line of a log: the one about memory, else the last one of an error, else the last one."""
    lines = [line.strip() for line in _lines(log) if line.strip()]
    memory = [line for line in lines if "out of memory" in line.lower()]
    errors = [line for line in lines if "Error" in line or "FAILED" in line]
    return (memory[:1] or errors[-1:] or lines[-1:] or [f"exit code {code}, without output"])[0]
