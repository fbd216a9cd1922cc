"""Runs of a few steps, and how they differ: the engine of `verify`, `check-model` and `replay`.

`begin` and `follow` train with the functions of the training loop. `record_run` keeps what a run did. `compare` lists every
value that differs from a reference run, with its relative difference and tolerance.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from models.decoder import Decoder
from models.moe import experts_of
from titanlite.config.effects import Hardware
from titanlite.config.schema import Config
from titanlite.config.tables import Section
from titanlite.data.batch import Batch
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.mixture import Data
from titanlite.ground.torch_private import AnyDropout
from titanlite.launch import process
from titanlite.launch.process import of_all_ranks
from titanlite.loop.divergence import Steps
from titanlite.loop.own_code import OwnCode
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.loss_scale import LossScale
from titanlite.optim.lr_schedule import Schedule, build_schedule
from titanlite.parallel import context, expert, pipeline
from titanlite.parallel.mesh import DEGREES, data_degree, data_rank, parts_of, ranks_of, rng_rank
from titanlite.registry.family import Family, family_of

# The meshes of `check-model`, and of `verify` by default: a new dimension joins with one line.
MESHES = {
    "2 x 2": {"dp_shard": 2, "tp": 2},
    "tp 2": {"tp": 2},
    "shard 2": {"dp_shard": 2},
    "replicate 2": {"dp_replicate": 2},
    "context 2": {"cp": 2},
    "pipeline 2": {"pp": 2},
}
EVERY_MESH = MESHES | {"experts 2": {"dp_shard": 2, "ep": 2}}  # the further ones are for MoE models


def meshes_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """The meshes of `check-model` for a model."""
    return EVERY_MESH if experts_of(model) else MESHES


def unsplittable(family: Family, model: Decoder, degrees: dict[str, int]) -> str:
    """Why parallelism refuses a model on a mesh that its LIMITS allow; "" if it does not."""
    if "cp" in degrees and (reason := context.unsplittable(model)):
        return f"{reason}; context parallelism refuses this model"
    if "ep" in degrees and (reason := expert.unsplittable(model, degrees["ep"])):
        return f"the model has {reason}; expert parallelism refuses it"
    if "pp" in degrees and (reason := pipeline.unsplittable(family, degrees["pp"])):
        return f"{reason}; pipeline parallelism refuses this model"
    return ""


# ------------------------------------------------------------------------------------------------------------------ runs


class Run(NamedTuple):
    """What the training loop holds while it trains."""

    config: Config
    mesh: DeviceMesh
    device: torch.device
    model: Decoder
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    steps: Steps  # losses and gradient norms of the steps taken

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient of the loss, without the divisor of float16) of each parameter that has one."""
        divisor = self.loss_scale.divisor.item() if self.loss_scale else 1.0
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad / divisor

    def of_all_stages(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values of all ranks of a pipeline by name, in the order of the whole model; else these."""
        if self.model.pipeline is None:
            return values
        every = everywhere(self.model, values)
        names = [name for name, _ in family_of(self.config.model).on_meta().named_parameters()]
        return {name: every.pop(name) for name in names if name in every} | every  # adapters last


def everywhere(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """The values of all stages of a pipeline, whose ranks call this together; without a pipeline, the values as they are."""
    pipeline = getattr(model, "pipeline", None)
    return values if pipeline is None else dict(pipeline.gathered(values.items()))


def replaced(config: Config, **sections: dict[str, Any] | Section) -> Config:
    """A copy of the configuration with other sections, or other values in them; keys that are then without effect are unset."""
    update = {
        name: values if isinstance(values, Section) else getattr(config, name).model_copy(update=values)
        for name, values in sections.items()
    }
    return config.model_copy(update=update).settled(Hardware())


def on_mesh(config: Config, degrees: dict[str, int], global_batch: int) -> Config:
    """The configuration on another mesh, with this global batch. degrees: those that are not 1.

    The local batch stays if the mesh can have it, or is the largest part of it: another one rounds other sums.
    """
    parallelism: dict[str, Any] = {key: degrees.get(name, 1) for name, key in DEGREES.items()}
    if not expert.fit(degrees.get("ep", 1), config.parallelism.expert_parallel_node_size):
        parallelism["expert_parallel_node_size"] = 1
    most, ranks = math.gcd(config.training.local_batch_size, global_batch // parts_of(degrees)), ranks_of(degrees)
    for local in (size for size in range(most, 0, -1) if most % size == 0):
        training = {"global_batch_size": global_batch, "local_batch_size": local}
        split = replaced(config, training=training, parallelism=parallelism)
        if not any(pipeline.microbatch_faults(split, ranks)):
            break
    return split.settled(Hardware(ranks=ranks))  # what has no effect on one mesh may have one on another


def begin(config: Config, mesh: DeviceMesh, device: torch.device) -> Run:
    """A run before its first step: the initial weights, and an optimizer that has its state."""
    return Run(config, mesh, device, *begin_training(family_of(config.model), config, mesh, device), Steps(mesh))


def dropouts(model: nn.Module) -> list[AnyDropout]:
    """The dropout layers of a model that draw numbers; not calls of F.dropout."""
    return [module for module in model.modules() if isinstance(module, AnyDropout) and module.p > 0]


def without_dropout(model: nn.Module) -> None:
    """Turns the dropout layers of a model off: they draw other numbers on every mesh."""
    for module in dropouts(model):
        module.p = 0.0


def after_building(run: Run) -> Run:
    """The run, after the user's own hooks that `train.py` calls once the model has its weights."""
    OwnCode(run.config, metrics=False).after_building(run.model, run.config, run.optimizer)
    return run


def follow(run: Run, schedule: Schedule, batches: Iterable[Batch], numbers: range) -> Iterator[tuple[int, Batch]]:
    """Takes these steps as the training loop does. Yields (step, batch) after each backward pass, before the update."""
    training, own_code = run.config.training, OwnCode(run.config, metrics=False)
    after_building(run)
    for number, local_batch in zip(numbers, batches, strict=False):
        process.seed_step(training.seed, number, rng_rank(run.mesh))
        batch = local_batch.to(run.device, non_blocking=True)
        own_code.at_step("before_step", number, run.model, run.optimizer)
        loss = forward_backward(run.model, batch, run.mesh, run.loss_scale)
        yield number, batch
        norm = update(run.model, run.optimizer, schedule.at(number), training.max_norm, run.loss_scale, loss.labels)
        own_code.at_step("after_step", number, run.model, run.optimizer)
        run.steps.add(number, 0, loss, norm)


# ---------------------------------------------------------------------------------------------------------- trajectories


class Trajectory(NamedTuple):
    """What a few steps of training did; tensors are whole, and on the CPU."""

    weights: dict[str, Tensor]  # before the first step
    batches: list[Tensor]  # (global batch, values) of each step: tokens, label masks, document numbers
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping; frozen and unused parameters have none
    dtypes: set[torch.dtype]  # of masters, gradients and moments
    updates: dict[str, Tensor]  # what all steps together changed in each trained parameter
    noise: dict[str, float] | None = None  # of a reference: how far rounding alone changes each gradient, relative to its norm


def batches_of(config: Config, data: Data, mesh: DeviceMesh) -> Batches:
    """This rank's part of the batches of a run from its first step."""
    part = data_rank(mesh), data_degree(mesh)
    return Batches(StepDataset(config, data, part))


def record_run(run: Run, batches: Iterable[Batch]) -> Trajectory:
    """Trains `training.steps` steps on this rank's part of each batch; all ranks return the same."""
    weights = run.of_all_stages({name: whole(parameter) for name, parameter in run.model.named_parameters()})
    global_batches, gradients = [], {}
    for number, batch in follow(run, build_schedule(run.config), batches, range(1, run.config.training.steps + 1)):
        global_batches.append(_gather_batch(batch, run.mesh))
        if number == 1:
            gradients = run.of_all_stages({name: whole(gradient) for name, gradient in run.gradients()})
    steps = run.steps.read()
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    dtypes = {tensor.dtype for tensor in [*run.model.parameters(), *gradients.values(), *moments]}
    updates = {name: whole(p) - weights[name] for name, p in run.model.named_parameters() if p.requires_grad}
    losses, norms = [each.loss or 0.0 for each in steps], [each.norm for each in steps]
    return Trajectory(weights, global_batches, losses, norms, gradients, dtypes, run.of_all_stages(updates))


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU; a DTensor is gathered."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _gather_batch(batch: Batch, mesh: DeviceMesh) -> Tensor:
    """The global batch, of which each data-parallel rank holds a part, in order; the values of a row stand side by side."""
    own = torch.cat([tensor.flatten(0, 1).long().cpu() for tensor in batch if tensor is not None], dim=1)
    by_rank = dict(of_all_ranks((data_rank(mesh), own)))
    return torch.cat([by_rank[rank] for rank in range(data_degree(mesh))])


# ----------------------------------------------------------------------------------------------------------- differences


FLOAT32 = 1e-5  # what float32 rounding leaves where no terms cancel
# A gradient whose terms cancel gets MARGIN times its measured noise, and at most MOST, so that a fault of 1% still fails.
MARGIN, MOST = 10, 5e-3
# Each field of Trajectory that is compared -> (the name of its values, the relative difference that float32 rounding explains).
# Causes come before consequences.
QUANTITIES = {
    "weights": ("initial value", 0.0),
    "batches": ("global batch", 0.0),
    "gradients": ("gradient", FLOAT32),
    "losses": ("loss", FLOAT32),
    "norms": ("gradient norm", 1e-3),
    # AdamW's first steps have the size of the rate for every gradient: one that rounds to the other side of zero differs.
    "updates": ("update", 0.05),
}
FIRST_NORM = 1e-5  # Rounding errors grow with the steps, so the first gradient norm has a smaller tolerance than later ones.


class Difference(NamedTuple):
    """How far one value of a trajectory is from that of the reference."""

    quantity: str  # a key of QUANTITIES
    where: str  # the parameter, or "step 3"
    size: float  # relative to the reference; 0 where the values are equal
    tolerance: float
    noise: float = 0.0  # how far rounding alone changes the value

    def __str__(self) -> str:
        size = f" by {self.size:.1e} of its norm" if self.tolerance else ""
        return f"the {QUANTITIES[self.quantity][0]} of {self.where} differs{size}"


class Comparison(NamedTuple):
    """The differences between all values of two trajectories."""

    differences: list[Difference]

    @property
    def excessive(self) -> list[Difference]:
        """Those beyond their tolerance, causes before consequences."""
        return [difference for difference in self.differences if difference.size > difference.tolerance]

    @property
    def equal(self) -> bool:
        return not self.excessive

    @property
    def undecided(self) -> bool:
        """Whether values differ beyond their tolerance, and the noise of each is large enough to explain it."""
        return not self.equal and all(difference.size <= MARGIN * difference.noise for difference in self.excessive)

    def of(self, quantity: str) -> list[Difference]:
        """Those of one quantity."""
        return [difference for difference in self.differences if difference.quantity == quantity]

    def worst(self, quantity: str) -> Difference:
        """The largest of one quantity."""
        return max(self.of(quantity), key=lambda difference: difference.size)

    def __str__(self) -> str:
        return ", ".join(f"{quantity} {self.worst(quantity).size:.1e}" for quantity in QUANTITIES if self.of(quantity))


def compare(trajectory: Trajectory, reference: Trajectory) -> Comparison:
    """Compares every weight, batch, gradient, loss and gradient norm. A value that only one of the two has differs by inf.

    The noise of the reference raises the tolerance of gradients, and of updates, which are only compared where it is known.
    """
    differences = []
    for field, (_, explained) in QUANTITIES.items():
        if field == "updates" and reference.noise is None:
            continue
        values, expected = _by_name(getattr(trajectory, field)), _by_name(getattr(reference, field))
        for where in expected | values:
            noise = (reference.noise or {}).get(where, 0.0) if field == "gradients" else 0.0
            tolerance = FIRST_NORM if (field, where) == ("norms", "step 1") else explained
            tolerance = max(tolerance, min(MARGIN * noise, MOST))
            if field == "updates":  # the share of elements that rounding turns grows with the noise
                tolerance = max(tolerance, math.sqrt(MARGIN * (reference.noise or {}).get(where, 0.0)))
            size = relative_difference(values.get(where), expected.get(where))
            differences.append(Difference(field, where, size, tolerance, noise))
    return Comparison(differences)


def relative_difference(value: Tensor | float | None, reference: Tensor | float | None) -> float:
    """L2 norm of the difference over that of the reference; inf where only one of the two exists, is finite, or is not zero."""
    if value is None or reference is None:
        return math.inf
    ours, theirs = torch.as_tensor(value).double(), torch.as_tensor(reference).double()
    difference, size = (ours - theirs).norm().item(), theirs.norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf


def _by_name(values: dict[str, Any] | list[Any]) -> dict[str, Any]:
    return values if isinstance(values, dict) else {f"step {number}": value for number, value in enumerate(values, 1)}
