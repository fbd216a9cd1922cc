"""The operations of parts of a model on a simulated GPU: generation with a cache, the loss, and the router of an MoE layer.

    LD_PRELOAD=noop_cuda.so python -m tests.cuda_shim.operations

prints a JSON object: {part: [operation, ...]}.
"""

import json
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_shim import pretend

pretend.install()

from models.attention import Cache, SeqInfo  # noqa: E402  # after install
from models.llama3 import FLAVORS, Model  # noqa: E402
from models.moe import Router  # noqa: E402


class _Operations(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def main() -> None:
    found = {}
    with torch.device("meta"):
        model, router = Model(FLAVORS["debug"]).bfloat16(), Router(64, 8, 2, logit_bias=True).bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), pretend.DEVICE:
        model.to_empty(device=pretend.DEVICE)
        cache = Cache()
        for part, positions in {"prefill": range(40), "one token": range(40, 41)}.items():
            places = torch.arange(positions.start, positions.stop).expand(3, -1)
            cache.reserve(positions.stop)
            with torch.no_grad(), _Operations() as operations:
                model(torch.zeros_like(places), SeqInfo(places, cache=cache))
            found[part] = operations.names
        hidden = torch.zeros(1, 64, model.config.dim, dtype=torch.bfloat16, requires_grad=True)
        with _Operations() as operations:
            model.head(hidden, torch.zeros(1, 64, dtype=torch.int64))
        found["loss"] = operations.names
        router.to_empty(device=pretend.DEVICE)
        x = torch.zeros(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        with _Operations() as operations:
            router(x)[0].sum().backward()
        found["router"] = operations.names
    print(json.dumps(found))


if __name__ == "__main__":
    main()
