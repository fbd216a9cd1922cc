"""A hook that trains the embedding from the second step on, for tests/own/test_own_code.py."""


def before_step(step, model, optimizer):
    model.embed.weight.requires_grad_(step > 1)
