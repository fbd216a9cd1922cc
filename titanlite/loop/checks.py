"""Checks a configuration. Each part of titanlite defines its own faults; this file lists all checks and runs them.

All faults are found before any process starts, and reported together. A check runs only where those that it needs have passed.
"""

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

import torch

from titanlite.checkpoint import folder
from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import Faults
from titanlite.config.schema import Config
from titanlite.data import own, sources, tokenizer
from titanlite.ground.errors import MachineFault, is_users, phase
from titanlite.hf import folder as hf_folder
from titanlite.launch import process, run_folder, stop
from titanlite.loop import distillation, divergence, loss, own_code, resume
from titanlite.optim import balance, build, lr_schedule, state
from titanlite.parallel import mesh, pipeline
from titanlite.parallel.parallelize import STEPS
from titanlite.registry import limits
from titanlite.registry.check import Check, Subject, found_by, of_module
from titanlite.registry.family import family_of
from titanlite.registry.own import calling
from titanlite.transforms.initialize import match_initial
from titanlite.transforms.meta import on_meta, run_forward

log = logging.getLogger(__name__)

_PATIENCE = 20.0  # seconds between two lines about code of the user's own that a check waits for


def _family(subject: Subject) -> None:
    subject.family = family_of(subject.config.model)
    subject.family.dimensions()  # checkpoints keep them


def _model(subject: Subject) -> None:
    subject.model = on_meta(subject.family, subject.config)


def _flops(subject: Subject) -> None:
    subject.family.module.flops(subject.family.config, subject.config.training.seq_len)


def _misfits(subject: Subject) -> None:
    """Overrides that are valid one by one, but do not fit together, such as 6 heads with 4 key-value heads."""
    if subject.config.model.overrides:
        fails = f"a forward pass of {subject.config.model.title} fails"
        with calling(f"model.overrides: these dimensions do not fit together: {fails}"):
            run_forward(subject.family.on_meta(), batch=1, seq_len=16)


# In this order, each after those that it needs.
CHECKS = (
    Check("run folder", lambda s: run_folder.faults(s.config)),
    Check("time limit", lambda s: stop.faults(s.config)),
    Check("checkpoints", lambda s: folder.faults(s.config), ("run folder",)),
    Check("resume", lambda s: resume.faults(s.config), ("run folder",)),
    Check("incidents", lambda s: divergence.faults(s.config), ("run folder",)),
    Check("own code", lambda s: own_code.faults(s.config)),
    Check("schedule", lambda s: lr_schedule.faults(s.config)),
    Check("optimizer", lambda s: build.faults(s.config)),
    Check("mesh", lambda s: mesh.faults(s.config, s.ranks)),
    Check("microbatches", lambda s: pipeline.microbatch_faults(s.config, s.ranks), ("mesh",)),
    Check("processes", lambda s: process.faults(s.local_ranks) if s.local_ranks is not None else ()),
    Check("family", of_module(_family)),
    Check("model", of_module(_model), ("family",)),
    Check("initial", of_module(lambda s: match_initial(s.model, s.family)[1]), ("model",)),
    Check("flops", of_module(_flops), ("family",)),
    Check("limits", lambda s: limits.faults(s.config, s.model), ("model",)),
    *(Check(step.name, step.faults, step.needs) for step in STEPS),
    Check("dimensions", _misfits, ("model", "sharding", "initial", "flops")),  # it would repeat their faults
    Check("Hugging Face", lambda s: hf_folder.faults(s.config, s.family), ("run folder", "model")),
    Check("loss", lambda s: loss.faults(s.config, s.family, s.model), ("model",)),
    Check("distillation", of_module(distillation.faults), ("mesh", "limits", "context", "experts", "sharding")),
    Check("parameters of the optimizer", lambda s: build.model_faults(s.config.optimizer, s.model), ("model",)),
    Check("balance", lambda s: balance.faults(s.config, s.model), ("model",)),
    Check("tokenizer", lambda s: tokenizer.faults(s.config, s.family.config.vocab_size), ("family",)),
    Check("keys of sources", lambda s: sources.key_faults(s.config)),
    Check("sources", lambda s: sources.faults(s.config), ("keys of sources",)),
    Check("token files", lambda s: sources.file_faults(s.config, s.family.config.vocab_size), ("sources", "tokenizer")),
    Check("own data", lambda s: own.faults(s.config, s.family.config.vocab_size), ("sources", "tokenizer")),
    Check(
        "disk",
        lambda s: state.faults(s.config, s.model) if s.local_ranks is not None else (),
        ("run folder", "model", "parameters of the optimizer"),
    ),
)
# Not by a rank: it compares its own number with the GPUs that it sees, in process.start, and opens the data next.
_BEFORE_RANKS = {"processes", "sources"}


@phase("checking the configuration")
def check(
    config: Config,
    path: str,
    ranks: int,
    local_ranks: int | None = None,
    open_files: bool = True,
    elsewhere: bool = False,
    more: Sequence[Check] = (),
) -> list[str]:
    """Raises Faults that lists every fault of a configuration for `ranks` processes.

    local_ranks: how many of them will run on this machine; None if it is not the machine that will train.
    open_files: False for a rank, and for a command that reads no data: without _BEFORE_RANKS and what needs them.
    elsewhere: the run is for a machine with GPUs, and this one has none. The faults that only this machine has are then
    returned, not raised. more: checks after CHECKS.
    """
    cuda = torch.cuda.is_available()
    idle = config.idle(Hardware(cuda, ranks))
    # what has no effect has no faults either
    subject = Subject(config.settled(Hardware(cuda or elsewhere)), ranks, local_ranks)
    found: list[str] = []
    passed: set[str] = set()

    def waived(fault: str) -> bool:
        return elsewhere and isinstance(fault, MachineFault)

    for each in (*CHECKS, *more):
        if not passed.issuperset(each.needs) or (each.name in _BEFORE_RANKS and not open_files):
            continue
        with _naming_slow_code(each.name):
            faults = list(found_by(each.faults, subject))
        found += faults
        if all(map(waived, faults)):
            passed.add(each.name)
    found += effects.faults(idle, [fault for fault in found if not waived(fault)])
    if refused := [fault for fault in found if not waived(fault)]:
        raise Faults(path, refused)
    return found


@contextlib.contextmanager
def _naming_slow_code(check: str) -> Iterator[None]:
    """Logs where a check is in the user's own code, every few seconds: a part of one's own may never return."""
    checking, done = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not done.wait(_PATIENCE):
            frames = traceback.extract_stack(sys._current_frames()[checking])
            last = max((number for number, frame in enumerate(frames) if frame.filename == __file__), default=len(frames))
            if of_user := [frame for frame in frames[last:] if is_users(frame.filename)]:
                log.warning("checking %s: waiting for %s, line %d", check, of_user[-1].filename, of_user[-1].lineno)

    threading.Thread(target=watch, daemon=True, name="watch of the checks").start()
    try:
        yield
    finally:
        done.set()
