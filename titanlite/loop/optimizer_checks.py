"""What must hold between the optimizer, the precision that it keeps, and the machine."""

from collections.abc import Iterator

import torch

from titanlite.config.schema import Config, Optimizer


def optimizer_faults(config: Config) -> Iterator[str]:
    """One sentence for each pair of keys that cannot go together, or of which one has no effect."""
    keys = config.optimizer
    if keys.name == "Muon":
        yield from _muon_faults(config)
    else:
        for name in ("momentum", "nesterov", "ns_steps"):
            value = getattr(keys, name)
            if value != getattr(Optimizer(), name):
                yield f'optimizer.{name} = {value!r}: has no effect with optimizer.name = "{keys.name}", only with "Muon"'
    if config.training.dtype == "bfloat16" or keys.name == "Muon":
        yield from _compiler_faults(config)
    if config.training.dtype == "bfloat16":
        yield from _bfloat16_faults(config)
    elif keys.rounding != Optimizer().rounding:
        yield (
            f'optimizer.rounding = "{keys.rounding}": has no effect with training.dtype = "float32", where nothing '
            'is rounded; set training.dtype = "bfloat16" or leave it out'
        )


def _muon_faults(config: Config) -> Iterator[str]:
    if config.lora.enable:
        yield (
            'optimizer.name = "Muon": orthogonalises the matrices of the blocks, which lora.enable = true freezes; the two '
            'factors of an adapter are no such matrices; use "AdamW"'
        )
    if config.parallelism.cpu_offload:
        yield (
            'optimizer.name = "Muon": with parallelism.cpu_offload = true the CPU would multiply whole matrices, three times '
            'optimizer.ns_steps a step; use "AdamW", or no offload'
        )


def _bfloat16_faults(config: Config) -> Iterator[str]:
    training, keys = config.training, config.optimizer
    if training.mixed_precision_param != "bfloat16":
        yield (
            f'training.mixed_precision_param = "{training.mixed_precision_param}": with training.dtype = "bfloat16" no '
            'parameter has more to compute with; set it to "bfloat16", or training.dtype to "float32"'
        )
    if config.lora.enable:
        yield (
            'training.dtype = "bfloat16": with lora.enable = true the frozen weights are kept in '
            'training.mixed_precision_param, and the few that are trained in float32; set it to "float32"'
        )
    if keys.implementation == "foreach":
        yield (
            'optimizer.implementation = "foreach": with training.dtype = "bfloat16" there are "fused", one compiled kernel a '
            'parameter, and "for-loop", one kernel an operation'
        )


def _compiler_faults(config: Config) -> Iterator[str]:
    on_cpu = config.parallelism.cpu_offload or not torch.cuda.is_available()
    if config.optimizer.implementation == "fused" and on_cpu and not has_compiler():
        which = 'optimizer.name = "Muon"' if config.optimizer.name == "Muon" else 'training.dtype = "bfloat16"'
        yield (
            f'optimizer.implementation = "fused": with {which} its kernel is compiled, which needs a C++ compiler on a CPU, '
            'and none is found; install g++ or clang, or set it to "for-loop"'
        )


def has_compiler() -> bool:
    """Whether inductor finds one for CPUs, by the rules of its own."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports much, and is seldom needed
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False
