"""titanlite verify CONFIG.toml --mesh 1 --mesh "dp_shard=2,tp=2" [--steps 5] [--flavor F] [--section.key value ...]

Trains a few steps of your own configuration on each mesh, in float32, and compares every mesh with the first: initial
weights, global batches, losses, gradient norms, and the gradient of every parameter. What differs is named. Scale a large
model down with --flavor or other options: the mesh is what is looked at. Exit code 0: equal; 1: not.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.config.read import read_config
from titanlite.config.schema import Compile, Config, Model, Optimizer
from titanlite.data.batch import Batch
from titanlite.data.batches import read_batches
from titanlite.data.mixture import Data, open_data
from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.lr_schedule import build_schedule
from titanlite.parallel.mesh import DIMENSIONS, build_mesh, data_degree, data_rank, sum_over_data
from titanlite.tools.ranks import on_ranks
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.registry import family_of

# What float32 rounding explains, relative to the first mesh. Rounding grows with the steps, so later norms may differ more.
LOSS, FIRST_NORM, LATER_NORMS, GRADIENT = 1e-5, 1e-5, 1e-3, 1e-5


class Trajectory(NamedTuple):
    """What a few steps of training did; tensors are whole, and on the CPU."""

    weights: dict[str, Tensor]  # before the first step
    batches: list[Tensor]  # (global batch, values) of each step: tokens and what goes with them
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping, of what has any
    dtypes: set[torch.dtype]  # of masters, gradients and moments


class Comparison(NamedTuple):
    """How far a mesh is from the first one; differences are relative."""

    weights: list[str]  # names of the initial weights that differ in any bit
    batches: list[int]  # steps whose global batches differ in any token
    loss: float
    first_norm: float
    later_norms: float
    gradient: float
    worst: str  # the parameter of that gradient

    @property
    def equal(self) -> bool:
        close = self.loss < LOSS and self.first_norm < FIRST_NORM and self.later_norms < LATER_NORMS
        return not self.weights and not self.batches and close and self.gradient < GRADIENT


def record(config: Config, data: Data, mesh: DeviceMesh, device: torch.device) -> Trajectory:
    """Trains `training.steps` steps on a mesh by the loop's own functions; all ranks return the same."""
    model = build_model(family_of(config.model), config, mesh, device)
    part = data_rank(mesh), data_degree(mesh)
    source = read_batches(config, data, 0, config.global_batch(data_degree(mesh)), part)
    optimizer = build_optimizer(model, config.optimizer, DTYPES[config.training.mixed_precision_param])
    return follow(model, optimizer, source, config, mesh, device)


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Iterator[Batch],
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
) -> Trajectory:
    """The same with a model that is there, and this rank's parts of the batches."""
    training, schedule = config.training, build_schedule(config)
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    read, losses, norms = [], [], []
    for step in range(1, training.steps + 1):
        batch = next(source).to(device)
        read.append(_gather_batch(batch, mesh))
        share = forward_backward(model, batch, mesh, None, config.parallelism.reduce_every_microbatch)
        if step == 1:
            # a frozen parameter has none, nor one that the forward pass does not use
            reached = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            gradients = {name: whole(gradient) for name, gradient in reached.items()}
            dtypes = {gradient.dtype for gradient in reached.values()}
        norms.append(update(model, optimizer, schedule.at(step), training.max_norm).item())
        losses.append(sum_over_data(share, mesh).item())
    dtypes |= {parameter.dtype for parameter in model.parameters()}
    dtypes |= {value.dtype for state in optimizer.state.values() for value in state.values()}
    return Trajectory(weights, read, losses, norms, gradients, dtypes)


def compare(found: Trajectory, reference: Trajectory) -> Comparison:
    """How far one trajectory is from another."""
    both = [name for name in reference.gradients if name in found.gradients]
    gradients = {name: _distance(found.gradients[name], reference.gradients[name]) for name in both}
    gradients |= dict.fromkeys(found.gradients.keys() ^ reference.gradients.keys(), math.inf)  # reached on one mesh only
    worst = max(gradients, key=gradients.__getitem__)
    losses = [abs(a / b - 1) for a, b in zip(found.losses, reference.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(found.norms, reference.norms, strict=True)]
    return Comparison(
        [name for name, weight in reference.weights.items() if not torch.equal(found.weights[name], weight)],
        [step for step, pair in enumerate(zip(found.batches, reference.batches, strict=True), 1) if not torch.equal(*pair)],
        max(losses),
        norms[0],
        max(norms),
        gradients[worst],
        worst,
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on the CPU; a DTensor is gathered."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _gather_batch(batch: Batch, mesh: DeviceMesh) -> Tensor:
    """The global batch of which every data-parallel rank has read a part, in order; of each row all values."""
    mine = torch.cat([tensor.flatten(0, 1).long().cpu() for tensor in batch if tensor is not None], dim=1)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (data_rank(mesh), mine))
    by_rank = dict(parts)
    return torch.cat([by_rank[rank] for rank in range(data_degree(mesh))])


def _distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the expected norm; infinite where only one of the two is not finite or is zero."""
    difference, size = (found - expected).norm().item(), expected.norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf


# ------------------------------------------------------------------------------------------------------------ the command


def main() -> None:
    try:
        path, meshes, config = _parse(sys.argv[1:])
        configs = [_on_mesh(config, degrees, meshes) for degrees in meshes]
        for degrees, on_mesh in zip(meshes, configs, strict=True):
            check(on_mesh, path, math.prod(degrees.values()))
        open_data(config)  # now, so that the ranks find them in the cache
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    runs = [_run(on_mesh, degrees) for on_mesh, degrees in zip(configs, meshes, strict=True)]
    print(f"{config.model.name} {config.model.flavor}, {config.training.steps} steps in float32, every mesh against the first")
    print(f"{'mesh':<28} {'weights':<9} {'batches':<9} {'losses':<9} {'norms':<17} {'worst gradient'}")
    equal = True
    for degrees, found in zip(meshes, runs, strict=True):
        result = compare(found, runs[0])
        equal &= result.equal
        _print_row(degrees, result)
    print("equal within float32 rounding" if equal else "NOT equal")
    sys.exit(0 if equal else 1)


def _print_row(degrees: dict[str, int], result: Comparison) -> None:
    name = ",".join(f"{key}={degree}" for key, degree in degrees.items()) or "1"
    weights, tokens = "differ" if result.weights else "equal", "differ" if result.batches else "equal"
    norms = f"{result.first_norm:.1e}, {result.later_norms:.1e}"
    verdict = "" if result.equal else "  <- not equal"
    print(f"{name:<28} {weights:<9} {tokens:<9} {result.loss:<9.1e} {norms:<17} {result.gradient:.1e} {result.worst}{verdict}")
    for weight in result.weights:
        print(f"    initial weight differs: {weight}")


def _parse(words: list[str]) -> tuple[str, list[dict[str, int]], Config]:
    parser = argparse.ArgumentParser(prog="titanlite verify", allow_abbrev=False, usage=__doc__)
    parser.add_argument("config")
    parser.add_argument("--mesh", action="append", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--flavor")
    known, options = parser.parse_known_args(words)
    if known.flavor:
        options += ["--model.flavor", known.flavor]
    config = read_config(known.config, options)
    if known.steps < 1 or len(known.mesh) < 2:
        raise UserError("give at least two meshes, as in --mesh 1 --mesh dp_shard=2,tp=2, and at least one step")
    # A schedule for the full run, of which only the first steps are taken; float32, where rounding is all that may differ.
    training = {
        "steps": known.steps,
        "dtype": "float32",
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
    }
    schedule = {"total_steps": config.schedule_steps}
    return (
        known.config,
        [_degrees(text) for text in known.mesh],
        config.model_copy(
            update={
                "training": config.training.model_copy(update=training),
                "optimizer": config.optimizer.model_copy(update={"rounding": Optimizer().rounding}),
                # what is of one precision, or for one process
                "model": config.model.model_copy(update={"attention": Model().attention}),
                "compile": config.compile.model_copy(update={"unit": Compile().unit}),
                "lr_scheduler": config.lr_scheduler.model_copy(update=schedule),
                "checkpoint": type(config.checkpoint)(),
            }
        ),
    )


def _degrees(text: str) -> dict[str, int]:
    """{"dp_shard": 2, "tp": 2} of "dp_shard=2,tp=2", {} of "1"."""
    if text == "1":
        return {}
    degrees = {}
    for part in text.split(","):
        name, _, degree = part.partition("=")
        if name not in ("dp_replicate", "dp_shard", "tp") or not degree.isdecimal() or int(degree) < 1:
            raise UserError(f'--mesh "{text}": must be 1, or degrees of dp_replicate, dp_shard and tp, such as dp_shard=2,tp=2')
        degrees[name] = int(degree)
    return degrees


def _on_mesh(config: Config, degrees: dict[str, int], meshes: list[dict[str, int]]) -> Config:
    """The configuration on one of the meshes, with the global batch that it has on the widest of them."""
    parts = [mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1) for mesh in meshes]
    size = config.global_batch(max(parts))
    share = size // (degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1))
    local = math.gcd(config.training.local_batch_size, share)
    sizes = {"global_batch_size": size, "local_batch_size": max(1, local)}
    parallelism = {
        "data_parallel_replicate_degree": degrees.get("dp_replicate", 1),
        "data_parallel_shard_degree": degrees.get("dp_shard", 1),
        "tensor_parallel_degree": degrees.get("tp", 1),
    }
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=sizes),
            "parallelism": config.parallelism.model_copy(update=parallelism),
        }
    )


def _run(config: Config, degrees: dict[str, int]) -> Trajectory:
    """A trajectory on a mesh of processes on this machine."""
    patience = config.comm.init_timeout_seconds
    return on_ranks(math.prod(degrees.values()), _record, config, degrees, timeout_seconds=patience)


def _record(device: torch.device, config: Config, degrees: dict[str, int]) -> Trajectory:
    mesh = build_mesh({name: degrees.get(name, 1) for name in DIMENSIONS}, device.type)
    return record(config, open_data(config), mesh, device)


if __name__ == "__main__":
    main()
