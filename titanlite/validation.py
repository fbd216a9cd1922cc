"""Loss on text that is not trained on: the same samples at every round and on every mesh, by the training's own loss."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from models.blocks import IGNORE
from titanlite.config import Config
from titanlite.data.batches import count_samples
from titanlite.data.tokens import TokenData
from titanlite.loss import summed_loss
from titanlite.mesh import data_degree, data_rank, sum_over_data


@torch.no_grad()
def validate(model: nn.Module, data: TokenData, config: Config, mesh: DeviceMesh, device: torch.device) -> dict[str, float]:
    """One round over the first samples of the data; -> validation_loss (nats a token) and validation_bits_per_byte.

    Every rank makes as many forward passes as every other; where samples run out, it is given labels that do not count.
    """
    lengths = torch.from_numpy(data.byte_lengths).to(device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, labels, bytes
    model.eval()
    for batch in range(rounds(data, config, data_degree(mesh))):
        for tokens in part_of_batch(data, config, batch, data_rank(mesh), data_degree(mesh)).to(device):
            labels = tokens[:, 1:]
            counted = labels != IGNORE
            text = lengths[torch.where(counted, labels, 0)] * counted
            sums += torch.stack([summed_loss(model, tokens).double(), counted.sum().double(), text.sum().double()])
    model.train()
    for module in model.modules():  # what is kept for a backward pass that does not come
        if isinstance(module, FSDPModule):
            module.reshard()
    loss, labels, text = sum_over_data(sums, mesh).tolist()
    return {"validation_loss": loss / labels, "validation_bits_per_byte": loss / math.log(2) / text}


def rounds(data: TokenData, config: Config, parts: int) -> int:
    """How many batches a round has: `validation.steps`, or fewer where the data ends before."""
    every = math.ceil(count_samples(data, config.training.seq_len) / config.global_batch(parts))
    return every if config.validation.steps == -1 else min(config.validation.steps, every)


def part_of_batch(data: TokenData, config: Config, batch: int, part: int, parts: int) -> Tensor:
    """One rank's part of a batch, (microbatches, local_batch, seq + 1) int64; beyond the end of the data labels are IGNORE."""
    size, length = config.global_batch(parts), config.training.seq_len
    share = size // parts
    tokens = torch.full((share, length + 1), IGNORE)
    first = batch * size + part * share
    for row, sample in enumerate(range(first, min(first + share, count_samples(data, length)))):
        tokens[row] = torch.from_numpy(data.ids[sample * length : (sample + 1) * length + 1].astype(np.int64))
    return tokens.unflatten(0, (-1, config.training.local_batch_size))
