"""How far `titanlite plan` is from published runs: python -m benchmarks.plan_score [--split fitted|blind]

For each table of published_runs.toml: predicted against measured tokens per second and GPU. Constants may be changed by what
the fitted tables show, never by the blind ones.
"""

import argparse
import statistics
from collections import Counter
from typing import NamedTuple

from benchmarks.published import FILE, Dimensions, Run, parse_models, read
from titanlite.parallel.pipeline import STAGES_OF_A_RANK
from titanlite.plan.shape import Layer, Matrix, Shape
from titanlite.plan.time import ASYNC_TP, Choice, Device, Job, Stages, devices, step
from titanlite.registry.family import load_family

# The share of a device's peak that other attention kernels reach than those of devices.toml. FlashAttention's on an A100 is
# fitted to MPT, whose kernel is its Triton version; on an H100 it is 1.54 times as fast (arXiv:2307.08691, figures 4 and 7: 89
# and 137 TFLOP/s, causal, 16k tokens). FlashAttention-2: arXiv:2407.08608, figures 5 and 6.
ATTENTION = {
    "FlashAttention": {"a100": 0.26, "h100": 0.26 * 312 * 1.54 / 989},
    "FlashAttention-2": {"h100": 0.27, "h200": 0.27},
}
# The machine of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, beside an H100 of 80 GB: HBM2e of 2.4 TB/s, and 500 W
# instead of 700 W. attention: FlashAttention-2's, fitted with matmul.
H100_96GB = {"memory_gib": 94.0, "memory_gb_per_second": 2400.0, "matmul": 0.48, "attention": 0.24}


class Scored(NamedTuple):
    """A row: predicted / measured tokens per second."""

    table: str
    split: str
    group: str  # device and kind of model
    ratio: float

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


class LeftOut(NamedTuple):
    """A row that is not scored."""

    split: str
    reason: str


def score(text: str) -> tuple[list[Scored], list[LeftOut]]:
    """Every row of the file's text."""
    models, known = parse_models(text), devices()
    scored: list[Scored] = []
    left: list[LeftOut] = []
    for row in read(text):
        table, run, speed = row.table, row.run, row.run.speed
        if not speed and run.tflops_per_gpu:  # FLOPs are counted the PaLM way by most sources
            speed = run.tflops_per_gpu * 1e12 / row.flops.palm
        if reason := unsupported(run, known, speed):
            left.append(LeftOut(table.split, reason))
            continue
        assert speed
        job, choice = job_of(run, models, known)
        predicted = run.global_batch * run.seq_len / run.gpus / step(job, choice).total
        scored.append(Scored(table.name, table.split, group_of(run, job), predicted / speed))
    return scored, left


def group_of(run: Run, job: Job) -> str:
    return f"{run.device.lower()} {job.shape.kind}"


def device_of(run: Run, known: dict[str, Device]) -> Device | None:
    name = run.device.lower()
    changes: dict[str, float] = {**H100_96GB} if run.device_detail.startswith("96 GB HBM2e") else {}
    if run.internode_gbps_per_gpu:
        changes["network_gb_per_second"] = run.internode_gbps_per_gpu / 8
    if run.attention:
        changes["attention"] = ATTENTION[run.attention][name]
    if (run.device, run.device_detail) == ("A100", "40 GB"):  # NVIDIA's data sheet
        changes["memory_gb_per_second"] = 1555.0
    return known[name].model_copy(update=changes) if name in known else None


def unsupported(run: Run, known: dict[str, Device], speed: float | None) -> str:
    """Why a run cannot be predicted, or ""."""
    replicas = run.mesh.dp_replicate * run.mesh.dp_shard
    reasons = {
        "no speed": not speed,
        f"no device {run.device}": device_of(run, known) is None,
        f"precision {run.precision}": not (run.precision == "bf16" or run.precision.startswith("fp8")),
        "LoRA": bool(run.lora_rank),
        f"schedule {run.mesh.schedule}": run.mesh.pp > 1 and run.mesh.schedule not in STAGES_OF_A_RANK,
        "microbatch not stated": run.micro_batch is None,
        "batch is no multiple of the microbatches": bool(run.micro_batch and run.global_batch % (replicas * run.micro_batch)),
        "experts padded to the rows of the busiest one": run.routing == "padded",
        "float8 on a device without it": run.precision != "bf16" and run.device == "A100",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def job_of(run: Run, models: dict[str, Dimensions], known: dict[str, Device]) -> tuple[Job, Choice]:
    mesh, device = run.mesh, device_of(run, known)
    assert device and run.micro_batch
    stages = mesh.pp * (mesh.vpp or STAGES_OF_A_RANK.get(mesh.schedule, 1))
    degrees = mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep
    choice = Choice(*degrees, mesh.schedule, run.micro_batch, run.recompute, reshard=run.zero in (None, 3))
    shape = shape_of(run, models)
    job = Job(
        shape,
        device,
        run.gpus_per_node or 8,
        run.seq_len,
        run.global_batch,
        float8=run.precision != "bf16",
        # PyTorch's default where a source does not say; the kernels of Megatron and Transformer Engine (TE) are fused
        compiled=run.framework.startswith("Megatron") or run.detail.startswith("TE") if run.compile is None else run.compile,
        exposed_tp=ASYNC_TP if run.async_tp else 1.0,  # also in float8, which torchtitan gathers, unlike titanlite
        weight_bytes=2 if run.parameters == "bfloat16" else 4,
        state_bytes=4 if run.parameters == "bfloat16" else 8,
        reduce_bytes=2 if run.gradient_reduction == "bfloat16" else 4,
        gathered=1 if run.float8_gather else 2,
        once=run.zero == 1,
        stages=lambda ranks, _: equal_stages(shape, ranks, stages),
    )
    return job, choice


def equal_stages(shape: Shape, ranks: int, stages: int) -> Stages:
    """As many blocks in each, as these programs have them, or one more in the first ones, and the head in the last one."""
    blocks = [shape.depth // stages + (stage < shape.depth % stages) for stage in range(stages)]
    matmuls = sum(often * layer.multiplied(shape.dim) for layer, often in shape.layers)
    costs = [each * (matmuls + shape.attention / 6) / shape.depth for each in blocks]
    return Stages.of(blocks, [*costs[:-1], costs[-1] + shape.vocab * shape.dim], ranks)


def shape_of(run: Run, models: dict[str, Dimensions]) -> Shape:
    if gpt := models.get(run.model):
        d, ffn = gpt.dim, gpt.ffn_dim
        matrices = (Matrix(3 * d, d, "column"), Matrix(d, d, "row"), Matrix(ffn, d, "column"), Matrix(d, ffn, "row"))
        # as models/blocks.py counts, over half of the pairs
        attention = 12 * d * gpt.n_layers * run.seq_len / 2
        return Shape(((Layer(matrices, None, 2 * d), gpt.n_layers),), d, gpt.vocab_size, d * gpt.vocab_size, attention)
    named, *changes = run.model.split(",")
    family, _, flavor = named.partition(":")
    dimensions = {key: int(value) for key, _, value in (change.partition("=") for change in changes)}
    chosen = load_family(family, flavor, overrides=dimensions)
    return Shape.of(chosen, chosen.on_meta(), run.seq_len)


def lines(scored: list[Scored]) -> list[str]:
    """A line for each table and one for each split: rows, mean and ninth decile of the absolute error, mean of the ratios."""
    found = []
    for split in ("fitted", "blind"):
        of_split = [each for each in scored if each.split == split]
        tables = list(dict.fromkeys(each.table for each in of_split))
        for name in tables:
            found.append(_line(name, [each for each in of_split if each.table == name]))
        if of_split:
            found.append(_line(f"all {split} rows", of_split))
            means = [statistics.mean(each.error for each in of_split if each.table == name) for name in tables]
            found.append(f"{f'mean over {split} tables':<90}{len(tables):>5}{statistics.mean(means):>8.1%}")
    return found


def by_device(scored: list[Scored]) -> dict[str, tuple[float, float]]:
    """Mean and ninth decile of the absolute error of blind rows, by device and kind of model; of at least 5 rows each."""
    groups: dict[str, list[float]] = {}
    for each in scored:
        if each.split == "blind":
            groups.setdefault(each.group, []).append(each.error)
    return {name: (statistics.mean(errors), _ninth(errors)) for name, errors in sorted(groups.items()) if len(errors) >= 5}


def _ninth(errors: list[float]) -> float:
    return sorted(errors)[min(len(errors) - 1, int(0.9 * len(errors)))]


def _line(name: str, rows: list[Scored]) -> str:
    errors = [each.error for each in rows]
    ratio = statistics.mean(each.ratio for each in rows)
    return f"{name:<90}{len(rows):>5}{statistics.mean(errors):>8.1%}{_ninth(errors):>8.1%}{ratio:>8.2f}"


def main() -> None:
    """Print the score of each table, and why rows are left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_score", description=__doc__)
    parser.add_argument("--split", choices=["fitted", "blind"], help="only these tables")
    options = parser.parse_args()
    scored, left = score(FILE.read_text(encoding="utf-8"))
    print(f"{'table':<90}{'rows':>5}{'mean':>8}{'9th':>8}{'ratio':>8}")
    print("\n".join(lines([each for each in scored if options.split in (None, each.split)])))
    for group, (mean, ninth) in by_device(scored).items() if options.split != "fitted" else ():
        print(f"{f'blind rows of {group}':<95}{mean:>8.1%}{ninth:>8.1%}")
    for reason, count in Counter(each.reason for each in left if options.split in (None, each.split)).most_common():
        print(f"left out: {count:4} {reason}")


if __name__ == "__main__":
    main()
