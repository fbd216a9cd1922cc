"""What of a run is a tensor, under the names that it has in checkpoints."""

from typing import Any

from torch import Tensor, nn

from titanlite.loss_scale import LossScale
from titanlite.optimizer import named_state


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model under the names they have in a checkpoint; a tied one once."""
    persistent = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {f"model.{name}": tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def run_tensors(model: nn.Module, optimizer: Any, loss_scale: LossScale | None) -> dict[str, Tensor]:
    """Everything of a run that is a tensor: the parameters, the optimizer's moments, and in float16 the loss scale."""
    moments = {f"optimizer.{name}": tensor for name, tensor in named_state(optimizer, model).items()}
    return model_tensors(model) | moments | (loss_scale.tensors() if loss_scale else {})
