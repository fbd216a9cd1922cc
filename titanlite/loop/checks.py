"""The check of a configuration: every part of titanlite has its faults beside it, and here they are listed.

All faults are found before any process starts, and reported together.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from titanlite.checkpoint import folder
from titanlite.config import effects
from titanlite.config.effects import Place
from titanlite.config.read import Faults
from titanlite.config.schema import Config
from titanlite.data import sources, tokenizer
from titanlite.errors import MachineFault, UserError, phase
from titanlite.hf import folder as hf_folder
from titanlite.launch import process, run_folder
from titanlite.loop import divergence, loss, resume
from titanlite.optim import balance, build, lr_schedule, state
from titanlite.parallel import context, expert, mesh, pipeline, tensor
from titanlite.transforms import activation_checkpoint, attention_kernels, compile, float8, limits
from titanlite.transforms.initialize import match_initial
from titanlite.transforms.meta import on_meta, run_forward
from titanlite.transforms.registry import Family, family_of, place_of

ModelFaults = Callable[[Config, nn.Module], Iterable[str]]  # of a model on the meta device

OF_THE_CONFIGURATION: tuple[Callable[[Config], Iterable[str]], ...] = (
    folder.faults,
    resume.faults,
    divergence.faults,
    lr_schedule.faults,
    build.faults,
    compile.faults,
    activation_checkpoint.faults,
    float8.faults,
)


@phase("checking the configuration")
def check(
    config: Config,
    path: str,
    ranks: int,
    local_ranks: int | None = None,
    open_files: bool = True,
    elsewhere: bool = False,
    of_model: Sequence[ModelFaults] = (),
) -> list[str]:
    """Raises Faults that lists every fault of a configuration for `ranks` processes.

    local_ranks: how many of them will run on this machine; None if it is not the machine that will train.
    open_files: False for a rank, which opens and validates the token files next.
    elsewhere: the run is for a machine with GPUs, and this one has none. The faults that only this machine has are then
    returned, not raised. of_model: further faults.
    """
    cuda = torch.cuda.is_available()
    faults = [*effects.faults(config.idle(Place(cuda, ranks)))]
    config = config.settled(Place(cuda or elsewhere))  # what has no effect has no faults either
    faults += (misplaced := [*run_folder.faults(config)])
    # other parts read what is there; its faults are reported once
    reported = contextlib.suppress(OSError) if misplaced else contextlib.nullcontext()
    for part in OF_THE_CONFIGURATION:
        with reported:
            faults += part(config)
    faults += mesh.faults(config, ranks)
    faults += pipeline.microbatch_faults(config, ranks)
    faults += sources.faults(config) if open_files else ()
    faults += process.faults(local_ranks) if local_ranks is not None else ()
    with reported:
        faults += _model_faults(config, local_ranks is not None, of_model)
    left: list[str] = [fault for fault in faults if elsewhere and isinstance(fault, MachineFault)]
    if len(left) < len(faults):
        raise Faults(path, [fault for fault in faults if fault not in left])
    return left


def _model_faults(config: Config, here: bool, more: Sequence[ModelFaults]) -> Iterator[str]:
    """The faults that need the model, which is built on the meta device; here: on the machine that will train."""
    try:
        family = family_of(config.model)
        model = on_meta(family, config)
        yield from tensor.faults(config, family, model)
        yield from match_initial(model, family)[1]
        family.module.flops(family.config, config.training.seq_len)
    except UserError as error:  # several lines where patterns of lora.modules match nothing
        yield from str(error).splitlines()
        return
    except Exception as error:  # the user's module can raise anything
        yield f"model.name = {config.model.name!r}: its code failed ({place_of(error)}): {error!r}"
        return
    if config.model.overrides:
        yield from _misfits(config, family)
    yield from limits.faults(config, model)
    yield from context.faults(config, model)
    yield from expert.faults(config, model)
    yield from pipeline.faults(config, family, model)
    yield from attention_kernels.faults(config, family)
    yield from hf_folder.faults(config, family, model)
    yield from loss.faults(config, model)
    yield from activation_checkpoint.model_faults(config.activation_checkpoint, model)
    yield from build.decay_faults(config.optimizer, model)
    yield from balance.faults(config, model)
    yield from tokenizer.faults(config, family.config.vocab_size)
    for part in more:
        yield from part(config, model)
    if here:
        yield from state.faults(config, model)


def _misfits(config: Config, family: Family) -> Iterator[str]:
    """Overrides that are dimensions each, and no model together, such as 6 heads with 4 key-value heads."""
    try:
        run_forward(family.on_meta(), batch=1, seq_len=16)
    except Exception as error:  # the user's module can raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        yield (
            f"model.overrides: these dimensions do not fit together: a forward pass of {config.model.title} fails at "
            f"{place_of(error)}: {reason}"
        )
