"""One optimizer step: the model, the gradients of a global batch, the update."""

import logging

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.further import further_of
from models.head import Head
from models.moe import routers_of
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.ground.errors import at, phase
from titanlite.loop.distillation import load_teacher
from titanlite.loop.loss import StepLoss, count_further, count_labels, summed_loss, summed_loss_with_further, to_microbatch
from titanlite.optim import balance, ema
from titanlite.optim.build import build_optimizer, clip_gradients, set_lr
from titanlite.optim.loss_scale import LossScale
from titanlite.parallel.fsdp import check_reductions, choose_reductions
from titanlite.parallel.mesh import data_degree, sequence_mesh, stage_group
from titanlite.parallel.parallelize import parallelize
from titanlite.registry.family import Family
from titanlite.transforms import float8
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.initialize import initialize

log = logging.getLogger("titanlite")


def build_model(family: Family, config: Config, mesh: DeviceMesh, device: torch.device) -> Decoder:
    """The model on `mesh` with its initial weights; no rank ever holds more than its own shard."""
    model = parallelize(family, config, mesh, device)
    initialize(model, family, config.training.seed, device, config.parallelism.cpu_offload)
    return model


@phase("building the model")
def begin_training(
    family: Family, config: Config, mesh: DeviceMesh, device: torch.device
) -> tuple[Decoder, torch.optim.Optimizer, LossScale | None]:
    """The model with its initial weights, an optimizer that has its state, and the loss scale of float16."""
    teacher = load_teacher(config, mesh, device)  # first: the compiler's settings are then those of the trained model
    model, precision = build_model(family, config, mesh, device), config.training.mixed_precision_param
    model.teacher = teacher
    # a pipeline's stage may have none, but all ranks create the same process groups
    if routers_of(model) or (mesh["pp"].size() > 1 and routers_of(family.on_meta())):
        batch, together = config.global_batch(data_degree(mesh)), stage_group(mesh)
        balance.balance_experts(model, config, batch, sequence_mesh(mesh), mesh["tp"], together)
    at(0, "creating the optimizer state")
    optimizer = build_optimizer(model, config.optimizer, DTYPES[precision], group=stage_group(mesh))
    ema.attach(optimizer, config.optimizer.ema_decay)
    loss_scale = LossScale(device) if precision == "float16" else None
    if loss_scale is not None and isinstance(model.head, Head):
        model.head.scale = loss_scale.scale  # updated in place
    return model, optimizer, loss_scale


def forward_backward(model: Decoder, batch: Batch, mesh: DeviceMesh, loss_scale: LossScale | None = None) -> StepLoss:
    """Gradients of the step's loss, accumulated over microbatches; without labels they are 0, except those of balance losses.

    batch: this rank's part of the global batch. loss_scale: of float16; the gradients are then those of the loss times
    `loss_scale.divisor`.
    """
    counted = count_labels(batch, mesh)
    labels, known = counted.clamp(min=1), None if batch.counted is None else counted
    depths = [*further_of(model).values()]
    of_depths = count_further(batch, mesh, len(depths)).clamp(min=1) if depths else None  # their labels
    if loss_scale is not None:
        loss_scale.divisor = loss_scale.scale * labels
    share, further = (torch.zeros((), device=batch.tokens.device) for _ in range(2))
    microbatches = batch.microbatches()
    balance.begin_step(model)
    if model.pipeline is not None:  # it begins a microbatch before the backward pass of earlier ones
        divisor = labels if loss_scale is None else 1 / loss_scale.scale
        losses = model.pipeline.train([to_microbatch(model, each) for each in microbatches], divisor)
        return StepLoss(losses.sum() / labels, known, further)
    for number, microbatch in enumerate(microbatches, 1):
        choose_reductions(model, last=number == len(microbatches))
        if of_depths is None:
            summed = summed_loss(model, microbatch)
        else:
            summed, sums = summed_loss_with_further(model, microbatch)
            mean = (sums / of_depths).mean()
            further += mean.detach()
            summed = summed + depths[0].weight * labels * mean
        loss = summed / labels
        (loss if loss_scale is None else summed * loss_scale.scale).backward()
        share += loss.detach()
    check_reductions(model)
    return StepLoss(share, known, further)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    max_norm: float,
    loss_scale: LossScale | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """Clips the gradients, takes one optimizer step and clears them; returns the norm before clipping, () float32.

    Where that norm is not finite, a fused optimizer skips the step on the device, without a host sync, and the loss scale
    shrinks. labels: of `StepLoss`. Where there are none, every optimizer skips the step: otherwise momentum and weight decay
    would move the weights. An optimizer that is not fused needs a host sync for that.
    """
    pipeline = getattr(model, "pipeline", None)
    stages, tied = (pipeline.ranks, pipeline.tied) if pipeline else (1, None)
    norm = clip_gradients(optimizer, max_norm, loss_scale.divisor if loss_scale else None, stages, tied)
    set_lr(optimizer, lr)
    overflow = (~norm.isfinite()).float()
    skipped = overflow if labels is None else torch.maximum(overflow, (labels == 0).float().to(overflow.device))
    fused = optimizer.defaults["fused"]
    if fused:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
    if fused or labels is None or labels.item():
        optimizer.step()
    if average := ema.ema_of(optimizer):
        average.update(skipped)
    balance.move_biases(model, skipped)
    float8.measure_weights(model)
    if loss_scale is not None:
        loss_scale.update(overflow)
    optimizer.zero_grad()
    return norm


def warn_of_unused(model: nn.Module) -> None:
    """Names the trained parameters that the backward pass has not reached. They keep their values; own optimizers get zero
    gradients for them, and may decay them."""
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if unused:
        log.info("no gradient reaches %s: not used in the forward pass?", ", ".join(unused))
