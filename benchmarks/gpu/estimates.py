"""The memory that titanlite estimate predicts for every training run of the plan: python -m benchmarks.gpu.estimates FILE

It needs no GPU. For all runs it takes minutes on two cores. "fits" is 1 where the estimate fits an H200.
"""

import argparse
import json
from pathlib import Path

from benchmarks.gpu.plan import PARTS, Run, options_of, training_runs, words_of
from benchmarks.processes import ROOT
from titanlite.config.read import read_config
from titanlite.plan.predict import predict
from titanlite.plan.report import GIB, RESERVE

FREE_GIB = 139  # of an H200


def estimate_gib(run: Run, gpus: int, rehearse: bool) -> dict[str, float]:
    """Predicted GiB of one GPU: the total, and by kind; and whether they fit."""
    config = read_config(ROOT / "train_configs" / f"{run.config}.toml", words_of(options_of(run, rehearse)))
    memory = predict(config, max(gpus, run.gpus)).memory
    sizes = {"total": memory.total, **memory._asdict()}
    return {name: size / GIB for name, size in sizes.items()} | {"fits": float(memory.total + RESERVE <= FREE_GIB * GIB)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.estimates", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    # by the inputs of the prediction: the attention kernel has no effect, and tiny sizes make the runs of a recipe alike
    known: dict[str, dict[str, float]] = {}
    found = {}
    for name, run in training_runs(PARTS).items():
        options = {key: value for key, value in options_of(run, args.rehearse).items() if key != "model.attention"}
        key = run.config if args.rehearse else f"{run.config} {run.gpus} {sorted(options.items())}"
        if key not in known:
            known[key] = estimate_gib(run, args.gpus, args.rehearse)
        found[name] = known[key]
    args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
