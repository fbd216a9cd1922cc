"""A hook that freezes a parameter, for tests/own/test_own_code.py."""


def after_building(model, config):
    model.embed.weight.requires_grad_(False)
