"""The names of a model's tensors in a checkpoint."""

from torch import Tensor, nn

WEIGHTS, AVERAGES = "model.", "ema."  # before a parameter's name
AVERAGE_UPDATES = "ema.updates"


def average_of(name: str) -> str:
    """The name of a weight's EMA. name: of the weight, in a checkpoint."""
    return AVERAGES + name.removeprefix(WEIGHTS)


def is_further(name: str) -> bool:
    """Whether a checkpoint's tensor is a weight of a module of training.predict_further, which only training has."""
    return name.startswith(f"{WEIGHTS}further.")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model by their names in a checkpoint; a tied parameter once."""
    stored = model.state_dict()  # which has tied parameters twice, and no buffers that are not persistent
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return {f"{WEIGHTS}{name}": stored[name] for name in names if name in stored}
