"""Optimizer state: its names in checkpoints, and its size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint.folder import disk_space_faults
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Config, Optimizer
from titanlite.ground.errors import UserError
from titanlite.optim import ema, own
from titanlite.optim.build import is_orthogonalized
from titanlite.optim.loss_scale import LossScale


def trained_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer was built for, by name. A hook may have frozen some since; their state stands still.

    So checkpoints hold the same tensors at every start, which loads before hooks run.
    """
    built_for = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter in built_for}
    assert len(trained) == len(built_for), "a unit of FSDP2 is gathered: what has run the model must release it"
    return trained


def refuse_unfrozen(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises UserError where a hook has unfrozen parameters that the optimizer does not have."""
    built_for = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if unfrozen := [name for name, p in model.named_parameters() if p.requires_grad and p not in built_for]:
        raise UserError(
            f"hooks.modules: a hook unfreezes {', '.join(unfrozen)}, which [[optimizer.groups]] or [lora] has frozen, so that "
            "the optimizer does not update them. To train them later, let [[optimizer.groups]] train them, and freeze them in "
            "the hook before_step until then"
        )


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors by name, such as "layers.0.ffn.w1.weight.exp_avg", for checkpoints; an EMA's are its own."""
    own.make_state(optimizer)
    return {
        f"{name}.{key}": own.sharded(value, parameter)
        for name, parameter in trained_parameters(optimizer, model).items()
        for key, value in optimizer.state[parameter].items()
    }


def run_tensors(model: nn.Module, optimizer: Any, loss_scale: LossScale | None) -> dict[str, Tensor]:
    """All tensors of a run: the parameters, the optimizer's moments, the EMA, and in float16 the loss scale."""
    moments = {f"optimizer.{name}": tensor for name, tensor in named_state(optimizer, model).items()}
    average = ema.ema_of(optimizer)
    more = (average.tensors(model) if average else {}) | (loss_scale.tensors() if loss_scale else {})
    return model_tensors(model) | moments | more


def state_bytes(name: str, parameter: Tensor, cfg: Optimizer) -> int:
    """Bytes of optimizer state and EMA per value of a trained parameter, without its step counter."""
    if own.is_own(cfg):
        return own.state_bytes(name, parameter, cfg) + (4 if cfg.ema_decay else 0)
    moments = 1 if is_orthogonalized(name, parameter, cfg) else 2  # in the parameter's dtype
    remainder = 2 if parameter.dtype == torch.bfloat16 and cfg.rounding == "compensated" else 0
    return moments * parameter.element_size() + remainder + (4 if cfg.ema_decay else 0)


def checkpoint_bytes(model: nn.Module, cfg: Optimizer) -> int:
    """Bytes of the tensors in a checkpoint of a model, which may be on the meta device."""
    state = {name: state_bytes(name, p, cfg) if p.requires_grad else 0 for name, p in model.named_parameters()}
    return sum(p.numel() * (p.element_size() + state[name]) for name, p in model.named_parameters())


def faults(config: Config, model: nn.Module) -> Iterator[str]:
    """A disk of this machine that has no room for the checkpoints of a model, which is on the meta device."""
    if config.checkpoint.enable:
        folder = Path(config.job.dump_folder) / config.checkpoint.folder
        yield from disk_space_faults(folder, checkpoint_bytes(model, config.optimizer), config.checkpoint)
