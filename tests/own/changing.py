"""A hook that changes weights, for tests/own/test_own_code.py."""


def after_step(step, model, optimizer):
    for name, p in model.named_parameters():
        if step == 1 and name.startswith("layers.1."):
            p.data.mul_(8.0)
        if step == 1 and name == "layers.0.ffn.w1.weight":
            p.data.zero_()
