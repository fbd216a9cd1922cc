"""The meshes of `titanlite plan` beside those of authors: python -m benchmarks.plan_winners [--models NAME ...] [--device h100]

Both with the recipe's options, the same global batch, and memory by `titanlite estimate`. Authors' meshes are those of the
sources in published_runs.toml, with dp_shard scaled to the number of GPUs.
"""

import argparse
from typing import NamedTuple

from titanlite.config.read import Faults, read_config
from titanlite.loop.checks import check
from titanlite.plan.report import GIB
from titanlite.plan.search import candidates, name_of
from titanlite.plan.time import Choice, Job, step
from titanlite.tools.plan import chosen_config, predicted, read_job, sound

_NODE = 8
_INTERLEAVED = "Interleaved1F1B"


class Model(NamedTuple):
    """A recipe of train_configs/, more options, the global batch in sequences, and the authors' choice by number of GPUs."""

    recipe: str
    batch: int
    authors: dict[int, Choice]
    options: tuple[str, ...] = ()


_FSDP, _FULL = Choice(microbatch=2, recompute="selective"), Choice(recompute="full")
_EP8 = _FULL._replace(ep=8, microbatch=4)
_EP64 = Choice(ep=64, ep_node=_NODE)
_STAGES = _FULL._replace(schedule=_INTERLEAVED)
_OF_REPORT = Choice(pp=16, tp=8, schedule=_INTERLEAVED)
MODELS = {
    "Llama 3 8B": Model(  # torchtitan
        "llama_8b",
        512,
        {8: _FSDP._replace(dp_shard=8), 64: _FSDP._replace(dp_shard=64), 128: _FSDP._replace(dp_shard=128)}
        | {512: _FSDP._replace(dp_shard=512, microbatch=1)},
    ),
    "Llama 3 70B": Model(  # NeMo Automodel with 64, torchtitan with more
        "llama_70b",
        512,
        {64: _FULL._replace(dp_shard=32, cp=2)}
        | {8 * shards: _FULL._replace(dp_shard=shards, tp=8, microbatch=512 // shards) for shards in (32, 64, 128)},
    ),
    "Llama 3 405B": Model(  # torchtitan, then the report (arXiv:2407.21783, table 4)
        "llama_405b",
        2048,
        {512: _STAGES._replace(pp=8, dp_shard=8, tp=8), 1024: _STAGES._replace(pp=8, dp_shard=16, tp=8)}
        | {8192: _OF_REPORT._replace(dp_shard=64), 16384: _OF_REPORT._replace(dp_shard=128)},
    ),
    "Qwen 3 30B-A3B": Model("qwen3_30b_a3b", 1024, {gpus: _EP8._replace(dp_shard=gpus) for gpus in (8, 32, 64, 256)}),  # NeMo
    "gpt-oss 120B": Model(  # NeMo Automodel
        "gpt_oss_20b",
        1024,
        {gpus: _EP64._replace(dp_shard=gpus, microbatch=2) for gpus in (64, 128, 256, 512)},
        ("--model.flavor", "120b"),
    ),
    "DeepSeek-V3": Model(  # NeMo, then the report (arXiv:2412.19437), whose DualPipe is 1F1B here
        "deepseek_v3",
        15360,
        {gpus: _EP64._replace(pp=4, dp_shard=gpus // 4, schedule=_INTERLEAVED, recompute="full") for gpus in (256, 512, 1024)}
        | {2048: _EP64._replace(pp=16, dp_shard=128, recompute="full")},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_winners", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="h100")
    words = parser.parse_args()
    print("| model, GPUs | mesh of its authors | predicted | GiB | mesh of the plan | predicted | GiB |")
    print("| - | - | - | - | - | - | - |")
    for name in words.models:
        for gpus in MODELS[name].authors:
            print(row(name, gpus, words.device), flush=True)


def row(name: str, gpus: int, device: str) -> str:
    """Of the table: choices, tokens per second and GPU, and GiB of a rank."""
    model = MODELS[name]
    path, choice = f"train_configs/{model.recipe}.toml", model.authors[gpus]
    options = [*model.options, "--training.global_batch_size", str(model.batch)]
    job = read_job(read_config(path, options), device, _NODE)
    config = chosen_config(path, options, choice)
    try:
        check(config, path, gpus, open_files=False, elsewhere=True)
        size = f"{predicted(config, gpus, 'cuda') / GIB:.0f}"
    except Faults as faults:
        size = f"refused: {faults.faults[0]}"
    theirs = f"{name_of(choice)} | {_speed(job, choice):,.0f} | {size}"
    winners, refused, _ = sound(candidates(job, gpus, "tokens_per_second"), path, options, job, 1)
    if not winners:
        return f"| {name}, {gpus:,} | {theirs} | none: {refused[0]} | | |"
    best = winners[0]
    ours = f"{name_of(best.choice)} | {_speed(job, best.choice):,.0f} | {(best.measured or best.memory) / GIB:.0f}"
    return f"| {name}, {gpus:,} | {theirs} | {ours} |"


def _speed(job: Job, choice: Choice) -> float:
    """Tokens per second and GPU."""
    return job.global_batch * job.seq_len / step(job, choice).total / choice.ranks


if __name__ == "__main__":
    main()
