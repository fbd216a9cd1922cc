"""What the ranks of a pool run: titanlite's own functions, whose results are returned for comparison."""

import functools
import math
import re
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.blocks import Normal
from tests.token_files import data_of
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.mixture import Data
from titanlite.loop.step import build_model, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.state import named_state
from titanlite.parallel.mesh import DIMENSIONS, build_mesh, data_degree, data_rank, stage_group
from titanlite.registry.family import family_of, load_family
from titanlite.train import train
from titanlite.transforms.initialize import fill
from titanlite.verify.compare import Trajectory, batches_of, begin, record_run, whole

# compiled in all steps of a run together: one for all blocks; the head's norm, its rows' sums, its gradients
GRAPHS = 1 + 3
CPU = torch.device("cpu")
GLOBAL_BATCH = 8
# [activation_checkpoint], by the names that tests use
MODES = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "full by chunks": {"mode": "full", "sequence_chunks": 3},
    "every second layer": {"mode": "selective", "selective_ac_option": 2},
    "per operation": {"mode": "selective", "selective_ac_option": "op"},
    "budget": {"mode": "memory_budget", "memory_budget": 0.3},
}


def config_of(degrees: dict[str, int], flavor: str = "plain", accumulation: int = 1, **sections: dict[str, Any]) -> Config:
    """A configuration of the tiny model on a mesh, overridden by `sections` such as training={"seed": 1}."""
    parts = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    values: dict[str, Any] = {
        "model": {"name": "tests.tiny", "flavor": flavor},
        "training": {
            "seq_len": 32,
            "steps": 20,
            "global_batch_size": GLOBAL_BATCH,
            "local_batch_size": GLOBAL_BATCH // (parts * accumulation),
            "mixed_precision_param": "float32",
        },
        "optimizer": {"lr": 5e-3},
        "lr_scheduler": {"warmup_steps": 4},
    }
    if "cp" in degrees:
        values["parallelism"] = {"context_parallel_degree": degrees["cp"]}
    if "pp" in degrees:
        values["parallelism"] = values.get("parallelism", {}) | {"pipeline_parallel_degree": degrees["pp"]}
    if "ep" in degrees:
        values["parallelism"] = values.get("parallelism", {}) | {"expert_parallel_degree": degrees["ep"]}
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return Config.model_validate(values)


def degrees_of(mesh: str) -> dict[str, int]:
    """The degrees of a mesh by its name, such as "shard 2 x context 2, ep 4"; of "one process" none."""
    dimensions = {"replicate": "dp_replicate", "shard": "dp_shard", "context": "cp", "pipeline": "pp"}
    return {dimensions.get(name, name): int(degree) for name, degree in re.findall(r"(\w+) (\d+)", mesh)}


@functools.cache
def _mesh(degrees: tuple[int, ...]) -> DeviceMesh:
    return build_mesh(dict(zip(DIMENSIONS, degrees, strict=True)), "cpu")


def mesh_of(degrees: dict[str, int]) -> DeviceMesh:
    """The mesh of these degrees, created once in this process and by all ranks together."""
    return _mesh(tuple(degrees.get(name, 1) for name in DIMENSIONS))


def learnable_data(config: Config) -> Data:
    """20,000 tokens of one document, see `learnable_ids`."""
    vocabulary = load_family(config.model.name, config.model.flavor).config.vocab_size
    return data_of([learnable_ids(vocabulary)], config, vocabulary, bytes_a_token=3)


def learnable_ids(vocabulary: int) -> np.ndarray:
    """20,000 tokens of 24 vocabulary entries, including the last one: the next token is mostly a function of the previous
    two.
    """
    random = np.random.default_rng(0)
    entries = np.linspace(0, vocabulary - 1, 24).astype(np.uint16)
    ids = [0, 1]
    for surprise in random.integers(0, 240, 20_000):
        ids.append(int(surprise) if surprise < 24 else (3 * ids[-1] + 5 * ids[-2] + 1) % 24)
    return entries[ids]


def rank_batches(config: Config, mesh: DeviceMesh):
    """This rank's part of each step's batch, from the learnable data."""
    part = data_rank(mesh), data_degree(mesh)
    return Batches(StepDataset(config, learnable_data(config), part))


def first_microbatch(config: Config, mesh: DeviceMesh) -> Batch:
    """The first microbatch of this rank's part of the first step."""
    return next(rank_batches(config, mesh)).microbatches()[0]


def given_gradients(degrees: dict[str, int], config: Config, steps: int, rate: float = 1e-3) -> dict[str, Tensor]:
    """Full weights and state after steps with gradients that are a function of name, step and position; `... at first`."""
    torch._dynamo.reset()  # workers are reused, and each optimizer is compiled again
    model = build_model(family_of(config.model), config, mesh_of(degrees), CPU)
    optimizer = build_optimizer(model, config.optimizer, group=stage_group(mesh_of(degrees)))
    before = {f"{name} at first": whole(p) for name, p in model.named_parameters()}
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p, requires_grad=False)
            fill(p.grad, f"{name} {step}", Normal(1e-3), seed=1)
        # no clipping: the norm is summed in another order on every mesh
        update(model, optimizer, rate * (step + 1), math.inf)
    tensors = dict(model.named_parameters()) | named_state(optimizer, model)
    # gloo does not gather int16
    return before | {name: whole(t.int() if t.dtype == torch.int16 else t) for name, t in tensors.items()}


def trajectory(degrees: dict[str, int], config: Config, data: Data | None = None) -> tuple[Trajectory, int] | None:
    """Trains for `training.steps`; rank 0 returns the trajectory, and how many graphs were compiled."""
    torch._dynamo.reset()
    counters.clear()
    mesh = mesh_of(degrees)
    found = record_run(begin(config, mesh, CPU), batches_of(config, data or learnable_data(config), mesh))
    return (found, counters["stats"]["unique_graphs"]) if dist.get_rank() == 0 else None


def local_numbers(model: nn.Module) -> int:
    """The number of model values on this rank."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def full_run(degrees: dict[str, int], config: Config) -> None:
    """A whole run of the training program on learnable data, with its run directory."""
    mesh = mesh_of(degrees)
    data = learnable_data(config)
    train(config, data, data if config.validation.enable else None, mesh, CPU, time.perf_counter(), None)
    dist.barrier()
