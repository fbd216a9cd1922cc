"""The names of a model's tensors in a checkpoint."""

from torch import Tensor, nn


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model by their names in a checkpoint; a tied parameter once."""
    persistent = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"model.{name}": tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}
