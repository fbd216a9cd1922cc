"""The memory that titanlite estimate predicts for every training run of the plan: python -m benchmarks.gpu.estimates FILE

It needs no GPU. For all runs it takes minutes on two cores.
"""

import argparse
import json
from pathlib import Path

from benchmarks.gpu.plan import PARTS, Run, options_of, training_runs, words_of
from benchmarks.processes import ROOT
from titanlite.config.read import read_config
from titanlite.plan.predict import predict


def estimate_gib(run: Run, gpus: int, rehearse: bool) -> dict[str, float]:
    """Predicted GiB of one GPU: in all, and by what holds them."""
    config = read_config(ROOT / "train_configs" / f"{run.config}.toml", words_of(options_of(run, rehearse)))
    memory = predict(config, gpus).memory
    return {name: size / 2**30 for name, size in {"total": memory.total, **memory._asdict()}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.estimates", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    known: dict[str, dict[str, float]] = {}  # by what is predicted from: a kernel of attention changes nothing
    found = {}
    for name, run in training_runs(PARTS).items():
        options = {key: value for key, value in options_of(run, args.rehearse).items() if key != "model.attention"}
        key = f"{run.config} {sorted(options.items())}"
        if key not in known:
            known[key] = estimate_gib(run, args.gpus, args.rehearse)
        found[name] = known[key]
    args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
