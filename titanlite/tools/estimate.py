"""titanlite estimate CONFIG.toml --ranks N [--section.key value ...]

What rank 0 of a run on N ranks will do before its first step: builds the whole model on the meta device, shards it over a
mesh of N pretended ranks, and gives one layer its memory and initial weights for real. From the layer it estimates the
initialisation of the whole model, and counts the bytes that a rank keeps.
"""

import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.checks import check
from titanlite.config import Config
from titanlite.config_file import read_config
from titanlite.errors import UserError
from titanlite.initialize import fill, materialize
from titanlite.mesh import build_mesh, resolve_degrees
from titanlite.parallelize import parallelize
from titanlite.tools.check import parse_command
from titanlite.zoo import load_family, match_table


class Estimate(NamedTuple):
    """Seconds of the parts that were done, and counts of what rank 0 keeps."""

    parameters: int  # of the whole model
    build_seconds: float
    shard_seconds: float
    layer_values: int  # values of one layer on rank 0
    layer_seconds: float
    local_values: int  # values of the whole model on rank 0

    @property
    def initialize_seconds(self) -> float:
        """For the whole model, at the layer's speed."""
        return self.layer_seconds * self.local_values / self.layer_values

    @property
    def state_bytes(self) -> int:
        """Float32 masters, gradients and two moments on rank 0."""
        return self.local_values * 4 * 4


def estimate(config: Config, ranks: int) -> Estimate:
    """Times rank 0 of `ranks` pretended ones. The process must not have a process group; it has none afterwards."""
    family = load_family(config.model.name, config.model.flavor)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        begin = time.perf_counter()
        model = family.on_meta()
        parameters = sum(p.numel() for p in model.parameters())
        built = time.perf_counter()
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), "cpu")
        parallelize(model, family, config, mesh)
        sharded = time.perf_counter()
        name, layer = next(iter(model.layers.items()))
        names = [f"layers.{name}.{key}" for key, _ in layer.named_parameters()]
        distributions, _ = match_table(family.module.initial(family.config), names, "initial")
        materialize(layer, torch.device("cpu"))
        for key, (_, parameter) in zip(names, layer.named_parameters(), strict=True):
            fill(parameter, key, distributions[key], config.training.seed)
        filled = time.perf_counter()
        return Estimate(
            parameters, built - begin, sharded - built, _local_values(layer), filled - sharded, _local_values(model)
        )
    finally:
        dist.destroy_process_group()


def _local_values(module: nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())


def main() -> None:
    try:
        path, ranks, _, options = parse_command("estimate", sys.argv[1:])
        config = read_config(path, options)
        check(config, path, ranks)
        found = estimate(config, ranks)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{config.model.name} {config.model.flavor}, {found.parameters:,} parameters, on {ranks} ranks; this is rank 0")
    print(f"  built on meta           {found.build_seconds:8.2f} s")
    print(f"  sharded                 {found.shard_seconds:8.2f} s")
    print(f"  one layer initialised   {found.layer_seconds:8.2f} s  ({found.layer_values:,} values)")
    print(f"  whole model, estimated  {found.initialize_seconds:8.2f} s  ({found.local_values:,} values)")
    print(f"  masters, gradients and moments in float32: {found.state_bytes / 2**30:.2f} GiB a rank")


if __name__ == "__main__":
    main()
