"""What must hold for kernels that are asked for by name, as far as it can be known before any process starts."""

import importlib.util
from collections.abc import Iterator

import torch

from titanlite.config.schema import Config, Float8
from titanlite.errors import UserError
from titanlite.parallel.tensor import styles_of
from titanlite.transforms.attention_kernels import attention_faults
from titanlite.transforms.float8 import MULTIPLE, linear_layers
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import Family, every_layer, family_of


def kernel_faults(config: Config) -> Iterator[str]:
    """What is in the way of the kernels that a configuration asks for; sentences for `checks.check`."""
    try:
        family = family_of(config.model)
    except UserError:
        return  # reported by checks.py
    yield from _overlap_faults(config)
    yield from attention_faults(config, family)
    yield from _float8_faults(config, family)


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


def _float8_faults(config: Config, family: Family) -> Iterator[str]:
    keys, precision = config.float8, config.training.mixed_precision_param
    if not keys.enable:
        for name, value in keys:
            if value != getattr(Float8(), name):
                yield f"float8.{name} = {value!r}: has no effect with float8.enable = false"
        return
    if importlib.util.find_spec("torchao") is None:
        yield "float8.enable = true: needs torchao, which is not installed: pip install 'titanlite[float8]'"
    yield from _float8_pairs(config)
    if not keys.emulate:
        least = (8, 9) if keys.recipe_name == "tensorwise" else (9, 0)
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < least:
            yield (
                f'float8.recipe_name = "{keys.recipe_name}": needs a GPU of compute capability {least[0]}.{least[1]} at least; '
                "float8.emulate = true computes the same, slowly, anywhere"
            )
        if precision != "bfloat16":
            yield f'float8.enable = true: needs training.mixed_precision_param = "bfloat16", not "{precision}"'
    elif precision == "float16":
        yield 'float8.enable = true: does not go with training.mixed_precision_param = "float16"; use "bfloat16"'
    tokens = config.training.local_batch_size * config.training.seq_len
    if tokens % MULTIPLE:
        yield (
            f"training.local_batch_size x training.seq_len = {tokens}: float8 multiplies multiples of {MULTIPLE} tokens; "
            "change one of them"
        )
    if not config.lora.enable:
        yield from _float8_sizes(config, family)


def _float8_pairs(config: Config) -> Iterator[str]:
    """Keys that float8 does not go with."""
    keys, parallelism = config.float8, config.parallelism
    if config.lora.enable:
        yield "float8.enable = true: adapters (lora.enable = true) do not multiply in float8; set one of them to false"
    if parallelism.enable_async_tensor_parallel:
        yield (
            "parallelism.enable_async_tensor_parallel = true: not together with float8.enable = true, whose products it would "
            "have to be proved for; set one of them to false"
        )
    if not keys.enable_fsdp_float8_all_gather:
        return
    key = "float8.enable_fsdp_float8_all_gather = true"
    if keys.recipe_name != "tensorwise":
        yield f'{key}: a row\'s scale is not known before the gather; float8.recipe_name must be "tensorwise"'
    if (tensor := parallelism.tensor_parallel_degree) > 1:
        yield (
            f"{key}: each of parallelism.tensor_parallel_degree = {tensor} ranks would scale its own part of a weight, which "
            "changes the mathematics; set it to false"
        )
    if isinstance(parallelism.fsdp_reshard_after_forward, int):
        yield f'{key}: parallelism.fsdp_reshard_after_forward must be "default", "always" or "never"'
    if parallelism.cpu_offload:
        yield f"{key}: parallelism.cpu_offload = true keeps weights where they are not cast; set one of them to false"


def _float8_sizes(config: Config, family: Family) -> Iterator[str]:
    """Layers whose share on a tensor-parallel rank float8 does not multiply, and patterns that match none."""
    tensor = config.parallelism.tensor_parallel_degree
    try:
        model = on_meta(family, config)
        layers = linear_layers(model, config)
    except UserError as error:
        yield from str(error).splitlines()
        return
    except Exception:  # whatever a user's module raises; checks.py tells where
        return
    styles = styles_of(model, family)[0]
    shares = {
        every_layer(name): each.out_features if styles.get(name) == "column" else each.in_features
        for name, each in layers.items()
        if tensor > 1 and styles.get(name) in ("column", "row")
    }
    for name, size in shares.items():
        if size % (MULTIPLE * tensor):
            yield (
                f"float8: of {name} parallelism.tensor_parallel_degree = {tensor} leaves each rank {size // tensor} of {size}; "
                f'float8 multiplies multiples of {MULTIPLE}; add "{name}" to float8.filter_fqns'
            )
