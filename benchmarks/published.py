"""Published training runs, with which predicted step times and memory are compared: python -m benchmarks.published

It checks published_runs.toml, counts its rows, and lists those whose results contradict each other.
"""

import argparse
import hashlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from models.blocks import Flops, transformer_flops
from titanlite.config.tables import StrictModel
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import Positive, parse_toml, validated
from titanlite.plan.time import peak_flops_of
from titanlite.registry.family import load_family

FILE = Path(__file__).with_name("published_runs.toml")
_DOUBTFUL = 0.15  # relative disagreement of two published results
Measured = Annotated[float, Field(gt=0)] | None
DType = Literal["float32", "bfloat16"] | None


class Mesh(StrictModel):
    """Degrees. A weight is sharded over dp_shard times cp ranks; ep divides the ranks that shard or replicate data."""

    dp_replicate: Positive = 1
    dp_shard: Positive = 1
    tp: Positive = 1
    cp: Positive = 1
    pp: Positive = 1
    ep: Positive = 1
    schedule: str = ""
    vpp: Positive | None = None  # stages of a pipeline rank


class Dimensions(StrictModel):
    """A GPT decoder, which models/ lacks: multi-head attention, no gate, tied embeddings, learned positions."""

    n_layers: Positive
    dim: Positive
    n_heads: Positive
    ffn_dim: Positive
    vocab_size: Positive


class Run(StrictModel):
    """One row: a configuration and its measurements. None: the source does not state it."""

    model: str  # family:flavor,dimension=number,... or a name of [models]
    device: str
    gpus: Positive
    mesh: Mesh
    seq_len: Positive
    global_batch: Positive  # sequences of an optimizer step, all ranks
    precision: str
    recompute: Literal["none", "selective", "full"]
    micro_batch: Positive | None = None  # sequences of a forward pass, each data-parallel rank
    gpus_per_node: Positive | None = None
    internode_gbps_per_gpu: Positive | None = None
    device_detail: str = ""
    zero: Literal[1, 2, 3] | None = None  # dp_shard shards optimizer states; also gradients; also weights
    parameters: DType = None  # of the weights that the optimizer updates
    optimizer_states: DType = None
    gradient_reduction: DType = None
    compile: bool | None = None
    async_tp: bool | None = None
    attention: Literal["", "FlashAttention", "FlashAttention-2"] = ""  # the kernel; "": that of devices.toml
    float8_gather: bool = False  # FSDP gathers the blocks' matrices in float8
    routing: str = ""
    lora_rank: Positive | None = None
    framework: str = ""
    date: str = ""
    detail: str = ""
    tokens_per_second_per_gpu: Measured = None
    tokens_per_second: Measured = None  # of all GPUs
    step_seconds: Measured = None
    tflops_per_gpu: Measured = None
    mfu_percent: Measured = None
    peak_memory_gib: Measured = None
    memory_kind: Literal["allocated", "reserved"] | None = None

    @property
    def speed(self) -> float | None:
        """Tokens per second and GPU, as published or from the seconds of a step."""
        if self.tokens_per_second_per_gpu:
            return self.tokens_per_second_per_gpu
        if self.tokens_per_second:
            return self.tokens_per_second / self.gpus
        return self.global_batch * self.seq_len / self.step_seconds / self.gpus if self.step_seconds else None


class Table(StrictModel):
    """One table of a source. known: one of its results was quoted before predictions were planned."""

    name: str  # owner/repository:path or arXiv:number, and which table of it
    commit: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""  # "": a report
    known: bool = False
    note: str = ""
    shared: dict[str, Any]
    rows: Annotated[list[dict[str, Any]], Field(min_length=1)]

    @property
    def split(self) -> Literal["fitted", "blind"]:
        """Whether constants may be fitted to the table. Its name decides, so that nobody chooses by the result."""
        digest = hashlib.blake2b(self.name.encode()).digest()
        return "fitted" if self.known or int.from_bytes(digest, "big") % 3 == 0 else "blind"


class Contents(StrictModel):
    """The whole file."""

    models: dict[str, Dimensions]
    tables: list[Table]


class Row(NamedTuple):
    """A run and its location."""

    table: Table
    run: Run
    flops: Flops  # of training, per token, by the two ways to count attention


def parse_models(text: str) -> dict[str, Dimensions]:
    """The models in the file that titanlite lacks."""
    contents: Contents = validated(Contents, parse_toml(text), FILE.name)
    return contents.models


def read(text: str) -> list[Row]:
    """Every row of the file's text. Raises UserError with the table, row and key of a fault."""
    contents = validated(Contents, parse_toml(text), FILE.name)
    return [
        _row(table, values, f"{FILE.name}: {table.name}, row {number}", contents.models)
        for table in contents.tables
        for number, values in enumerate(table.rows, 1)
    ]


def _row(table: Table, values: dict[str, Any], location: str, models: dict[str, Dimensions]) -> Row:
    run = validated(Run, table.shared | values, location)
    mesh = run.mesh
    replicas = mesh.dp_replicate * mesh.dp_shard  # of the data
    if (ranks := replicas * mesh.tp * mesh.cp * mesh.pp) != run.gpus:
        raise UserError(f"{location}: mesh has {ranks} ranks, gpus = {run.gpus}")
    if run.global_batch % replicas:
        raise UserError(
            f"{location}: global_batch = {run.global_batch} is no multiple of the {replicas} ranks with their own data"
        )
    if not (run.speed or run.tflops_per_gpu or run.mfu_percent or run.peak_memory_gib):
        raise UserError(f"{location}: has no measurement")
    return Row(table, run, _flops(run, models))


def _flops(run: Run, models: dict[str, Dimensions]) -> Flops:
    if gpt := models.get(run.model):
        matmul = gpt.n_layers * (4 * gpt.dim**2 + 2 * gpt.dim * gpt.ffn_dim) + gpt.dim * gpt.vocab_size
        return transformer_flops(matmul, gpt.dim, run.seq_len, [None] * gpt.n_layers)
    named, *changes = run.model.split(",")
    family, _, flavor = named.partition(":")
    dimensions = {key: int(value) for key, _, value in (change.partition("=") for change in changes)}
    chosen = load_family(family, flavor, overrides=dimensions)
    flops: Flops = chosen.module.flops(chosen.config, run.seq_len)
    if run.lora_rank:  # a frozen matrix has no gradient: 4 FLOPs per weight and token instead of 6
        frozen = chosen.module.flops(chosen.config, 1).palm / 3
        return Flops(flops.causal - frozen, flops.palm - frozen)
    return flops


def doubts(row: Row) -> list[str]:
    """Published results of a row that disagree by more than 15%: a reason not to trust one of them."""
    run, speed, found = row.run, row.run.speed, []
    peak = peak_flops_of(run.device)
    published = run.tflops_per_gpu or (run.mfu_percent * peak / 1e14 if run.mfu_percent and peak else None)
    if published and speed:
        computed = min((flops * speed / 1e12 for flops in row.flops), key=lambda each: abs(each / published - 1))
        if abs(computed / published - 1) > _DOUBTFUL:
            found.append(f"{published:.0f} TFLOP/s a GPU published, {computed:.0f} by tokens: FLOPs are counted another way")
    if run.step_seconds and speed:
        tokens = speed * run.gpus * run.step_seconds
        if abs(tokens / (run.global_batch * run.seq_len) - 1) > _DOUBTFUL:
            found.append(f"{run.global_batch * run.seq_len:,} tokens a step, {tokens:,.0f} by its seconds")
    return found


def main() -> None:
    """Prints the counts and the doubtful rows."""
    argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__).parse_args()
    rows = read(FILE.read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = {
        "split": Counter(row.table.split for row in rows),
        "source": Counter(row.table.name.partition(":")[0] for row in rows),
        "device": Counter(row.run.device for row in rows),
        "model": Counter(row.run.model.partition(",")[0] for row in rows),
        "table": Counter(f"{row.table.name} ({row.table.split})" for row in rows),
    }
    for title, counted in counts.items():
        print(f"\n{title}, of {len(rows)} rows")
        print("\n".join(f"{count:6} {name}" for name, count in counted.most_common()))
    found = [(row, reason) for row in rows for reason in doubts(row)]
    print(f"\n{len(found)} rows are doubtful")
    for row, reason in found:
        print(f"{row.table.name}: {row.run.model} on {row.run.gpus}, {row.run.seq_len} tokens: {reason}")


if __name__ == "__main__":
    main()
