"""One page of all results: goals, a table for each part, and two plots where matplotlib is installed."""

import importlib.util
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.figures import markdown, table
from benchmarks.gpu.plan import GOALS, NEAR_ESTIMATE, PARTS, Goal, training_runs
from titanlite.ground.files import replace_file
from titanlite.plan.time import peak_flops_of

Result = dict[str, Any]
_PLOT = "runs.png"
_TOKENS = "tokens_per_second_per_device"


def write_page(folder: Path) -> Path:
    """Writes README.md and its plot from the results in a folder; -> the page."""
    files = {part.name: folder / f"{part.name}.json" for part in PARTS}
    results = {
        f"{part}/{name}": result
        for part, file in files.items()
        if file.exists()
        for name, result in json.loads(file.read_text(encoding="utf-8")).items()
    }
    estimates = _figures(results, "memory/estimates")
    trained = {name: results[name] for name in training_runs(PARTS) if "figures" in results.get(name, {})}
    plotted = bool(trained) and importlib.util.find_spec("matplotlib") is not None
    if plotted:
        plot(trained, estimates, folder / _PLOT)
    page = folder / "README.md"
    replace_file(page, "\n".join(lines(results, estimates, plotted)) + "\n")
    return page


def lines(results: dict[str, Result], estimates: dict[str, dict[str, float]], plotted: bool = False) -> list[str]:
    """The page. results: by PART/RUN; estimates: GiB by PART/RUN and kind."""
    device = _figures(results, "start/environment")
    title = device.get("gpu", "A rehearsal on a CPU" if device else "Not measured yet")
    found = [f"# {title}", "", *_facts(device, results)]
    found += ["", "## Goals for one H200", "", markdown(goal_rows(results, estimates)), ""]
    if plotted:
        found += [f"![speed and memory of every training run]({_PLOT})", ""]
    for part in PARTS:
        found += [f"## {part.name}", "", part.question, ""]
        runs = {run.name: results[f"{part.name}/{run.name}"] for run in part.runs if f"{part.name}/{run.name}" in results}
        trained = {name: runs[name] for name in runs if f"{part.name}/{name}" in training_runs(PARTS)}
        if trained:
            found += [markdown(training_rows(part.name, trained, estimates, _headroom(device))), ""]
        for name, result in runs.items():
            found += _details(f"{part.name}/{name}", result)
        missing = [run.name for run in part.runs if run.name not in runs]
        found += [f"Not measured: {', '.join(missing)}.", ""] if missing else []
    return found[:-1]


def _facts(device: Result, results: dict[str, Result]) -> list[str]:
    commits = {
        f"{str(result['commit'])[:10]}{' with uncommitted changes' if result['changed'] else ''}"
        for result in results.values()
        if "commit" in result
    }
    dates = sorted(result["date"] for result in results.values() if "date" in result)
    when = f", {dates[0]} to {dates[-1]}" if dates else ""
    found = [f"`python -m benchmarks.gpu`, commit {', '.join(sorted(commits)) or 'unknown'}{when}."]
    if "gpu" in device:
        memory = f"{device['gpus']} of {device['total_gib']:.1f} GiB, of which {device['free_gib']:.1f} are free"
        found += [f"GPUs: {memory}; CUDA {device['cuda']}, cuDNN {device['cudnn']}."]
    if device:
        versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
        found += [
            f"{device['cores']} CPU cores, {device['memory_gb']:.0f} GB. {versions}.",
            f"A large matmul: {device['matmul_flops'] / 1e12:.4g} TFLOP/s in bfloat16. "
            f"A large copy: {device['copy_bytes'] / 1e9:,.0f} GB/s, read and written.",
        ]
    return found


def goal_rows(results: dict[str, Result], estimates: dict[str, dict[str, float]]) -> list[list[str]]:
    """A header, a row for each goal with the best run, and one for the memory."""
    rows = [["goal", "at least", "best", "run", ""], *(_goal_row(goal, results) for goal in GOALS)]
    apart = {name: abs(share) for name in training_runs(PARTS) if (share := _apart(name, results, estimates)) is not None}
    worst = max(apart, key=apart.__getitem__, default=None)
    near = f"within {NEAR_ESTIMATE:.0%}"
    if worst is None:
        return [*rows, ["memory beside the estimate, every run", near, "-", "-", "not measured"]]
    far = sum(share > NEAR_ESTIMATE for share in apart.values())
    verdict = f"**missed** by {far} of {len(apart)} runs" if far else "reached"
    return [*rows, ["memory beside the estimate, every run", near, f"{apart[worst]:.1%} at most", worst, verdict]]


def _goal_row(goal: Goal, results: dict[str, Result]) -> list[str]:
    values = {
        name: result["figures"][goal.figure]
        for name, result in results.items()
        if fnmatchcase(name, goal.runs) and goal.figure in result.get("figures", {})
    }
    share = goal.figure.startswith("mfu")
    show = (lambda value: f"{value:.1%} MFU PaLM") if share else (lambda value: f"{value:,.0f} tokens/s")
    if not values:
        return [goal.text, show(goal.at_least), "-", goal.runs, "not measured"]
    best = max(values, key=values.__getitem__)
    short = 1 - values[best] / goal.at_least
    verdict = f"**missed** by {short:.1%}" if short > 0 else "reached"
    return [goal.text, show(goal.at_least), show(values[best]), best, verdict]


def training_rows(
    part: str, runs: dict[str, Result], estimates: dict[str, dict[str, float]], headroom: float | None
) -> list[list[str]]:
    """A header and a row for each training run of a part. headroom: of `_headroom`."""
    header = ["run", "tokens/s a GPU", "MFU PaLM", "MFU causal", "PaLM / matmul", "peak GiB", "estimate GiB", "apart"]
    rows = [[*header, "fits", "start s", "first step s", "recompiled", "status"]]
    for name, result in runs.items():
        f = result.get("figures", {})
        predicted = estimates.get(f"{part}/{name}", {})
        estimate, fits = predicted.get("total"), predicted.get("fits")
        apart = _apart(f"{part}/{name}", {f"{part}/{name}": result}, estimates)
        rows.append(
            [
                name,
                _shown(f.get(_TOKENS), "{:,.0f}"),
                _shown(f.get("mfu_palm"), "{:.1%}"),
                _shown(f.get("mfu_causal"), "{:.1%}"),
                _shown(f["mfu_palm"] * headroom if headroom and "mfu_palm" in f else None, "{:.1%}"),
                _shown(f.get("peak_memory_gib"), "{:.2f}"),
                _shown(estimate, "{:.2f}"),
                _shown(apart, "{:+.1%}"),
                "-" if fits is None else "fits" if fits else "does not",
                _shown(f.get("startup_seconds"), "{:.1f}"),
                _shown(f.get("first_step_seconds"), "{:.1f}"),
                _shown(f.get("recompilations"), "{}"),
                result["status"] + (f": {result['reason']}".replace("|", "/") if "reason" in result else ""),
            ]
        )
    return rows


def _headroom(device: Result) -> float | None:
    """The data sheet's rate of a GPU / that of a large matmul on it; None if one is unknown."""
    peak = peak_flops_of(device.get("gpu", ""))
    return peak / device["matmul_flops"] if peak else None


def _details(name: str, result: Result) -> list[str]:
    """Details of one run that no table shows: its command, and what only runs of its kind have."""
    found, f = [], result.get("figures", {})
    if "command" in result:
        found += [f"- {name}, {result['seconds']:.0f} s: `{result['command']}`"]
    if "values" in f:
        found += [f"  - {f['values']['attention']}; {f['values']['precision']}; losses {_losses(f['losses'])}"]
    elif result["status"] != "done":
        found += [f"- {name}: **{result['status']}**: {result['reason']}"]
    if "skipped" in f:
        found += [f"  - {f['tests']} tests, {f['skipped']} skipped, {f['failures'] + f['errors']} failed"]
        found += [f"  - **{test}**: {message.splitlines()[0] if message else ''}" for test, message in f["failed"].items()]
    if "largest" in f:
        whole = f["microseconds"]
        kinds = [[kind, f"{time / 1e3:.2f}", f"{time / whole:.1%}"] for kind, time in f["kinds"].items()]
        costs = [[f"`{each[:80]}`", f"{time / 1e3:.2f}", f"{time / whole:.1%}", str(n)] for each, time, n in f["largest"]]
        found += ["", markdown([["kind", "ms", "of all kernels"], *kinds])] if kinds else []
        found += ["", markdown([["the largest", "ms", "of all", "calls"], *costs])]
    if "router" in f:
        pairs = [
            [operation, case, f"{ms['before']:.2f}", f"{ms['after']:.2f}"]
            for operation in ("router", "block mask")
            for case, ms in f[operation].items()
        ]
        sizes = f["head chunks"].values()
        chunks = [[str(row["chunk"]), f"{row['milliseconds']:.1f}", f"{row['peak_bytes'] / 2**30:.2f}"] for row in sizes]
        found += ["", markdown([["operation", "case", "ms before", "ms after"], *pairs])]
        found += ["", markdown([["tokens of a chunk of the head", "ms", "peak GiB"], *chunks])]
    if "contestants" in f:
        found += ["", markdown(table(f))]
        found += [f"\nNot measured: {peer}: {why}" for peer, why in (f["left_out"] | f["failed"]).items()]
    return [*found, ""] if found else []


def plot(runs: dict[str, Result], estimates: dict[str, dict[str, float]], path: Path) -> None:
    """Two panels: tokens per second of every training run, with the goals; its peak memory, with the estimate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(reversed(runs))
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 1.5 + 0.28 * len(names)), sharey=True)
    speed.barh(names, [runs[name]["figures"].get(_TOKENS, 0.0) for name in names], color="tab:orange", alpha=0.7)
    for goal in (goal for goal in GOALS if goal.figure == _TOKENS):
        for place in (place for place, name in enumerate(names) if fnmatchcase(name, goal.runs)):
            speed.vlines(goal.at_least, place - 0.5, place + 0.5, "k", linestyles="dotted")
    speed.set_xlabel("tokens per second a GPU; dotted: goal for one H200")
    memory.barh(names, [runs[name]["figures"]["peak_memory_gib"] for name in names], color="tab:blue", alpha=0.7)
    known = [(place, estimates[name]["total"]) for place, name in enumerate(names) if name in estimates]
    memory.plot([size for _, size in known], [place for place, _ in known], "k|", markersize=12)
    memory.set_xlabel("peak memory, GiB; mark: titanlite estimate")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _figures(results: dict[str, Result], name: str) -> dict[str, Any]:
    return results.get(name, {}).get("figures", {})


def _apart(name: str, results: dict[str, Result], estimates: dict[str, dict[str, float]]) -> float | None:
    """How far a run's peak memory is above the estimate, relative to the estimate."""
    peak, estimate = _figures(results, name).get("peak_memory_gib"), estimates.get(name, {}).get("total")
    return None if peak is None or not estimate else peak / estimate - 1


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _losses(losses: list[float | None]) -> str:
    return ", ".join("not finite" if loss is None else f"{loss:.4f}" for loss in losses)
