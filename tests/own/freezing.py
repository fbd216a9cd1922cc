"""A hook that freezes a parameter and runs the model, for tests/own/test_own_code.py."""

import torch

from models.attention import SeqInfo


def after_building(model, config):
    model.embed.weight.requires_grad_(False)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():  # without a backward pass, FSDP2 keeps the head's weights gathered
        model.head(model(tokens, SeqInfo(torch.arange(8)[None])), tokens)
