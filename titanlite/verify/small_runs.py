"""What `titanlite check-model` trains: a small model for a few steps on random tokens, in one process and on meshes.

`train_small` runs on the ranks of `on_ranks`, on the CPU. Faults are sentences.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from models.blocks import Normal, Uniform
from models.decoder import Decoder
from models.head import SIZES, Head
from models.moe import routers_of
from titanlite.checkpoint.folder import step_folder
from titanlite.checkpoint.load import load_tensors, verified
from titanlite.checkpoint.save import Saver
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Config, Model
from titanlite.data.batch import Batch
from titanlite.launch.local_ranks import describe_error
from titanlite.launch.process import of_all_ranks
from titanlite.loop.loss import sequence_of
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, parts_of
from titanlite.registry.family import Family, family_of
from titanlite.transforms.compile import RecompilationWatch
from titanlite.transforms.initialize import fill, initialize, match_initial
from titanlite.transforms.parameters import every_layer
from titanlite.verify.compare import (
    FIRST_NORM,
    Comparison,
    Run,
    Trajectory,
    begin,
    everywhere,
    on_mesh,
    record_run,
    relative_difference,
    replaced,
    whole,
    without_dropout,
)
from titanlite.verify.rounding import FLOAT64, gradients_in_float64, noise_of

STEPS, GLOBAL_BATCH, SEQ_LEN = 3, 4, 32
BUFFERS = 1e-3  # tolerance for what a few steps change in a buffer, as for the gradient norms of several steps
TIMEOUT_SECONDS = 60  # of collectives, after a rank has failed
_DROPPED = 0.1  # of the inputs of a block's parts
_CHUNK = 12  # tokens at most, whose logits the head computes at once on a mesh: several chunks for a microbatch
_SHOWN = 5  # differences where the forward pass is wrong


class Trained(NamedTuple):
    """What a few steps did."""

    trajectory: Trajectory
    faults: list[str]  # that need no comparison with another run
    buffers: "Buffers"
    stored: dict[str, str] | None = None  # tensor's name -> digest, of the checkpoint that was written


class Buffers(NamedTuple):
    """The buffers of a model before and after a few steps."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]  # on rank 0
    unequal: list[str]  # those whose values differ between ranks
    stored: list[str]  # those that a checkpoint has


class NotRun(Exception):
    """A check that does not apply to a model; the text says why."""


class Declared(NotRun):
    """A check of what a family declares unsupported; the text is its declaration, by which a run is refused."""


class Undecided(str):
    """A difference that may be rounding or a fault."""


def guarded(function: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """The faults that a function finds, or the error that the model's code raises meanwhile. Passes NotRun on."""
    try:
        return function(*arguments)
    except NotRun:
        raise
    except Exception as error:  # the user's module may raise anything
        return [describe_error(error)]


# --------------------------------------------------------------------------------------------------------------- a run


def train_small(
    device: torch.device,
    model: Model,
    sections: dict[str, dict[str, Any]],
    degrees: dict[str, int],
    saves: Path | None = None,
    step: int = 0,
    drops: bool = False,
) -> Trained:
    """Trains a few steps with some keys of the configuration, on a mesh.

    saves: a folder of checkpoints. The run then loads the one of `step`, if there is any, and writes the next one. drops: with
    dropout.
    """
    build = _builder(model, sections, degrees, device)
    run = build()
    if drops:
        drop_inputs(run.model)
    nonfinite = [] if sections or degrees else watch_for_nonfinite(run.model)
    before = _values(run.model)
    trajectory = record_run(run, random_batches(run))
    buffers = _buffers(run.model, before)
    faults = _training_faults(run.model, trajectory, nonfinite)
    if not sections and not degrees and not drops and not faults:
        trajectory = trajectory._replace(noise=noise_of(build, next(random_batches(run))))
    if run.config.compile.enable:
        faults += _recompilations(run)
    if saves is None:
        return Trained(trajectory, faults, buffers)
    tensors = run_tensors(run.model, run.optimizer, None)
    if step:
        source = step_folder(saves, step)
        load_tensors(source, verified(source), tensors, elsewhere=everywhere(run.model, dict.fromkeys(tensors)))
    _save(saves, step + 1, tensors)
    digests = {name: _digest(whole(tensor)) for name, tensor in tensors.items()}
    return Trained(trajectory, faults, buffers, stored=everywhere(run.model, digests))


def gradients_small(
    device: torch.device, model: Model, sections: dict[str, dict[str, Any]], degrees: dict[str, int]
) -> dict[str, Tensor]:
    """The gradients of the first step of `train_small`, in float64."""
    return gradients_in_float64(_builder(model, sections | FLOAT64, degrees, device), random_batches)


def _builder(
    model: Model, sections: dict[str, dict[str, Any]], degrees: dict[str, int], device: torch.device
) -> Callable[[], Run]:
    config, mesh = small_config(model), build_mesh(degrees, device.type)
    if degrees:
        # Several microbatches on each mesh. Under tensor parallelism they have several rows, which on slices are no sequences.
        rows = GLOBAL_BATCH // 2 if degrees.get("tp", 1) > 1 and parts_of(degrees) == 1 else 1
        config = replaced(config, training={"local_batch_size": rows})
    config = replaced(on_mesh(config, degrees, GLOBAL_BATCH), **sections)

    def build() -> Run:
        run = begin(config, mesh, device)
        make_sensitive(run.model, family_of(config.model), config.training.seed)
        if degrees and isinstance(run.model.head, Head):
            run.model.head.sizes = SIZES["cpu"]._replace(logits=_CHUNK * run.model.head.vocab_size)
        return run

    return build


def damage(trained: Trained, stored: dict[str, str]) -> list[str]:
    """The faults of a checkpoint that a run has loaded. stored: what was written."""
    assert trained.stored is not None
    return [f"{every_layer(name)} is not what was saved" for name in stored if trained.stored.get(name) != stored[name]]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return everywhere(model, {name: whole(buffer) for name, buffer in model.named_buffers()})


def _buffers(model: nn.Module, before: dict[str, Tensor]) -> Buffers:
    after = _values(model)
    of_ranks = of_all_ranks(after)
    stored = everywhere(model, dict.fromkeys(model_tensors(model)))
    unequal = [name for name, value in after.items() if any(not torch.equal(of_rank[name], value) for of_rank in of_ranks)]
    return Buffers(before, after, unequal, [name for name in after if f"model.{name}" in stored])


def forgotten_buffers(buffers: Buffers) -> list[str]:
    """Buffers that training changes and that a checkpoint lacks."""
    return [
        f"{name} changes in training, and is not in checkpoints: a resumed run loses it; remove persistent=False"
        for name, value in buffers.after.items()
        if name not in buffers.stored and not torch.equal(value, buffers.before[name])
    ]


def buffer_differences(buffers: Buffers, reference: Buffers) -> list[str]:
    """Buffers that differ between the ranks of a run, or whose change differs from that of the reference."""
    faults = [f"{name} differs between ranks" for name in buffers.unequal]
    for name, value in buffers.after.items():
        expected = reference.after[name]
        if name in buffers.unequal or torch.equal(value, expected):
            continue
        changes = (each.after[name].double() - each.before[name].double() for each in (buffers, reference))
        if (size := relative_difference(*changes)) > BUFFERS:
            faults.append(f"{name} differs by {size:.1e} of its change in {STEPS} steps")
    advice = "; compute it from the whole batch, and outside of what is recomputed"
    return [f"{fault}{advice}" for fault in dict.fromkeys(map(every_layer, faults))]


def _recompilations(run: Run) -> list[str]:
    """A run that has settled must not compile again."""
    logging.getLogger("titanlite.transforms.compile").setLevel(logging.ERROR)  # its warnings are the faults
    watch = RecompilationWatch()
    watch.settle()
    record_run(run, random_batches(run, seed=1))
    causes = [" ".join(cause.splitlines()[0].partition("(HINT")[0].split()) for cause in watch.check(STEPS + 1)]
    return [f"recompiled after step {STEPS}: {cause}" for cause in dict.fromkeys(causes)]


def watch_for_nonfinite(model: nn.Module) -> list[str]:
    """A list that gets the name of each module when its result is not finite; the first is the origin.

    Where the argument is not finite either, and no module has returned it, the origin is the module around.
    """
    nonfinite: list[str] = []

    def hook_of(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: Any, result: Any) -> None:
            if isinstance(result, Tensor) and not result.isfinite().all():
                around = any(isinstance(each, Tensor) and not each.isfinite().all() for each in arguments)
                nonfinite.append((path.rpartition(".")[0] or "the model") if around else path)

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(hook_of(path or "the model"))
    return nonfinite


def _training_faults(model: nn.Module, trajectory: Trajectory, nonfinite: list[str]) -> list[str]:
    if nonfinite:
        return [f"the result of {nonfinite[0]} is not finite"]
    if bad := [name for name, gradient in trajectory.gradients.items() if not gradient.isfinite().all()]:
        return [f"the gradient of {name} is not finite" for name in dict.fromkeys(map(every_layer, bad))]
    whole_norm = math.hypot(*(gradient.double().norm().item() for gradient in trajectory.gradients.values()))
    if relative_difference(trajectory.norms[0], whole_norm) > FIRST_NORM:
        return [f"the gradient norm of step 1 is {trajectory.norms[0]:.6g}, and the norm of all gradients is {whole_norm:.6g}"]
    if twins := _equal_values(trajectory.weights):
        return [f"the initial values of {' and '.join(twins)} are equal"]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = dict.fromkeys(every_layer(name) for name in trained if name not in trajectory.gradients)
    return [f"no gradient reaches {name}: not used in the forward pass?" for name in unused]


def _equal_values(weights: dict[str, Tensor]) -> list[str]:
    """The first parameters that have the same values, other than one constant; empty if there are none."""
    owners: dict[str, list[str]] = {}
    for name, value in weights.items():
        if value.numel() > 1 and (value != value.flatten()[0]).any():
            owners.setdefault(_digest(value), []).append(name)
    return next((names for names in owners.values() if len(names) > 1), [])


def describe(comparison: Comparison) -> list[str]:
    """The differences beyond rounding of the first quantity that has any: the other quantities follow from it.

    Where the loss and the head's gradients are right, the fault is in the backward pass, which runs from the last layer to the
    first: the gradients of the last layer that differs come in the order of the model's parameters, and the fault is in one of
    them or behind it. Otherwise activations differ, so all gradients may differ, and the largest difference comes first.
    """
    excessive = comparison.excessive
    if not excessive:
        return []
    cause = [difference for difference in excessive if difference.quantity == excessive[0].quantity]
    last = cause
    if cause[0].quantity == "gradients":
        layers = [difference.where.split(".")[: 2 if difference.where.startswith("layers.") else 1] for difference in cause]
        last = [difference for difference, layer in zip(cause, layers, strict=True) if layer == layers[-1]]
        loss = any(difference.quantity == "losses" and difference.where == "step 1" for difference in excessive)
        if loss or (layers[-1] == ["head"] and len(last) < len(cause)):
            last = sorted(cause, key=lambda difference: -difference.size)[:_SHOWN]
    texts = [str(difference) for difference in last]
    if others := len(cause) - len(last):
        texts.append(f"and {others} more, which may follow from {'these' if len(last) > 1 else 'this'}")
    return texts


# ------------------------------------------------------------------------------------------------------------- the parts


def small_config(model: Model) -> Config:
    """A few short steps. Attention stays inside documents, unless the family refuses that."""
    training: dict[str, Any] = {"seq_len": SEQ_LEN, "steps": STEPS, "mixed_precision_param": "float32"}
    training |= {"global_batch_size": GLOBAL_BATCH, "local_batch_size": GLOBAL_BATCH}
    config = Config.model_validate({"model": model.model_dump(), "training": training, "lr_scheduler": {"warmup_steps": 1}})
    routers = routers_of(family_of(config.model).on_meta())
    if any(router.bias is not None for router in routers):
        # It depends on counts of all ranks. Losses of the routers would hide that no other gradient reaches them.
        config = replaced(config, moe={"bias_update_speed": 0.001})
    return replaced(config, training={"document_mask": takes_documents(family_of(config.model))})


def small_model(family: Family) -> Decoder:
    """The model on the CPU in float32, as the training rows have it."""
    model = family.on_meta()
    initialize(model, family, 0, torch.device("cpu"))
    make_sensitive(model, family, 0)
    return model


def takes_documents(family: Family) -> bool:
    """Whether the model computes packed rows; a family that cannot raises NotImplementedError."""
    model = small_model(family)  # of memory without values, a buffer may be no index of a table
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.long)
    try:
        with torch.no_grad():
            model(tokens, sequence_of(tokens, torch.zeros_like(tokens, dtype=torch.int32)))
    except NotImplementedError:
        return False
    return True


def make_sensitive(model: Decoder, family: Family, seed: int) -> None:
    """Two changes of an initialized model without which a comparison could miss a fault.

    Parameters that start without random values get some: a gain of one, or a gate of zero, would hide errors around it.
    Dropout is off, since it draws other numbers on every mesh.
    """
    distributions, _ = match_initial(model, family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not isinstance(distributions[name], Normal | Uniform):
                noise = torch.empty_like(parameter)
                fill(noise, name, Normal(0.1), seed)
                parameter.add_(noise)
    without_dropout(model)


def drop_inputs(model: Decoder) -> None:
    """From now on, dropout before each part of each block: before what gathers the sequence, so that each rank has its own."""

    def drop(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not module.training or not arguments or not isinstance(arguments[0], Tensor) or arguments[0].ndim != 3:
            return None
        return F.dropout(arguments[0], _DROPPED), *arguments[1:]

    for block in model.layers.values():
        for part in block.children():
            part.register_forward_pre_hook(drop, prepend=True)


def random_batches(run: Run, seed: int = 0) -> Iterator[Batch]:
    """This rank's part of random global batches, which are the same on every mesh."""
    training, vocab_size = run.config.training, family_of(run.config.model).config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    shape = (training.steps, GLOBAL_BATCH, training.seq_len + 1)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    # each row has another number of labels, so that microbatches and ranks differ in theirs
    counted = torch.rand(shape, generator=generator) < torch.linspace(0.3, 1.0, GLOBAL_BATCH)[:, None]
    documents = (torch.rand(shape, generator=generator) < 0.1)[..., 1:].cumsum(-1).int()
    for step in range(training.steps):
        # in the first step, whose gradients are compared, with documents; in others without
        packed = _own_part(documents[step], run) if training.document_mask and step == 0 else None
        yield Batch(_own_part(tokens[step], run), _own_part(counted[step], run), packed)


def _own_part(rows: Tensor, run: Run) -> Tensor:
    """This rank's microbatches of the rows of a global batch."""
    part = rows.chunk(data_degree(run.mesh))[data_rank(run.mesh)]
    return part.unflatten(0, (-1, run.config.training.local_batch_size))


def _save(saves: Path, step: int, tensors: dict[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        saves.mkdir(exist_ok=True)
    saver = Saver(saves, Config().checkpoint, TIMEOUT_SECONDS)
    sections: dict[str, Any] = {key: {} for key in ("data", "config", "architecture")}
    saver.save(step, tensors, {"samples": 0, "global_batch": GLOBAL_BATCH, **sections})
    saver.finish()


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
