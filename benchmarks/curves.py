"""Loss curves of every precision and optimizer on the same batches of real text.

    python -m benchmarks.curves [--steps 1000] [--only "NAME; NAME"] [--runs FOLDER]

Trains the debug recipe once for each row of RUNS, from the same initial weights, and writes results/curves.json. Runs that are
complete in FOLDER are not repeated. python -m benchmarks.report draws the plot and writes both into README.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "curves.json"
REFERENCE = "AdamW, float32"
_BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}
_FLOAT16 = {
    "training.mixed_precision_param": "float16",
    "model.name": "benchmarks.float16_products",
    "model.attention": "math",  # the kernel made of matmuls
}
_NARROW = _BFLOAT16 | {"training.dtype": "bfloat16"}
_FLOAT8 = _BFLOAT16 | {"float8.enable": "true", "float8.emulate": "true"}
RUNS: dict[str, dict[str, str]] = {
    REFERENCE: {},
    "AdamW, bfloat16": _BFLOAT16,
    "AdamW, float16": _FLOAT16,
    "AdamW, bfloat16 parameters, stochastic": _NARROW | {"optimizer.rounding": "stochastic"},
    "AdamW, bfloat16 parameters, compensated": _NARROW | {"optimizer.rounding": "compensated"},
    "AdamW, float8 tensorwise": _FLOAT8 | {"float8.recipe_name": "tensorwise"},
    "AdamW, float8 rowwise": _FLOAT8 | {"float8.recipe_name": "rowwise"},
    "AdamW, float8 rowwise_with_gw_hp": _FLOAT8 | {"float8.recipe_name": "rowwise_with_gw_hp"},
    "Adam, bfloat16, weight_decay 0.1": _BFLOAT16 | {"optimizer.name": "Adam"},
    "Adam, bfloat16, weight_decay 0": _BFLOAT16 | {"optimizer.name": "Adam", "optimizer.weight_decay": "0.0"},
    "Muon, bfloat16": _BFLOAT16 | {"optimizer.name": "Muon"},
    "Muon, bfloat16 parameters, stochastic": _NARROW | {"optimizer.name": "Muon", "optimizer.rounding": "stochastic"},
}
LAST = 50  # steps whose mean loss is compared: a single batch is as noisy as the differences


def losses(folder: Path) -> list[float]:
    """The loss of every reported step of a run, to five places."""
    path = folder / "metrics.jsonl"
    return [round(json.loads(line)["loss"], 5) for line in path.read_text().splitlines()] if path.exists() else []


def train(name: str, steps: int, folder: Path) -> list[float]:
    """The losses of one run, which is started unless it is complete. If it fails, this process exits with its code."""
    if len(losses(folder)) != steps:
        common = {
            "job.dump_folder": str(folder),
            "training.steps": str(steps),
            "lr_scheduler.warmup_steps": str(max(1, steps // 20)),
            "metrics.log_freq": "1",
            "checkpoint.enable": "false",
            "compile.enable": "true",
        }
        words = [word for key, value in (common | RUNS[name]).items() for word in (f"--{key}", value)]
        if code := subprocess.call([ROOT / "run_train.sh", ROOT / "train_configs" / "llama_debug.toml", *words]):
            sys.exit(code)
    return losses(folder)


def table(curves: dict[str, list[float]]) -> str:
    """Markdown: the final loss of each run, and its difference from the reference on the same batches."""
    last = {name: sum(curve[-LAST:]) / len(curve[-LAST:]) for name, curve in curves.items()}
    rows = [f"| run | loss, mean of the last {LAST} steps | less {REFERENCE} |", "| --- | --- | --- |"]
    return "\n".join(rows + [f"| {name} | {loss:.4f} | {loss - last[REFERENCE]:+.4f} |" for name, loss in last.items()])


def section(result: dict[str, Any], picture: str, source: str) -> str:
    """The result as Markdown. picture, source: its plot and its raw data, relative to README.md."""
    steps = len(result["curves"][REFERENCE])
    facts = (
        f"The debug recipe (5.2 M parameters, 2,048 tokens a step of Python's standard library) for {steps:,} steps, one seed, "
        "the same batches and weights in all. float8 and the products in float16 are emulated: rounding is that of a GPU, "
        "speed is not."
    )
    made = f"[{source}]({source}), commit {result['commit'][:10]}: `python -m benchmarks.curves --steps {steps}`"
    if absent := [name for name in RUNS if name not in result["curves"]]:
        facts += f" Not run yet: {'; '.join(absent)}."
    lines = ["### Loss curves of precisions and optimizers", "", facts, "", table(result["curves"]), ""]
    return "\n".join([*lines, f"![loss curves]({picture})", "", made])


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels: all curves, smoothed; and the difference from the reference for runs that differ only in precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def smooth(curve: list[float], width: int = 20) -> list[float]:
        return [sum(curve[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(curve))]

    curves = result["curves"]
    figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    for number, (name, curve) in enumerate(curves.items()):
        line = {"color": pyplot.get_cmap("tab20")(number), "linewidth": 1}
        whole.plot(smooth(curve), label=name, **line)
        difference = [mine - theirs for mine, theirs in zip(curve, curves[REFERENCE], strict=True)]
        if name.startswith("AdamW"):  # other runs differ in more than precision
            apart.plot(smooth(difference), **line)
    whole.set(xlabel="step", ylabel="loss, mean of 20 steps")
    apart.set(xlabel="step", ylabel=f"less {REFERENCE}")
    for axes in (whole, apart):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="names of runs, separated by semicolons")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "curves", help="the folder of the run folders")
    args = parser.parse_args()
    if args.steps < LAST:
        sys.exit(f"--steps {args.steps}: must be at least {LAST}: the mean loss of the last {LAST} steps is compared")
    chosen = [name.strip() for name in args.only.split(";") if name.strip()] or list(RUNS)
    if unknown := [name for name in chosen if name not in RUNS]:
        sys.exit(f"--only {unknown[0]}: there are {'; '.join(RUNS)}")
    folders = {name: args.runs / "".join(c if c.isalnum() else "_" for c in name) for name in RUNS}
    for name in chosen:
        train(name, args.steps, folders[name])
    curves = {name: losses(folder) for name, folder in folders.items()}
    curves = {name: curve for name, curve in curves.items() if len(curve) == args.steps}
    if REFERENCE not in curves:
        sys.exit(f"nothing is written without {REFERENCE}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    RESULT.write_text(json.dumps({"commit": commit, "curves": curves}) + "\n")
    print(table(curves))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the run has reported its failure
