"""What `titanlite check-model` requires of whole runs: reports and saves change nothing, and a resumed run is the same run.

A small model trains with the training loop itself, on random documents, with dropout before each part of each block. Every
number of a run must come again bit for bit on the same mesh.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from models.decoder import Decoder
from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.config.schema import Config, Model, Source
from titanlite.data.indexed import TokenFile
from titanlite.data.mixture import Data
from titanlite.data.prepare.shards import TokenWriter, smallest_type
from titanlite.data.sources import TokenSource
from titanlite.ground.run_files import METRICS, read_reports
from titanlite.launch.process import of_all_ranks
from titanlite.parallel.mesh import build_mesh
from titanlite.registry.family import family_of
from titanlite.train import train
from titanlite.verify.compare import on_mesh, replaced
from titanlite.verify.small_runs import GLOBAL_BATCH, drop_inputs, small_config

STEPS, AT = 4, 2  # of a run; the step from which it is resumed
_DOCUMENTS, _LONGEST = 60, 40


class TrainingRun(NamedTuple):
    """What a run of the training loop left."""

    reports: dict[int, dict[str, Any]]  # by step
    drawn: list[list[float]]  # by rank: the first random number of each forward pass
    samples: int  # consumed, by the last checkpoint; 0 without one


class Runs(NamedTuple):
    """Three runs that must be one."""

    plain: TrainingRun  # saves and validates nothing
    full: TrainingRun  # saves in the background and validates after each step
    resumed: TrainingRun  # full, from step AT


def run_loops(device: torch.device, model: Model, degrees: dict[str, int], folder: Path) -> Runs:
    """The three runs, on a mesh. folder: for their files."""
    logging.getLogger("titanlite").setLevel(logging.ERROR)
    plain = _config(model, degrees, folder / "plain")
    full = replaced(plain, job={"dump_folder": str(folder / "full")}, validation={"enable": True, "freq": 1, "steps": 1})
    full = replaced(full, checkpoint={"enable": True, "interval": 1, "async_mode": "async", "keep_latest_k": 0})
    saves = folder / "full" / full.checkpoint.folder
    first, second = (_run(config, degrees, device, folder) for config in (plain, full))
    dist.barrier()  # all ranks have read the last checkpoint, which is removed next
    if dist.get_rank() == 0:
        for step in list_steps(saves):
            if step > AT:
                shutil.rmtree(step_folder(saves, step))
    dist.barrier()
    return Runs(first, second, _run(full, degrees, device, folder))


def _config(model: Model, degrees: dict[str, int], folder: Path) -> Config:
    config = replaced(
        on_mesh(small_config(model), degrees, GLOBAL_BATCH),
        training={"steps": STEPS},
        metrics={"log_freq": 1, "enable_tensorboard": False},
        job={"dump_folder": str(folder)},
    )
    return replaced(config, lr_scheduler={"total_steps": STEPS})


def _run(config: Config, degrees: dict[str, int], device: torch.device, folder: Path) -> TrainingRun:
    mesh = build_mesh(degrees, device.type)
    dump = Path(config.job.dump_folder)
    if dist.get_rank() == 0:
        dump.mkdir(exist_ok=True)
    data = open_random(folder / "documents", config)
    with _dropping() as own:
        train(config, data, data if config.validation.enable else None, mesh, device, time.perf_counter(), None)
    drawn = of_all_ranks(own)
    dist.barrier()
    reports = {line["step"]: line for line in read_reports(dump / METRICS)}
    last = step_folder(dump / config.checkpoint.folder, STEPS)
    return TrainingRun(reports, drawn, manifest.read(last).numbers["samples"] if config.checkpoint.enable else 0)


def open_random(prefix: Path, config: Config) -> Data:
    """Random documents, of which a part is no label, as chats have it. Rank 0 writes the files; all ranks together."""
    vocabulary = family_of(config.model).config.vocab_size
    if dist.get_rank() == 0:
        random = np.random.default_rng(0)
        writer = TokenWriter(prefix, smallest_type(vocabulary), losses=True)
        for length in random.integers(1, _LONGEST, _DOCUMENTS):
            writer.write(random.integers(vocabulary, size=length), random.random(length) < 0.7)
            writer.lengths.append(length)
        writer.close()
    dist.barrier()
    source = TokenSource(Source(path=str(prefix)), "random", [TokenFile(prefix)], "random")
    return Data([source], config.training, "no tokenizer", np.ones(vocabulary, np.int64), "training.sources")


@contextlib.contextmanager
def _dropping() -> Iterator[list[float]]:
    """Within it, every model that trains drops values; yields a list that gets the first random number of each forward pass."""
    drawn: list[float] = []

    def begin(module: nn.Module, _arguments: Any) -> None:
        if isinstance(module, Decoder) and module.training:
            drawn.append(torch.rand(()).item())
            if len(drawn) == 1:
                drop_inputs(module)

    handle = register_module_forward_pre_hook(begin)
    try:
        yield drawn
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------------------- differences


def run_faults(runs: Runs) -> list[str]:
    """The first number in which runs that must be equal are not, with what it depends on."""
    if fault := _first_difference(runs.full, runs.plain, range(1, STEPS + 1)):
        return [f"where a run validates, and saves in the background, {fault}"]
    before, after = f"after a resume from step {AT}, ", f", in a run without interruption {runs.full.samples:,}"
    if runs.resumed.samples != runs.full.samples:
        return [f"{before}the checkpoint of step {STEPS} counts {runs.resumed.samples:,} samples{after}"]
    if fault := _first_difference(runs.resumed, runs.full, range(AT + 1, STEPS + 1)):
        return [before + fault]
    return []


def random_faults(runs: Runs) -> list[str]:
    """Ranks have different tokens, or different parts of a sequence, so each must draw random numbers of its own."""
    owners: dict[float, list[str]] = {}
    for rank, drawn in enumerate(runs.plain.drawn):
        for number, value in enumerate(drawn, 1):
            owners.setdefault(value, []).append(f"rank {rank} in forward pass {number}")
    equal = next((of for of in owners.values() if len(of) > 1), None)
    return [f"{' and '.join(equal[:2])} draw the same random numbers, so dropout drops the same values"] if equal else []


# quantity of a report -> what a difference means where all that come before it are equal
_MEANING = {
    "lr": "the learning rate",
    "tokens_seen": "the number of tokens",
    "loss": "the loss; its weights, its samples or what the model keeps outside of parameters and buffers differ",
    "grad_norm": "the gradient norm",
    "validation_loss": "the validation loss; the update differs, so the optimizer's state may not be in the checkpoint",
    "loss_mean": "the mean loss",
}


def _first_difference(run: TrainingRun, expected: TrainingRun, steps: range) -> str:
    if any(own != other[-len(own) :] for own, other in zip(run.drawn, expected.drawn, strict=True)):
        return "forward passes draw other random numbers, so dropout drops other values"
    for step in steps:
        for quantity, meaning in _MEANING.items():
            value, other = (each.reports[step].get(quantity) for each in (run, expected))
            if value != other and None not in (value, other):
                what, _, remark = meaning.partition("; ")
                return f"{what} of step {step} is {value!r} instead of {other!r}" + (f": {remark}" if remark else "")
    return ""
