"""The memory that titanlite estimate predicts for every training run of the plan: python -m benchmarks.gpu.estimates FILE

It needs no GPU. For all runs it takes minutes on two cores. The estimate is of blocks that are not compiled, with a CPU's
kernels; "compiled" counts what compiled blocks keep of their activations, and "fits" is 1 where that fits an H200.
"""

import argparse
import json
from pathlib import Path

from benchmarks.gpu.plan import PARTS, Run, options_of, training_runs, words_of
from benchmarks.processes import ROOT
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.plan.predict import MemoryEstimate, predict
from titanlite.plan.report import GIB, RESERVE

FREE_GIB = 139  # of an H200
# What compiled blocks of Llama keep of the estimated activations, without recomputation and by budget (NOTES.md, 2026-11-25).
KEPT_COMPILED = 0.65
KEPT_BY_BUDGET = {0.8: 0.45, 0.5: 0.38}


def compiled_bytes(memory: MemoryEstimate, config: Config) -> float:
    """The estimate with the activations of compiled blocks; with other recomputation they keep what is estimated."""
    recomputation = config.activation_checkpoint
    kept = {"none": KEPT_COMPILED, "memory_budget": KEPT_BY_BUDGET.get(recomputation.memory_budget, KEPT_COMPILED)}
    share = kept.get(recomputation.mode, 1.0) if config.compile.enable else 1.0
    return memory.total - memory.activations * (1 - share)


def estimate_gib(run: Run, gpus: int, rehearse: bool) -> dict[str, float]:
    """Predicted GiB of one GPU: in all, compiled, and by what holds them; and whether it fits."""
    config = read_config(ROOT / "train_configs" / f"{run.config}.toml", words_of(options_of(run, rehearse)))
    memory = predict(config, max(gpus, run.gpus)).memory
    compiled = compiled_bytes(memory, config)
    sizes = {"total": memory.total, "compiled": compiled, **memory._asdict()}
    return {name: size / GIB for name, size in sizes.items()} | {"fits": float(compiled + RESERVE <= FREE_GIB * GIB)}


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
        key = f"{run.config} {run.gpus} {sorted(options.items())}"
        if key not in known:
            known[key] = estimate_gib(run, args.gpus, args.rehearse)
        found[name] = known[key]
    args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
