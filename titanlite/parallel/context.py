"""Context parallelism: each sequence is split over ranks. models/split.py has the two methods; this file checks them.

Everything but attention computes each token by itself, and runs unchanged on this rank's tokens. Labels, positions and
documents are made from the whole sequence before it is split (loop/loss.py). `AttentionCore.core` communicates keys or heads.
"""

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.attention import AttentionCore
from models.decoder import Decoder
from titanlite.config.schema import Config


def apply_context_parallel(model: Decoder, config: Config, cp: DeviceMesh) -> None:
    """Makes the loss split sequences over `cp`, if that has several ranks."""
    model.context = (cp, config.parallelism.context_parallel_method) if cp.size() > 1 else None


def faults(config: Config, model: Decoder) -> Iterator[str]:
    """Models whose sequences cannot be split: blocks with another attention, heads that do not divide."""
    ranks, method = config.parallelism.context_parallel_degree, config.parallelism.context_parallel_method
    if ranks == 1:
        return
    if reason := unsplittable(model):
        yield f"parallelism.context_parallel_degree = {ranks}: in {config.model.name}, {reason}; set it to 1"
    tensor = config.parallelism.tensor_parallel_degree
    cores = [each for each in model.modules() if isinstance(each, AttentionCore)]
    heads = {count for each in cores for count in (each.n_heads, each.n_kv_heads)}
    if method == "ulysses" and (undivided := sorted(count for count in heads if count % (tensor * ranks))):
        yield (
            f'parallelism.context_parallel_method = "ulysses": {tensor} x {ranks} ranks (tensor x context parallel) do not '
            f'divide {" and ".join(map(str, undivided))} heads of {config.model.title}; use "gather"'
        )


def unsplittable(model: Decoder) -> str:
    """Why a model's sequences cannot be split; "" if they can.

    Each block must have the attention that communicates, and no other. A block that mixes tokens elsewhere too is not
    found here; it differs in `titanlite check-model`.
    """

    def communicates(block: nn.Module) -> bool:
        cores = {type(each).core for each in block.modules() if isinstance(each, AttentionCore)}
        return cores == {AttentionCore.core}  # one beside it would mix only what this rank has

    without = [f"layers.{name}" for name, block in model.layers.items() if not communicates(block)]
    if not without:
        return ""
    verb = "does" if len(without) == 1 else "do"
    return (
        f"{', '.join(without)} {verb} not use AttentionCore.core of models/attention.py for all attention; no other "
        "attention gets keys and values from other ranks"
    )
