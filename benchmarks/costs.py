"""The largest costs of a step, from a trace of `--profiling.enable_profiling true`:

    python -m benchmarks.costs outputs/RUN/profile_traces/step-00000010/rank-0.json.gz [--rows 15]

On a CPU it shows the self time of each operation; on a GPU the time of each kernel and each kind of kernel, and the idle time.
An operation that runs on several threads counts once, on the thread that called it.
"""

import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# The kind of a GPU kernel by its name; the first match counts. Inductor names a kernel after all operations in it: triton_poi,
# _red and _per are fused elementwise operations and reductions, triton_tem a matmul or FlexAttention.
_KINDS = {
    "collectives": re.compile(r"nccl"),
    "elementwise and reductions": re.compile(r"triton_(poi|red|per)_"),
    "attention": re.compile(r"flash|fmha|sdpa|flex_attention|cudnn_generated"),
    "matmuls": re.compile(r"gemm|nvjet|cutlass|xmma|triton_tem_|cublas"),
    "copies": re.compile(r"^Mem(cpy|set)|copy"),
}


def own_times(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """(microseconds of self time, calls) by name, of one thread's complete events."""
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
    counted = _ON_GPU if any(e.get("cat") == "kernel" for e in events) else ("cpu_op",)
    by_thread: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in counted:
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in by_thread.values():
        more, times = own_times(each)
        spent.update(more)
        calls.update(times)
    return spent, calls


def kinds(trace: dict[str, Any]) -> dict[str, float]:
    """Microseconds of GPU kernels by kind, and "idle": those between the first and the last kernel without any.

    Empty for a trace without kernels. Kernels that run at the same time are counted separately; idle is the time in which none
    runs.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = sorted((event for event in events if event.get("cat") in _ON_GPU), key=lambda event: event["ts"])
    updates = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith("Optimizer.step")
    ]
    found: Counter[str] = Counter()
    end = kernels[0]["ts"] if kernels else 0.0
    for kernel in kernels:
        of_optimizer = any(begin <= kernel["ts"] < finish for begin, finish in updates)
        by_name = next((kind for kind, pattern in _KINDS.items() if pattern.search(kernel["name"])), "other")
        found["optimizer" if of_optimizer else by_name] += kernel["dur"]
        found["idle"] += max(0.0, kernel["ts"] - end)
        end = max(end, kernel["ts"] + kernel["dur"])
    return dict(found.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__, allow_abbrev=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=15)
    args = parser.parse_args()
    with gzip.open(args.trace) if args.trace.suffix == ".gz" else args.trace.open("rb") as file:
        trace = json.load(file)
    spent, calls = costs(trace)
    whole = sum(spent.values())
    print(f"{whole / 1e3:.1f} ms")
    for kind, time in kinds(trace).items():
        print(f"{time / whole:6.1%} {time / 1e3:9.2f} ms           {kind}")
    for name, time in spent.most_common(args.rows):
        print(f"{time / whole:6.1%} {time / 1e3:9.2f} ms {calls[name]:6} x  {name[:90]}")


if __name__ == "__main__":
    main()
