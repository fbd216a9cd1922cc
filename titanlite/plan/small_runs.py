"""What a CPU's steps take that no single operation shows, from small trainings: for `titanlite plan --calibrate`.

A CPU begins an operation when the last one has ended. So Python, the dispatch of operations and the hooks of FSDP2, DTensor and
recomputation add to a step; a model of next to no work shows how much. A larger one shows what operations reach in training.
"""

import math
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.parallel.mesh import build_mesh, resolve_degrees
from titanlite.plan.shape import Shape
from titanlite.plan.time import HEAD, RECOMPUTE, Choice, Device, Job, step
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

_STEPS, _TINY_STEPS = 8, 4  # of a larger training, and of one with next to no work
_MICROBATCHES, _LAYERS = 2, 2  # of a step; of the larger model
_MESHES = {  # of all ranks
    "dp_shard": "data_parallel_shard_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
}


def train(device: torch.device, config: Config, steps: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of the shortest of `steps` steps on random tokens, since other programs only add to them."""
    mesh = build_mesh(resolve_degrees(config.parallelism, dist.get_world_size()), "cpu")
    model, optimizer, loss_scale = begin_training(family_of(config.model), config, mesh, device)
    training, microbatches = config.training, config.microbatches(mesh["dp_replicate"].size() * mesh["dp_shard"].size())
    tokens = torch.randint(128, (microbatches, training.local_batch_size, training.seq_len + 1))
    times, worked = [], []
    for _ in range(steps):
        begun, cpu = time.perf_counter(), time.process_time()
        loss = forward_backward(model, Batch(tokens), mesh, loss_scale)
        update(model, optimizer, 1e-4, training.max_norm, loss_scale, loss.labels)
        times.append(time.perf_counter() - begun)
        worked.append(time.process_time() - cpu)
    return min(times), min(worked)


def uncompiled_job(config: Config, device: Device) -> Job:
    """The job of a training in float32 that is not compiled."""
    family, training = family_of(config.model), config.training
    shape = Shape.of(family, on_meta(family, config), training.seq_len)
    return Job(shape, device, 8, training.seq_len, training.global_batch_size, compiled=False, item=4)


class Small(NamedTuple):
    """A training that was measured. seconds: of its step."""

    seconds: float
    job: Job
    choice: Choice

    def predicted(self, **changed: float) -> float:
        """Seconds by the plan, where these rates of the device are changed."""
        return step(self.job._replace(device=self.job.device.model_copy(update=changed)), self.choice).total


def in_training(device: torch.device, known: Device) -> dict[str, Any]:
    """What steps on this CPU change in `known`, which operations reach one by one; every rank calls it.

    A model of next to no work gives host_milliseconds. A larger one says how much longer computation takes, and on several
    meshes how much longer the bytes of collectives take: the least squares of the relative errors.
    """
    assert not known.host_milliseconds
    meshes = tuple(_MESHES) if known.cpu_ranks > 1 else ("dp_shard",)
    host: dict[str, dict[str, float]] = {kind: {} for kind in (*RECOMPUTE, HEAD)}
    slower = {key: getattr(known, key) / 2 for key in ("matmul", "attention", "memory_gb_per_second")}
    narrower = {"nvlink_gb_per_second": known.nvlink_gb_per_second / 2} if len(meshes) > 1 else {}
    rows, results = [], []
    for mesh in meshes:
        for mode in RECOMPUTE:
            one, three = (each.seconds - each.predicted() for each in (_train(device, known, mesh, mode, n) for n in (1, 3)))
            host[mode][mesh] = max(0.0, three - one) / 2 / _MICROBATCHES * 1e3
            if mode == "none":
                host[HEAD][mesh] = max(0.0, one / _MICROBATCHES * 1e3 - host[mode][mesh])
        larger = _train(device, known, mesh, "none", 0)
        calls = _MICROBATCHES * (_LAYERS * host["none"][mesh] + host[HEAD][mesh]) * 1e-3
        added = [larger.predicted(**each) - larger.predicted() for each in (slower, narrower) if each]
        rows.append([each / larger.seconds for each in added])
        results.append([(larger.seconds - calls - larger.predicted()) / larger.seconds])
    # factors of which 1 is what operations reach one by one; nothing is faster in a step than alone
    found = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(results)).solution.clamp(min=0).flatten().tolist()
    changed = zip((slower, narrower), found, strict=False)
    return {key: getattr(known, key) / (1 + more) for keys, more in changed for key in keys} | {"host_milliseconds": host}


def _train(device: torch.device, known: Device, mesh: str, mode: str, tiny: int) -> Small:
    config = _config(mesh, mode, known.cpu_ranks, tiny)
    degrees: dict[str, Any] = {mesh: known.cpu_ranks}
    choice = Choice(**degrees, microbatch=config.training.local_batch_size, recompute=mode)
    return Small(train(device, config, config.training.steps)[0], uncompiled_job(config, known), choice)


def _config(mesh: str, mode: str, ranks: int, tiny: int) -> Config:
    """A Llama with all ranks in one dimension of the mesh. tiny: layers of one with next to no work; 0 is a larger one."""
    heads = ranks * math.ceil(8 / ranks)  # a multiple of the ranks, so that tensor parallelism can split it
    head_dim, layers, batch = (8, tiny, 1) if tiny else (32, _LAYERS, 2)
    vocab, tokens = (32 * heads, 4 * heads) if tiny else (128 * heads, 32 * heads)
    dim = heads * head_dim
    sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "head_dim": head_dim, "ffn_dim": 3 * dim}
    training: dict[str, Any] = {"seq_len": tokens, "local_batch_size": batch, "mixed_precision_param": "float32"}
    training |= {"global_batch_size": batch * _MICROBATCHES * (1 if mesh == "tp" else ranks)}
    training |= {"steps": _TINY_STEPS if tiny else _STEPS}
    model = {"name": "llama3", "flavor": "debug", "overrides": {**sizes, "vocab_size": vocab}}
    degrees = {key: ranks if name == mesh else 1 for name, key in _MESHES.items()}
    return Config.model_validate(
        {"model": model, "training": training, "parallelism": degrees, "activation_checkpoint": {"mode": mode}}
    )
