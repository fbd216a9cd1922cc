"""The largest costs of a step, from a trace of `--profiling.enable_profiling true`:

    python -m benchmarks.costs outputs/RUN/profile_traces/step-00000010/rank-0.json.gz [--rows 15]

On a CPU it shows the self time of each operation, on a GPU the time of each kernel. An operation that runs on several threads
counts once, on the thread that called it.
"""

import argparse
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any


def own_times(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """(microseconds of self time, calls) by name, of the complete events of one thread."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    open_events: list[tuple[str, float]] = []  # name, end
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_events and open_events[-1][1] <= event["ts"]:
            open_events.pop()
        if open_events:
            spent[open_events[-1][0]] -= event["dur"]
        spent[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        open_events.append((event["name"], event["ts"] + event["dur"]))
    return spent, calls


def costs(trace: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """(microseconds, calls) by name, of the GPU kernels, or of the CPU operations if there are no kernels."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if any(e.get("cat") == "kernel" for e in events) else ("cpu_op",)
    by_thread: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in kinds:
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in by_thread.values():
        more, times = own_times(each)
        spent.update(more)
        calls.update(times)
    return spent, calls


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__, allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=15)
    args = parser.parse_args()
    with gzip.open(args.trace) if args.trace.suffix == ".gz" else args.trace.open("rb") as file:
        spent, calls = costs(json.load(file))
    whole = sum(spent.values())
    print(f"{whole / 1e3:.1f} ms")
    for name, time in spent.most_common(args.rows):
        print(f"{time / whole:6.1%} {time / 1e3:9.2f} ms {calls[name]:6} x  {name[:90]}")


if __name__ == "__main__":
    main()
