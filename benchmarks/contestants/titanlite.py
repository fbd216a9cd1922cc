"""titanlite as in its training loop: the same parts in the same order, on a Config made from options.

job.keys: "options", a list of words such as ["--compile.components", "model"]; "fsdp", true for FSDP2 even on one rank, where
the framework skips it.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.contestants.job import Job, Unfit
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.launch import process
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.parallel import parallelize as order
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, resolve_degrees
from titanlite.registry.family import Family, family_of
from titanlite.transforms.dtypes import DTYPES


def config_of(job: Job) -> Config:
    """The job as a TOML file of titanlite, with the contestant's own options. Raises UserError for a wrong option."""
    text = f"""
        [model]
        flavor = "hf"
        hf_assets_path = "{job.folder}"
        [training]
        local_batch_size = {job.batch // job.ranks}
        global_batch_size = {job.batch * job.accumulate}
        seq_len = {job.seq}
        max_norm = {job.max_norm}
        mixed_precision_param = "{job.precision.removesuffix("-pure")}"
        {'dtype = "bfloat16"' if job.precision == "bfloat16-pure" else ""}
        seed = {job.seed}
        [optimizer]
        lr = {job.lr}
        beta1 = {job.beta1}
        beta2 = {job.beta2}
        eps = {job.eps}
        weight_decay = {job.weight_decay}
        [compile]
        enable = {str(job.compiled).lower()}
        [activation_checkpoint]
        mode = "{job.recompute}"
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "titanlite.toml"
        path.write_text(text, encoding="utf-8")
        return read_config(path, list(job.keys.get("options", [])))


def recomputed(job: Job) -> float | None:
    """The share of the blocks' forward pass that is recomputed; None if blocks are recomputed partially."""
    config = config_of(job)
    cfg = config.activation_checkpoint
    if cfg.mode in ("none", "full"):
        return float(cfg.mode == "full")
    if cfg.mode == "selective" and isinstance(cfg.selective_ac_option, int):
        layers = job.model.n_layers
        return layers // cfg.selective_ac_option / layers
    return None


def build(job: Job) -> Callable[[Tensor], Tensor]:
    config = config_of(job)
    if job.batch % job.ranks:
        raise Unfit(f"cannot share {job.batch} sequences among {job.ranks} ranks")
    device = process.start(config, {})
    mesh = build_mesh(resolve_degrees(config.parallelism, job.ranks), device.type)
    family = family_of(config.model)
    model = (_with_fsdp if job.keys.get("fsdp") else build_model)(family, config, mesh, device)
    optimizer = build_optimizer(model, config.optimizer, DTYPES[config.training.mixed_precision_param])
    part, parts, number = data_rank(mesh), data_degree(mesh), 0
    gc.disable()

    def step(tokens: Tensor) -> Tensor:
        nonlocal number
        number += 1
        if number == 1 or number % config.training.gc_freq == 0:
            gc.collect(1)
        process.seed_step(config.training.seed, number, part)
        # this rank's rows, in microbatches of training.local_batch_size
        mine = tokens.flatten(0, 1)[part::parts].unflatten(0, (-1, config.training.local_batch_size))
        share = forward_backward(model, Batch(mine), mesh).share
        update(model, optimizer, config.optimizer.lr, config.training.max_norm)
        return share

    return step


def _with_fsdp(family: Family, config: Config, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """`build_model` with FSDP2 even on one rank, where the framework skips it."""
    with mock.patch.object(order, "needs_fsdp", lambda *_: True):
        return build_model(family, config, mesh, device)
