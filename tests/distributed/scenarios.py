"""What the ranks of a pool run: the framework's own functions, with what they did handed back for comparison."""

import functools
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.config import Config
from titanlite.data.batches import batches
from titanlite.data.tokens import TokenData
from titanlite.lr_schedule import build_schedule
from titanlite.mesh import DIMENSIONS, build_mesh, data_degree, data_rank, sum_over_data
from titanlite.optimizer import build_optimizer
from titanlite.train import build_model, forward_backward, train, update
from titanlite.zoo import load_family

CPU = torch.device("cpu")
GLOBAL_BATCH = 8


class Trajectory(NamedTuple):
    """What a short training run did; whole tensors, by name."""

    weights: dict[str, Tensor]  # before the first step
    batches: list[Tensor]  # (global batch, seq + 1) of every step
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    dtypes: set[torch.dtype]  # of the masters, the moments and the gradients


def config_of(degrees: dict[str, int], flavor: str = "plain", accumulation: int = 1, **sections: dict[str, Any]) -> Config:
    """A configuration of the tiny model on a mesh, with `sections` such as training={"seed": 1} laid over it."""
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
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return Config.model_validate(values)


@functools.cache
def _mesh(degrees: tuple[int, ...]) -> DeviceMesh:
    return build_mesh(dict(zip(DIMENSIONS, degrees, strict=True)), "cpu")


def mesh_of(degrees: dict[str, int]) -> DeviceMesh:
    """The mesh of these degrees, made once in this process and by all ranks together."""
    return _mesh(tuple(degrees.get(name, 1) for name in DIMENSIONS))


def learnable_data(vocabulary: int) -> TokenData:
    """20,000 tokens that use 24 entries spread over the vocabulary, the last one too: the next is mostly a function of two."""
    random = np.random.default_rng(0)
    entries = np.linspace(0, vocabulary - 1, 24).astype(np.uint16)
    ids = [0, 1]
    for surprise in random.integers(0, 240, 20_000):
        ids.append(int(surprise) if surprise < 24 else (3 * ids[-1] + 5 * ids[-2] + 1) % 24)
    return TokenData(entries[ids], vocabulary, 1, "learnable")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, copied; a DTensor is gathered."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gather_batch(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """The global batch of which every data-parallel rank has read a part, in order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (data_rank(mesh), tokens.flatten(0, 1)))
    by_rank = dict(parts)
    return torch.cat([by_rank[rank] for rank in range(data_degree(mesh))])


def rank_batches(config: Config, mesh: DeviceMesh, consumed: int = 0):
    """This rank's part of each step's batch, from the learnable data."""
    data = learnable_data(load_family(config.model.name, config.model.flavor).config.vocab_size)
    training, part = config.training, (data_rank(mesh), data_degree(mesh))
    return batches(
        data, consumed, training.global_batch_size, training.local_batch_size, training.seq_len, training.seed, part, False
    )


def trajectory(degrees: dict[str, int], config: Config) -> Trajectory | None:
    """Trains for `training.steps`; rank 0 returns what happened, the others nothing."""
    mesh = mesh_of(degrees)
    model = build_model(load_family(config.model.name, config.model.flavor), config, mesh, CPU)
    optimizer = build_optimizer(model, config.optimizer)
    schedule, source = build_schedule(config), rank_batches(config, mesh)
    weights = {name: whole(p) for name, p in model.named_parameters()}
    read, losses, norms, gradients = [], [], [], {}
    for step in range(1, config.training.steps + 1):
        tokens = next(source)
        read.append(gather_batch(tokens, mesh))
        share = forward_backward(model, tokens, mesh)
        if step == 1:
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
            dtypes = {p.grad.dtype for p in model.parameters()}
        norms.append(update(model, optimizer, schedule.at(step), config.training.max_norm).item())
        losses.append(sum_over_data(share, mesh).item())
    dtypes |= {p.dtype for p in model.parameters()}
    dtypes |= {value.dtype for state in optimizer.state.values() for value in state.values()}
    return Trajectory(weights, read, losses, norms, gradients, dtypes) if dist.get_rank() == 0 else None


def local_numbers(model: nn.Module) -> int:
    """How many values of the model this rank holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def full_run(degrees: dict[str, int], config: Config) -> None:
    """A whole run of the training program on learnable data, with its run directory."""
    mesh = mesh_of(degrees)
    vocabulary = load_family(config.model.name, config.model.flavor).config.vocab_size
    train(config, learnable_data(vocabulary), mesh, CPU, time.perf_counter())
    dist.barrier()
