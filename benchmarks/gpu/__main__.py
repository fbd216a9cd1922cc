"""All measurements on a GPU, ordered by what their results decide; see benchmarks/README.md, "On a GPU".

    python -m benchmarks.gpu --minutes 9       repeat until it exits with 0
    python -m benchmarks.gpu --rehearse        everything on a CPU, with tiny sizes
    python -m benchmarks.gpu --name H200 --parts memory      the parts that need no GPU

Each part has a result file, written after each of its runs. A start does not repeat runs that have a result, so an interruption
loses only the current run. At its end it writes README.md next to the results; after a kill, --page does.

Exit code 0: every run has a result; 1: every run has one, but some failed; 75: time is over, start it again; 2: wrong options.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import write_page
from benchmarks.gpu.plan import PARTS, Part, named
from benchmarks.gpu.runs import RunIdentity, carry_out, command_of
from benchmarks.processes import ROOT
from benchmarks.throughput import commit
from titanlite.ground.files import replace_file

_AGAIN = 75  # EX_TEMPFAIL of sysexits.h, as for a stopped training run
_FREE_OF_GPU = ["memory"]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add("--name", help="the results are in benchmarks/results/gpu_NAME; default: the GPU's name")
    add("--results", type=Path, help="another folder of the results; a start continues from what is there")
    add("--work", type=Path, default=ROOT / "outputs" / "gpu", help="folder of logs, traces and run folders")
    add("--minutes", type=float, help="stop before a run that may not end within this many minutes from now")
    add("--parts", default=",".join(names), help=f"some of {', '.join(names)}")
    add(
        "--runs",
        action="append",
        default=[],
        metavar="PART/RUN",
        help="only the runs of a pattern (repeatable)",
    )
    add("--again", action="append", default=[], metavar="PART/RUN", help="repeat the runs of a pattern, such as '8b/*'")
    add("--gpus", type=int, default=1, help="GPUs of every training run; batches are those of one GPU")
    add("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    add("--page", action="store_true", help="only write the page, from the results that are there")
    args = parser.parse_args(words)
    if unknown := [name for name in args.parts.split(",") if name not in names]:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(names)}")
    for option, patterns in (("--runs", args.runs), ("--again", args.again)):
        if unknown := [pattern for pattern in patterns if not named(PARTS, [pattern])]:
            parser.error(f"{option} {unknown[0]}: matches no run; there are {', '.join(named(PARTS, ['*']))}")
    gpu = "" if args.rehearse else gpu_name()
    args.name = args.name or ("rehearsal" if args.rehearse else re.sub(r"\W+", "_", gpu))
    if not args.name:
        parser.error("nvidia-smi names no GPU here; give --name of the GPU, or --rehearse")
    if not (gpu or args.rehearse or args.page or set(args.parts.split(",")) <= set(_FREE_OF_GPU)):
        parser.error(f"nvidia-smi names no GPU here; without one there is --parts {','.join(_FREE_OF_GPU)}, or --rehearse")
    home = ROOT / "outputs" if args.rehearse else ROOT / "benchmarks" / "results"
    args.results = args.results or home / f"gpu_{args.name}"
    return args


def gpu_name() -> str:
    """The driver's name of the first GPU; empty without one. PyTorch would allocate GPU memory to find it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(words, capture_output=True, text=True)
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout.strip() else ""


def load_results(folder: Path, parts: tuple[Part, ...] = PARTS) -> dict[str, dict[str, Any]]:
    """The results by part and run."""
    files = {part.name: folder / f"{part.name}.json" for part in parts}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def carry_on(parts: tuple[Part, ...], setting: RunIdentity, folder: Path, deadline: float, again: list[str]) -> bool:
    """Does the runs that have no result -> True if all have one, False if the deadline (time.monotonic()) is near.

    again: patterns of PART/RUN whose results are discarded.
    """
    results = load_results(folder, parts)
    for part in parts:
        done = results.setdefault(part.name, {})
        for name in [name for name in done if any(fnmatchcase(f"{part.name}/{name}", pattern) for pattern in again)]:
            done.pop(name)
    for part in parts:
        done = results[part.name]
        for run in part.runs:
            if run.name in done:
                continue
            of_part = part.seconds - sum(result["seconds"] for result in done.values())
            left = deadline - time.monotonic()
            if of_part <= 0:
                reason = f"the part's {part.seconds} s were used up"
                done[run.name] = {"status": "out of time", "reason": reason, "seconds": 0.0}
            elif left < min(run.seconds, of_part) / 2:  # limits are several times the expected time
                return False
            else:
                say(f"{part.name}/{run.name} ...")
                limit = min(run.seconds, of_part)
                # with tiny sizes many runs are identical
                known = [each for runs in results.values() for each in runs.values()] if setting.rehearse else []
                same = [each for each in known if each.get("command") == command_of(run, setting)]
                result = same[0] if same else carry_out(run, part.name, setting, min(limit, left))
                if result["status"] == "out of time" and left < limit:
                    return False  # interrupted, not slow: the next start repeats it
                done[run.name] = result | commit()
            replace_file(folder / f"{part.name}.json", json.dumps(done, indent=1) + "\n")
            say(f"{part.name}/{run.name}: {done[run.name]['status']} {done[run.name].get('reason', '')}".rstrip())
    return True


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), text, flush=True)


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args.results.mkdir(parents=True, exist_ok=True)
    if not args.page:
        deadline = time.monotonic() + (60 * args.minutes if args.minutes else float("inf"))
        wanted = named(PARTS, args.runs or ["*"])
        parts = tuple(
            part._replace(runs=tuple(run for run in part.runs if f"{part.name}/{run.name}" in wanted))
            for part in PARTS
            if part.name in args.parts.split(",")
        )
        setting = RunIdentity(args.work.resolve() / args.name, args.gpus, args.rehearse)
        try:
            finished = carry_on(parts, setting, args.results, deadline, args.again)
        except KeyboardInterrupt:
            write_page(args.results)
            return 128 + signal.SIGINT
        if not finished:
            write_page(args.results)
            say("time is over; the same command continues from here")
            return _AGAIN
    say(str(write_page(args.results)))
    results = load_results(args.results)
    return int(any(result["status"] == "failed" for runs in results.values() for result in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
