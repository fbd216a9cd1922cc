"""Context parallelism: each sequence is split over ranks. models/split.py has the two methods; here are their faults.

Everything but attention works on single tokens, and runs on this rank's tokens as it is. Labels, positions and documents are
made from the whole sequence before it is split (loop/loss.py), and `AttentionCore.core` communicates keys or heads.
"""

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.attention import AttentionCore
from models.decoder import Decoder
from titanlite.config.schema import Config


def apply_context_parallel(model: Decoder, config: Config, cp: DeviceMesh) -> None:
    """Makes the loss split sequences over `cp`, unless that has one rank."""
    model.context = (cp, config.parallelism.context_parallel_method) if cp.size() > 1 else None


def faults(config: Config, model: Decoder) -> Iterator[str]:
    """Models whose sequences cannot be split: blocks with another attention, heads that do not divide, forced tiles."""
    ranks, method = config.parallelism.context_parallel_degree, config.parallelism.context_parallel_method
    if ranks == 1:
        return
    key = f"parallelism.context_parallel_degree = {ranks}"
    cores = {name: [*filter(_communicates, block.modules())] for name, block in model.layers.items()}
    if without := [name for name, found in cores.items() if not found]:
        yield (
            f"{key}: layers.{', layers.'.join(without)} of {config.model.name} do not use AttentionCore.core of "
            "models/attention.py, which alone gets what one token reads of another from the rank that has it; set it to 1"
        )
    tensor = config.parallelism.tensor_parallel_degree
    heads = {count for found in cores.values() for each in found for count in (each.n_heads, each.n_kv_heads)}
    if method == "ulysses" and (undivided := sorted(count for count in heads if count % (tensor * ranks))):
        yield (
            f'parallelism.context_parallel_method = "ulysses": {tensor} x {ranks} ranks (tensor x context parallel) do not '
            f'divide {" and ".join(map(str, undivided))} heads of {config.model.title}; use "gather"'
        )
    if method == "gather" and config.model.attention == "tiles":
        yield 'model.attention = "tiles": has no mask, which parallelism.context_parallel_method = "gather" needs; use "auto"'


def _communicates(module: nn.Module) -> TypeGuard[AttentionCore]:
    return isinstance(module, AttentionCore) and type(module).core is AttentionCore.core
