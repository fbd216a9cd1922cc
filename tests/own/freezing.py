"""Hooks that freeze parameters and run the model, for tests/own/test_own_code.py."""

import torch

from models.attention import SeqInfo

LATER = 9  # the first step that trains some norms


def after_building(model, config):
    model.embed.weight.requires_grad_(False)
    run(model)


def before_step(step, model, optimizer):
    for name, p in model.named_parameters():
        if name.endswith("ffn_norm.weight"):
            p.requires_grad_(step >= LATER)


def after_step(step, model, optimizer):
    run(model)


def run(model):
    """Without a backward pass, for which FSDP2 keeps the head's weights gathered."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        model.head(model(tokens, SeqInfo(torch.arange(8)[None])), tokens)
