"""What `titanlite check-model` trains: a few steps of a small model on random tokens, in one process and on meshes.

Each function here runs on the ranks of `on_ranks`, on the CPU. What is wrong comes back as sentences by row of the table.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.blocks import Constant, Normal
from titanlite.checkpoint.folder import step_folder
from titanlite.checkpoint.load import load_tensors, verified
from titanlite.checkpoint.save import Saver
from titanlite.config.schema import Config, Optimizer
from titanlite.data.batch import Batch
from titanlite.errors import UserError
from titanlite.loop.step import build_model
from titanlite.optim.build import build_optimizer
from titanlite.optim.state import checkpoint_bytes, create_state, run_tensors
from titanlite.parallel.mesh import DIMENSIONS, build_mesh, data_degree, data_rank
from titanlite.tools.verify import GRADIENT, Comparison, Trajectory, compare, follow, whole
from titanlite.transforms.compile import RecompilationWatch
from titanlite.transforms.initialize import fill, match_initial
from titanlite.transforms.registry import every_layer, family_of, place_of

STEPS, GLOBAL_BATCH, SEQ_LEN = 3, 4, 32
PATIENCE = 60  # seconds that ranks wait for one which has failed
MODES = {"full": {"mode": "full"}, "by operation": {"mode": "selective", "selective_ac_option": "op"}}


class Alone(NamedTuple):
    """What one process has found."""

    faults: dict[str, list[str]]  # by row; a row that could not be looked at is not there
    trajectory: Trajectory | None = None
    stored: dict[str, str] | None = None  # tensor's name -> digest, of the checkpoint that it has written as step 1


def told(error: Exception) -> str:
    """An error in one line, with the place in the model's code that has led to it."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    return f"{place_of(error)}: {type(error).__name__}: {text.splitlines()[0] if text else ''}"


def guarded(function: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """The faults that a function finds, or the error that the model's code raises meanwhile."""
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's module raises
        return [told(error)]


# -------------------------------------------------------------------------------------------------------- in one process


def in_one_process(device: torch.device, name: str, flavor: str, saves: Path) -> Alone:
    """Rows "loss and gradients", "recomputation", "compile" and "parameters", and a checkpoint of step 1."""
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device.type)
    found = Alone({})

    def train() -> list[str]:
        nonlocal found
        watched: list[str] = []
        model, optimizer = _built(_config(name, flavor, {}), mesh, device)
        _watch_for_nonfinite(model, watched)
        trajectory = _follow(model, optimizer, _config(name, flavor, {}), mesh, device)
        faults = _unsound(model, trajectory, watched)
        if not faults:
            tensors = run_tensors(model, optimizer, None)
            _save(saves, 1, tensors)
            found = Alone({"parameters": _miscounted(model, tensors)}, trajectory, _digests(tensors))
        return faults

    faults = guarded(train)
    if found.trajectory is not None:
        for row, check in (("recomputation", recomputation_faults), ("compile", compile_faults)):
            found.faults[row] = guarded(check, name, flavor, found.trajectory, mesh, device)
    found.faults["loss and gradients"] = faults
    return found


def recomputation_faults(name: str, flavor: str, reference: Trajectory, mesh: DeviceMesh, device: torch.device) -> list[str]:
    """Activation checkpointing must not change a gradient."""
    faults = []
    for words, keys in MODES.items():
        config = _config(name, flavor, {}, activation_checkpoint=keys)
        result = compare(_follow(*_built(config, mesh, device), config, mesh, device), reference)
        faults += [f"recomputed {words}: {fault}" for fault in differences(result)]
    return faults


def compile_faults(name: str, flavor: str, reference: Trajectory, mesh: DeviceMesh, device: torch.device) -> list[str]:
    """Each block and the head must compile as one graph, change no gradient, and be done with it after two steps."""
    config = _config(name, flavor, {}, compile={"enable": True, "backend": "aot_eager"})
    watch = RecompilationWatch()
    logger = logging.getLogger("titanlite.transforms.compile")
    level, logger.level = logger.level, logging.ERROR  # its warnings are returned too
    try:
        model, optimizer = _built(config, mesh, device)
        faults = differences(compare(_follow(model, optimizer, config, mesh, device), reference))
        watch.settle()
        _follow(model, optimizer, config, mesh, device, seed=1)
        causes = [" ".join(cause.splitlines()[0].partition("(HINT")[0].split()) for cause in watch.check(STEPS + 1)]
    finally:
        logger.level = level
    return faults + [f"recompiled after step {STEPS}: {cause}" for cause in dict.fromkeys(causes)]


def _watch_for_nonfinite(model: nn.Module, found: list[str]) -> None:
    """Adds to `found` each module whose result is not finite; the first is where it began."""

    def look(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _arguments: Any, result: Any) -> None:
            if isinstance(result, Tensor) and not result.isfinite().all():
                found.append(path)

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(look(path or "the model"))


def _unsound(model: nn.Module, trajectory: Trajectory, watched: list[str]) -> list[str]:
    if watched:
        return [f"what {watched[0]} returns is not finite"]
    if bad := [name for name, gradient in trajectory.gradients.items() if not gradient.isfinite().all()]:
        return [f"the gradient of {name} is not finite" for name in dict.fromkeys(map(every_layer, bad))]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    missed = dict.fromkeys(every_layer(name) for name in trained if name not in trajectory.gradients)
    return [f"no gradient reaches {name}: not used in the forward pass?" for name in missed]


def _miscounted(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """What a checkpoint holds against `checkpoint_bytes`, which runs and `titanlite estimate` rely on."""
    names = {name for name, _ in model.named_parameters()}
    moments = (f"optimizer.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq"))
    counted = [tensors[key] for key in (*(f"model.{name}" for name in names), *moments) if key in tensors]
    found, formula = sum(tensor.numel() * tensor.element_size() for tensor in counted), checkpoint_bytes(model, Optimizer())
    return [] if found == formula else [f"a checkpoint holds {found:,} bytes, checkpoint_bytes says {formula:,}"]


# ------------------------------------------------------------------------------------------------------------ on a mesh


def on_mesh(
    device: torch.device, name: str, flavor: str, degrees: dict[str, int], saves: Path, step: int, stored: dict[str, str]
) -> tuple[Trajectory, list[str]]:
    """(what a few steps do on a mesh, what is wrong with the checkpoint of `step` when it is loaded there).

    stored: the digests of what that checkpoint holds. It is written again from this mesh as the step after.
    Raises UserError for what the model's code raises, on any rank: on_ranks then ends the others, which may be waiting.
    """
    try:
        mesh = build_mesh({key: degrees.get(key, 1) for key in DIMENSIONS}, device.type)
        config = _config(name, flavor, degrees)
        model, optimizer = _built(config, mesh, device)
        trajectory = _follow(model, optimizer, config, mesh, device)
        tensors = run_tensors(model, optimizer, None)
        return trajectory, _reload(saves, step, tensors, stored)
    except Exception as error:
        raise UserError(told(error)) from error


def _reload(saves: Path, step: int, tensors: dict[str, Tensor], stored: dict[str, str]) -> list[str]:
    source = step_folder(saves, step)
    try:
        load_tensors(source, verified(source), tensors)
    except UserError as error:  # on all ranks
        return [str(error)]
    found = _digests(tensors)
    _save(saves, step + 1, tensors)
    return [f"{every_layer(name)} is not what was saved" for name in stored if found.get(name) != stored[name]]


def differences(result: Comparison) -> list[str]:
    """In what a trajectory differs from the reference by more than float32 rounding."""
    if result.equal:
        return []
    if result.weights:
        return [f"the initial values of {every_layer(result.weights[0])} differ"]
    if result.gradient >= GRADIENT:
        return [f"the gradient of {result.worst} differs most, by {result.gradient:.1e} of its norm"]
    return [f"the losses differ by {result.loss:.1e}, the gradient norms by {result.later_norms:.1e}"]


# ------------------------------------------------------------------------------------------------------------- the parts


def _config(name: str, flavor: str, degrees: dict[str, int], **sections: dict[str, Any]) -> Config:
    parts = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    values: dict[str, Any] = {
        "model": {"name": name, "flavor": flavor},
        "training": {
            "seq_len": SEQ_LEN,
            "steps": STEPS,
            "global_batch_size": GLOBAL_BATCH,
            "local_batch_size": GLOBAL_BATCH // parts,
            "mixed_precision_param": "float32",
        },
        "lr_scheduler": {"warmup_steps": 1},
    }
    return Config.model_validate(values | sections)


def _built(config: Config, mesh: DeviceMesh, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as a run builds it, with two changes that make a comparison worth something, and its optimizer with state.

    What starts as a constant gets values of its own: a gain of one, or a gate of zero, would hide what is wrong around it.
    Dropout drops nothing, since it draws other numbers on every mesh.
    """
    family = family_of(config.model)
    model = build_model(family, config, mesh, device)
    distributions, _ = match_initial(model, family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(distributions[name], Constant):
                other = torch.empty_like(parameter)
                fill(other, name, Normal(0.1), config.training.seed)
                parameter += other
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    optimizer = build_optimizer(model, config.optimizer)
    create_state(optimizer)
    return model, optimizer


def _follow(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, mesh: DeviceMesh, device: torch.device, seed: int = 0
) -> Trajectory:
    vocabulary = family_of(config.model).config.vocab_size
    return follow(model, optimizer, _batches(config, vocabulary, mesh, seed), config, mesh, device)


def _batches(config: Config, vocabulary: int, mesh: DeviceMesh, seed: int) -> Iterator[Batch]:
    """This rank's part of random global batches, which are the same on every mesh."""
    keys = config.training
    generator = torch.Generator().manual_seed(seed)
    every = torch.randint(vocabulary, (keys.steps, GLOBAL_BATCH, keys.seq_len + 1), generator=generator)
    for step in every:
        yield Batch(step.chunk(data_degree(mesh))[data_rank(mesh)].view(-1, keys.local_batch_size, keys.seq_len + 1))


def _save(saves: Path, step: int, tensors: dict[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        saves.mkdir(exist_ok=True)
    saver = Saver(saves, Config().checkpoint, PATIENCE)
    about = {key: {} for key in ("data", "schedule", "config", "architecture")}
    saver.save(step, tensors, {"samples": 0, "global_batch": GLOBAL_BATCH, **about})
    saver.finish()


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.blake2b(whole(tensor).numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
