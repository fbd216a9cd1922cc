"""Hooks that record their calls and change weights; for tests/own/test_own_code.py."""

CALLS: list[str] = []


def after_building(model, config):
    CALLS[:] = [f"after_building {model.training}"]


def before_step(step, model, optimizer):
    CALLS.append(f"before_step {step}")


def after_step(step, model, optimizer):
    CALLS.append(f"after_step {step}")
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.fill_(0.75)


def at_report(step, values):
    CALLS.append(f"at_report {step} {'loss' in values}")
    return {"calls": len(CALLS), "not_finite": float("nan"), "nothing": (0.0, 0)}


def at_save(step, folder):
    CALLS.append(f"at_save {step} {folder.name}")
