"""titanlite verify CONFIG.toml --mesh 1 --mesh "dp_shard=2,tp=2" [--steps 5] [--flavor F] [--section.key value ...]

Trains your own configuration for a few steps on each mesh, in float32, and compares every mesh with the first one: initial
weights, global batches, losses, gradient norms, and the gradient of every parameter. The table names what differs. Scale a
large model down with --flavor or other options: the command tests the mesh. Exit code 0: equal; 1: not equal.
"""

import math
import sys

import torch

from titanlite.config.read import read_config
from titanlite.config.schema import Checkpoint, Config, Model, Optimizer
from titanlite.data.mixture import open_data
from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.tools.compare import DEGREES, Comparison, Trajectory, compare, data_parts, on_mesh, record, replaced
from titanlite.tools.options import at_least, command_parser
from titanlite.tools.ranks import on_ranks


def main() -> None:
    """Exit code 0: equal; 1: not equal; 2: a user error."""
    path, meshes, config = _parse(sys.argv[1:])
    global_batch = config.global_batch(max(map(data_parts, meshes)))  # what the widest mesh has
    configs = [on_mesh(config, degrees, global_batch) for degrees in meshes]
    for degrees, mesh_config in zip(meshes, configs, strict=True):
        check(mesh_config, path, math.prod(degrees.values()))
    open_data(config)  # fills the cache for the ranks
    runs = [_run(mesh_config, degrees) for mesh_config, degrees in zip(configs, meshes, strict=True)]
    print(f"{config.model.title}, {config.training.steps} steps in float32, each mesh against the first")
    print(f"{'mesh':<28} {'weights':<9} {'batches':<9} {'losses':<9} {'norms':<17} {'worst gradient'}")
    comparisons = [compare(run, runs[0]) for run in runs]
    for degrees, comparison in zip(meshes, comparisons, strict=True):
        _print_row(degrees, comparison)
    equal = all(comparison.equal for comparison in comparisons)
    print("equal within float32 rounding" if equal else "NOT equal")
    sys.exit(0 if equal else 1)


def _print_row(degrees: dict[str, int], comparison: Comparison) -> None:
    name = ",".join(f"{key}={degree}" for key, degree in degrees.items()) or "1"
    weights, batches = ("differ" if comparison.worst(quantity).size else "equal" for quantity in ("weights", "batches"))
    loss, gradient = comparison.worst("losses"), comparison.worst("gradients")
    norms = f"{comparison.of('norms')[0].size:.1e}, {comparison.worst('norms').size:.1e}"
    verdict = "" if comparison.equal else "  <- not equal"
    print(f"{name:<28} {weights:<9} {batches:<9} {loss.size:<9.1e} {norms:<17} {gradient.size:.1e} {gradient.place}{verdict}")
    for difference in comparison.excessive:
        if difference.quantity == "weights":
            print(f"    {difference}")


def _run(config: Config, degrees: dict[str, int]) -> Trajectory:
    """A trajectory on a mesh of processes on this machine."""
    timeout = config.comm.init_timeout_seconds
    return on_ranks(math.prod(degrees.values()), _record, config, degrees, timeout_seconds=timeout)


def _record(device: torch.device, config: Config, degrees: dict[str, int]) -> Trajectory:
    mesh = build_mesh({name: degrees.get(name, 1) for name in DIMENSIONS}, device.type)
    return record(config, open_data(config), mesh, device)


def _parse(words: list[str]) -> tuple[str, list[dict[str, int]], Config]:
    parser = command_parser("verify", __doc__)
    parser.add_argument("config")
    parser.add_argument("--mesh", action="append", required=True, help="1, or degrees such as dp_shard=2,tp=2")
    parser.add_argument("--steps", type=at_least(1), default=5, help="(default: 5)")
    parser.add_argument("--flavor")
    known, options = parser.parse_known_args(words)
    if known.flavor:
        options += ["--model.flavor", known.flavor]
    config = read_config(known.config, options)
    if len(known.mesh) < 2:
        raise UserError("give at least two meshes, as in --mesh 1 --mesh dp_shard=2,tp=2")
    float32 = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float32")
    config = replaced(
        config,
        training={"steps": known.steps, **float32},  # rounding is then the only difference between meshes
        lr_scheduler={"total_steps": config.schedule_steps},  # the schedule of the full run
        # These keys apply to one precision.
        optimizer={"rounding": Optimizer().rounding},
        model={"attention": Model().attention},
    )
    return known.config, [_degrees(text) for text in known.mesh], config.model_copy(update={"checkpoint": Checkpoint()})


def _degrees(text: str) -> dict[str, int]:
    """{"dp_shard": 2, "tp": 2} of "dp_shard=2,tp=2", {} of "1"."""
    if text == "1":
        return {}
    degrees = {}
    for part in text.split(","):
        name, _, degree = part.partition("=")
        if name not in DEGREES or not degree.isdecimal() or int(degree) < 1:
            raise UserError(f'--mesh "{text}": must be 1, or degrees of {", ".join(DEGREES)}, such as dp_shard=2,tp=2')
        degrees[name] = int(degree)
    return degrees
