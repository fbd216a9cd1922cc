"""Loss on text that is not trained on: the same samples in every pass and on every mesh, with the training's own loss."""

import math

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from models.decoder import Decoder
from models.head import IGNORE
from titanlite.config.schema import Config
from titanlite.data.batch import Batch, to_batch
from titanlite.data.mixture import PADDING, Data
from titanlite.data.tokenizer import LoadedTokenizer
from titanlite.inference.generate import Sampling, continue_texts
from titanlite.loop.loss import summed_losses
from titanlite.optim.ema import Ema
from titanlite.parallel.fsdp import evaluating
from titanlite.parallel.mesh import DATA_DIMENSIONS, LOSS_DIMENSIONS, data_degree, data_rank, sum_over


def validate(
    model: Decoder,
    data: Data,
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    average: Ema | None = None,
    kind: str = "",
) -> dict[str, float | None]:
    """One pass over the first samples of each source; returns validation_loss (nats per token) and validation_bits_per_byte,
    None where there are no labels, or where they stand for no text.

    Several sources have their own values, such as validation_loss/web; values without a name are over all labels. All ranks
    make the same number of forward passes; after the last sample they get padding, whose labels do not count.
    average: measured in a second pass, as validation_loss_ema. kind: follows "validation_loss" in names.
    """
    lengths = torch.from_numpy(data.byte_lengths).to(device)
    sums = torch.zeros(len(data.sources), 3, dtype=torch.float64, device=device)  # loss, labels, bytes
    with evaluating(model):
        for source, total in enumerate(sums):
            for batch in range(pass_length(data, source, config, data_degree(mesh))):
                part = part_of_batch(data, source, config, batch, data_rank(mesh), data_degree(mesh)).to(device)
                microbatches = part.microbatches()
                for microbatch, loss in zip(microbatches, summed_losses(model, microbatches), strict=True):
                    labels = microbatch.labels()
                    counted = labels != IGNORE
                    text = lengths[torch.where(counted, labels, 0)] * counted
                    total += torch.stack([loss.double(), counted.sum().double(), text.sum().double()])
    losses, counts = sum_over(LOSS_DIMENSIONS, sums[:, :1].clone(), mesh), sum_over(DATA_DIMENSIONS, sums[:, 1:].clone(), mesh)
    sums = torch.cat([losses, counts], dim=1).cpu()
    values = _measured(kind, sums.sum(0))
    if len(data.sources) > 1:
        for each, total in zip(data.sources, sums, strict=True):
            values |= _measured(f"{kind}/{each.name}", total)
    if average:
        with average.in_place(model):
            values |= validate(model, data, config, mesh, device, kind="_ema")
    return values


def sample_texts(model: Decoder, config: Config, tokenizer: LoadedTokenizer) -> list[str]:
    """What the model writes after each of validation.sample_prompts; all ranks together."""
    cfg, sampling = config.validation, Sampling(seed=config.training.seed)
    return continue_texts(model, tokenizer, cfg.sample_prompts, cfg.sample_tokens, sampling)


def _measured(suffix: str, total: torch.Tensor) -> dict[str, float | None]:
    loss, labels, text = total.tolist()
    bits = loss / math.log(2) / text if text else None
    return {f"validation_loss{suffix}": loss / labels if labels else None, f"validation_bits_per_byte{suffix}": bits}


def pass_length(data: Data, source: int, config: Config, parts: int) -> int:
    """Batches of a source in a pass: `validation.steps`, or fewer if it has fewer samples."""
    every = math.ceil(data.sources[source].samples / config.global_batch(parts))
    return every if config.validation.steps == -1 else min(config.validation.steps, every)


def part_of_batch(data: Data, source: int, config: Config, batch: int, part: int, parts: int) -> Batch:
    """One rank's part of a batch, (microbatches, local_batch, ...); padding after the last sample."""
    size = config.global_batch(parts)
    share = size // parts
    first = batch * size + part * share
    samples = np.arange(first, first + share)
    samples[samples >= data.sources[source].samples] = PADDING
    return to_batch(data.read(np.full(share, source), samples), config.training.local_batch_size)
