"""The error of predicted memory against published peaks: python -m benchmarks.memory_score [--output FILE]

Runs of programs that shard as titanlite does: torchtitan and KempnerForge. Both materialize all logits of a microbatch,
titanlite only chunks of them: 12 bytes for each logit are added (bfloat16, its float32 copy, the log-softmax, a gradient),
split over tensor-parallel ranks. Nothing else is fitted. "Reserved" peaks include gaps between the allocator's blocks, which
predictions do not.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.published import FILE, Row, Run, read
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.plan.predict import predict
from titanlite.plan.report import GIB
from titanlite.registry.family import family_of

_LOGIT_BYTES = 12
_PROGRAMS = ("torchtitan", "KempnerForge")


def config_of(run: Run) -> Config:
    """The same run in titanlite. Raises UserError that says what titanlite lacks."""
    if run.micro_batch is None:
        raise UserError("its microbatch is not stated")
    named, *changes = run.model.split(",")
    name, _, flavor = named.partition(":")
    mesh, states = run.mesh, "bfloat16" if run.parameters == "bfloat16" else "float32"
    overrides = {key: int(value) for key, _, value in (change.partition("=") for change in changes)}
    parallelism = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "tensor_parallel_degree": mesh.tp,
        "context_parallel_degree": mesh.cp,
        "pipeline_parallel_degree": mesh.pp,
        "expert_parallel_degree": mesh.ep,
        "fsdp_reshard_after_forward": "never" if run.zero == 2 and mesh.pp == 1 else "default",
    }
    if mesh.schedule:
        parallelism["pipeline_parallel_schedule"] = mesh.schedule
    return Config.model_validate(
        {
            "model": {"name": name, "flavor": flavor, "overrides": overrides},
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": run.recompute},
            "compile": {"enable": bool(run.compile), "components": ["model"]},
            "training": {
                "dtype": states,
                "seq_len": run.seq_len,
                "local_batch_size": run.micro_batch,
                "global_batch_size": run.global_batch,
            },
        }
    )


def predicted_gib(row: Row) -> float:
    run, config = row.run, config_of(row.run)
    assert run.micro_batch is not None
    logits = run.micro_batch * run.seq_len * family_of(config.model).config.vocab_size // (run.mesh.cp * run.mesh.tp)
    of_logits = {"loss": _LOGIT_BYTES * logits}  # only while the loss is computed
    return max(each.memory.total + of_logits.get(each.phase, 0) for each in predict(config, run.gpus).moments) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_score", description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    lines = ["| table | run | published GiB | predicted | error |", "| - | - | - | - | - |"]
    errors: dict[tuple[str, str], list[float]] = {}
    for row in read(FILE.read_text(encoding="utf-8")):
        run, table = row.run, row.table
        if not run.peak_memory_gib or not run.framework.startswith(_PROGRAMS):
            continue
        compiled = "compiled" if run.compile else "not compiled"
        what = f"{run.model}, {run.gpus} GPUs, {run.micro_batch} x {run.seq_len}, {run.recompute}, {compiled}"
        begin = f"| {table.name} ({table.split}) | {what} | {run.peak_memory_gib} |"
        try:
            found = predicted_gib(row)
        except UserError as error:
            lines.append(f"{begin} | left out: {str(error).splitlines()[0]} |")
            continue
        error = found / run.peak_memory_gib - 1
        errors.setdefault((table.name, table.split), []).append(error)
        lines.append(f"{begin} {found:.1f} | {error:+.1%} |")
    lines += ["", "| table | rows | mean of errors | mean of their sizes |", "| - | - | - | - |"]
    for (name, split), each in errors.items():
        sizes = statistics.mean(map(abs, each))
        lines.append(f"| {name} ({split}) | {len(each)} | {statistics.mean(each):+.1%} | {sizes:.1%} |")
    for split in ("fitted", "blind"):
        every = [abs(error) for (_, which), each in errors.items() if which == split for error in each]
        lines.append(
            f"| all {split} | {len(every)} | | {statistics.mean(every):.1%} |" if every else f"| all {split} | 0 | | |"
        )
    print("\n".join(lines))
    if output:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
