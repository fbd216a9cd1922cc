"""A run's model without memory, a forward pass of it, and the FLOPs of training it."""

import contextlib
import copy
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.attention import SeqInfo
from models.blocks import Flops
from models.decoder import Decoder
from models.further import Further, further_of
from models.moe import MoE
from titanlite.config.schema import Config
from titanlite.ground.torch_private import FakeTensorMode
from titanlite.registry.family import Family, family_of
from titanlite.registry.teacher import config_of_teacher
from titanlite.transforms import lora
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.groups import apply_groups
from titanlite.transforms.parameters import allocate, is_adapter


def on_meta(family: Family, config: Config) -> Decoder:
    """A run's model on the meta device, in training.dtype, with the MTP modules of training.predict_further and the adapters
    of [lora], frozen as [[optimizer.groups]] says.

    Raises UserError as `adapt` and `apply_groups` do.
    """
    model = family.on_meta()
    _add_further(model, config)
    cast_parameters(model, DTYPES[config.training.dtype])
    if config.lora.enable:
        lora.adapt(model, config.lora, DTYPES[config.training.mixed_precision_param])
    apply_groups(model, config.optimizer.groups)
    return model


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Buffers keep their dtype: in bfloat16, the biases of routers would choose other experts."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _add_further(model: Decoder, config: Config) -> None:
    """Adds the MTP modules. Each has a copy of the model's last block."""
    cfg, depths = config.training, len(model.layers)
    if not cfg.predict_further or model.head is None:
        return
    last, dim = [*model.layers.values()][-1], model.head.output.in_features
    with torch.device("meta"):
        model.further = nn.ModuleDict(
            {
                str(depths + number): Further(copy.deepcopy(last), dim, cfg.predict_further_weight)
                for number in range(cfg.predict_further)
            }
        )


@contextlib.contextmanager
def without_memory(model: Decoder, batch: int, seq_len: int) -> Iterator[tuple[Tensor, SeqInfo]]:
    """Within it, a model on the meta device runs without memory, on tokens (batch, seq); its parameters stay fake tensors."""
    errors = logging.getLogger(FakeTensorMode.__module__)  # it logs what it raises
    errors.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            allocate(model, torch.device("cpu"))
            tokens, positions = (torch.zeros(batch, seq_len, dtype=torch.int64) for _ in range(2))
            yield tokens, SeqInfo(positions)
    finally:
        errors.disabled = False


def run_forward(model: Decoder, batch: int, seq_len: int) -> None:
    """One forward pass by `without_memory`."""
    with without_memory(model, batch, seq_len) as (tokens, seq):
        hidden = model(tokens, seq)
        if model.head is not None:
            model.head(hidden, tokens)


def training_flops(family: Family, config: Config) -> Flops:
    """FLOPs a token of a run. The family's formula is for training every weight: 6 for each parameter of a matrix.

    A frozen matrix costs 4, since no gradient of it is computed; that is too much below the first trained parameter, where no
    backward pass runs. Adapters are added, with 6 for each trained parameter, and so is the forward pass of a teacher, a third
    of its training.
    """
    flops = family.module.flops(family.config, config.training.seq_len)
    if config.training.predict_further:
        flops = _with_further(flops, family, config)
    if (of_teacher := config_of_teacher(config)) is not None:
        teacher = family_of(of_teacher.model)
        forward = [value // 3 for value in teacher.module.flops(teacher.config, config.training.seq_len)]
        flops = Flops(*(ours + theirs for ours, theirs in zip(flops, forward, strict=True)))
    if not config.lora.enable and not any(group.frozen for group in config.optimizer.groups):
        return flops
    model = on_meta(family, config)
    frozen = active_parameters(model, frozen=True)
    adapters = sum(p.numel() * (6 if p.requires_grad else 4) for name, p in model.named_parameters() if is_adapter(name))
    return Flops(*(value - 2 * frozen + adapters for value in flops))


def _with_further(flops: Flops, family: Family, config: Config) -> Flops:
    """The same with MTP modules: their matrices, the head once more for each, and attention as in a mean block."""
    model = on_meta(family, config)
    depths, (one, two) = further_of(model), (family.module.flops(family.config, tokens).palm for tokens in (1, 2))
    matmuls = sum(6 * (active_parameters(each) + active_parameters(model.head)) for each in depths.values())
    share, without_attention = len(depths) / len(model.layers), 2 * one - two  # it is linear in the length
    return Flops(*(value + matmuls + share * (value - without_attention) for value in flops))


def active_parameters(module: nn.Module | None, frozen: bool = False) -> int:
    """The parameters of matrices that each token is multiplied by. frozen: only those that are not trained; the experts of a
    layer count as frozen where all of their parameters are."""
    parts = [*module.modules()] if module is not None else []
    linears = [each.weight for each in parts if isinstance(each, nn.Linear) and not (frozen and each.weight.requires_grad)]
    moe_layers = [each for each in parts if isinstance(each, MoE) and not (frozen and _trained(each.experts))]
    return sum(weight.numel() for weight in linears) + sum(each.active_parameters() for each in moe_layers)


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
