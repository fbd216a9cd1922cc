"""The names of a model's tensors in a checkpoint."""

from torch import Tensor, nn


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model by their names in a checkpoint; a tied parameter once."""
    stored = model.state_dict()  # which has tied parameters twice, and no buffers that are not persistent
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    return {f"model.{name}": stored[name] for name in names if name in stored}
