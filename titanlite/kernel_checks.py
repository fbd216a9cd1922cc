"""What must hold for kernels that are asked for by name, as far as it can be known before any process starts."""

from collections.abc import Iterator

import torch

from titanlite.attention import attention_faults
from titanlite.config import Config
from titanlite.errors import UserError
from titanlite.zoo import family_of


def kernel_faults(config: Config) -> Iterator[str]:
    """What is in the way of the kernels that a configuration asks for; sentences for `checks.check`."""
    try:
        family = family_of(config.model)
    except UserError:
        return  # reported by checks.py
    yield from _overlap_faults(config)
    yield from attention_faults(config, family)


def _overlap_faults(config: Config) -> Iterator[str]:
    keys, key = config.compile, "parallelism.enable_async_tensor_parallel = true"
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if config.parallelism.tensor_parallel_degree == 1:
        yield f"{key}: has no effect with parallelism.tensor_parallel_degree = 1; set it to false"
    elif not torch.cuda.is_available():
        yield f"{key}: needs CUDA: GPUs that reach each other's memory; set it to false"
    elif not (keys.enable and "model" in keys.components and keys.backend == "inductor"):
        yield (
            f'{key}: it is inductor that overlaps; it needs compile.enable = true with "model" among compile.components and '
            'compile.backend = "inductor"'
        )
