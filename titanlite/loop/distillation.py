"""Distillation from a frozen teacher, which is sharded like the student. The loss of each token gets the teacher's logits.

The teacher's last hidden states are kept for a whole microbatch. The logits of both models exist for one chunk of tokens at a
time (models/head.py).
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.head import Head, Outputs
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Config
from titanlite.data.sources import probe
from titanlite.data.tokenizer import digest, load_tokenizer, read_tokenizer
from titanlite.ground.errors import UserError, at
from titanlite.hf.folder import find_weights
from titanlite.hf.load import load_weights
from titanlite.loop.loss import loss_elsewhere
from titanlite.parallel.parallelize import STEPS, parallelize
from titanlite.parallel.pipeline import Microbatch
from titanlite.registry import limits
from titanlite.registry.check import Subject
from titanlite.registry.family import family_of
from titanlite.registry.teacher import config_of_teacher
from titanlite.transforms.initialize import initialize
from titanlite.transforms.meta import on_meta


class Teacher(NamedTuple):
    """The teacher. It is a tuple, so that torch does not register its parameters with the student."""

    model: Decoder

    def read(self, batch: Microbatch) -> Tensor:
        """Its last hidden states (batch, seq, dim) for a microbatch, without gradients."""
        from titanlite.parallel.fsdp import evaluating  # not at the top: a check needs no FSDP

        with evaluating(self.model):
            return self.model(batch.inputs, batch.seq)

    @contextmanager
    def outputs(self, hidden: Tensor) -> Iterator[Callable[[], Outputs]]:
        """A function that computes the teacher's outputs for these states; its gathered parameters are freed at the end."""
        from torch.distributed.fsdp import FSDPModule  # not at the top: a check needs no FSDP

        head = self.model.head
        assert head is not None

        def gather() -> Outputs:
            if isinstance(head, FSDPModule):
                head.unshard()
            return head.outputs(hidden)

        yield gather
        if isinstance(head, FSDPModule):
            head.reshard()


def build_teacher(config: Config, mesh: DeviceMesh, device: torch.device) -> Teacher | None:
    """The teacher of a run on the meta device, parallelized; None without a teacher."""
    if (cfg := config_of_teacher(config)) is None:
        return None
    return Teacher(parallelize(family_of(cfg.model), cfg, mesh, device).requires_grad_(False))


def load_teacher(config: Config, mesh: DeviceMesh, device: torch.device) -> Teacher | None:
    """The teacher with its weights; all ranks together. Raises UserError for a damaged folder."""
    teacher, cfg = build_teacher(config, mesh, device), config_of_teacher(config)
    if teacher is None or cfg is None:
        return None
    at(0, "loading the teacher")
    family = family_of(cfg.model)
    offload = config.parallelism.cpu_offload
    initialize(teacher.model, family, config.training.seed, device, offload)  # of buffers, which no file has
    weights = find_weights(Path(config.distillation.teacher), family, family.on_meta())
    load_weights(model_tensors(teacher.model), weights)
    return teacher


def digest_of_teacher(config: Config) -> str:
    """Equal digests mean, with high probability, equal files of the teacher; "" without one."""
    return _digest(config.distillation.teacher) if config.distillation.teacher else ""


@functools.cache  # checkpoints hold it, and the files are large
def _digest(folder: str) -> str:
    files = [Path(folder, "config.json"), *sorted(Path(folder).glob("*.safetensors"))]
    return digest(*(f"{file.name} {probe(file)}" for file in files))


def faults(subject: Subject) -> Iterator[str]:
    """A teacher that cannot be read, knows other tokens, or does not fit the mesh."""
    config, folder = subject.config, Path(subject.config.distillation.teacher)
    if not config.distillation.teacher:
        return
    key, ours = f'distillation.teacher = "{folder}"', subject.family.config.vocab_size
    if (stages := config.parallelism.pipeline_parallel_degree) > 1:
        yield (
            f"{key}: parallelism.pipeline_parallel_degree = {stages}: the last stage would hold the whole teacher while the "
            "others wait for it; set it to 1, and use FSDP and tensor parallelism"
        )
        return
    if reason := loss_elsewhere(config, subject.family):
        yield f"{key}: {reason}"
        return
    assert subject.model.head is not None
    try:
        inspect.signature(subject.model.head.forward).bind("hidden states", "labels", "teacher")
    except TypeError:
        yield f"{key}: forward of the head of {config.model.name} takes no teacher, as that of models.head.Head does"
        return
    try:
        cfg = config_of_teacher(config)
        assert cfg is not None
        family = family_of(cfg.model)
        if (theirs := family.config.vocab_size) != ours:
            raise UserError(f"has a vocabulary of {theirs:,}, and {config.model.title} one of {ours:,}; they must be equal")
        find_weights(folder, family, family.on_meta())
        yield from (f"{key}: {fault}" for fault in _tokenizer_faults(config.model.hf_assets_path, folder))
        teacher = Subject(cfg, subject.ranks, subject.local_ranks)
        teacher.family, teacher.model = family, on_meta(family, cfg)
        if not isinstance(teacher.model.head, Head) or type(teacher.model.head).forward is not Head.forward:
            raise UserError(
                f"the head of {cfg.model.name} computes logits by a forward of its own, which a student does not call"
            )
        found = [*limits.faults(cfg, teacher.model), *(fault for step in STEPS if step.needs for fault in step.faults(teacher))]
        yield from (f"{key}: {fault}" for fault in found)
    except UserError as error:
        yield f"{key}: {error}"


def _tokenizer_faults(assets: str, folder: Path) -> Iterator[str]:
    """A tokenizer in the teacher's folder that has another id for some token."""
    file = folder / "tokenizer.json"
    if not assets or not file.is_file():
        return
    ours = load_tokenizer(assets).tokenizer.get_vocab(with_added_tokens=True)
    theirs = read_tokenizer(file).get_vocab(with_added_tokens=True)
    if different := sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)):
        yield f"{file} and model.hf_assets_path have different ids for {len(different):,} tokens, such as {different[0]!r}"
