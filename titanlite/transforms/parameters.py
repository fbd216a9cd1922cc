"""Parameters and linear layers of a model by name: the patterns of its tables, adapters, tied parameters."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from models.decoder import Decoder

_FURTHER = re.compile(r"^further\.(\d+)\.block\.")  # models/further.py
A, B = "lora_a", "lora_b"  # the parameters of an adapter, beside the weight of its linear layer


def match_table(table: dict[str, Any], names: list[str], what: str, whole: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The value of the first matching pattern for each name, and a list of faults.

    The block of an MTP module, further.L.block, is matched as layers.L. A name that no pattern matches is a fault. So is a
    pattern that matches no name, if they are all of a model: it is misspelt.
    """
    values: dict[str, Any] = {}
    used = set()
    for name in names:
        matches = [pattern for pattern in table if fnmatchcase(_FURTHER.sub(r"layers.\1.", name), pattern)]
        used.update(matches)
        if matches:
            values[name] = table[matches[0]]
    # one fault for all layers: layers.0.x, layers.1.x, ... are reported as layers.*.x
    unmatched = dict.fromkeys(every_layer(name) for name in names if name not in values)
    faults = [f"{what}: no pattern matches {name}" for name in unmatched]
    faults += [f"{what}: the pattern {pattern!r} matches nothing" for pattern in table if whole and pattern not in used]
    return values, faults


def match_scale(
    table: Mapping[str, float], names: list[str], what: str, whole: bool = True
) -> tuple[dict[str, float], list[str]]:
    """The factor of the first matching pattern for each name, 1 without one, and a list of faults, as of `match_table`."""
    factors, faults = match_table({**table, "**": 1.0}, names, what, whole)
    for pattern, factor in table.items():
        if not isinstance(factor, int | float) or not 0 < factor < math.inf:
            faults.append(f"{what}: the pattern {pattern!r} has {factor!r}; it must be a number greater than 0")
    return factors, faults


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks, and of MTP modules, by name, one in blocks where a fork gives a layer several.

    Only nn.Linear: a subclass may compute anything.
    """
    found: dict[nn.Linear, str] = {}
    for name, each in model.named_modules(remove_duplicate=False):
        if type(each) is nn.Linear and in_blocks(name):
            found.setdefault(each, name)
    return {name: each for each, name in found.items()}


def in_blocks(name: str) -> bool:
    """Whether a module or parameter is part of a block or of an MTP module, and not of embedding or head."""
    return name.startswith(("layers.", "further."))


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters -> their name in checkpoints."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    all_names = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in all_names if first[parameter] != name}


@contextlib.contextmanager
def keeping_ties(model: nn.Module) -> Iterator[None]:
    """Parameters that are one before are one afterwards too, where what happens meanwhile replaces them name by name."""
    tied = tied_names(model)
    yield
    for name, first in tied.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_parameter(last, model.get_parameter(first))


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives a meta-device model memory, without values."""
    with keeping_ties(model):
        model.to_empty(device=device)


def is_tied(model: Decoder) -> bool:
    """Whether the head's output projection is a parameter of the embedding. A fork's embedding may have several."""
    if model.embed is None or model.head is None:
        return False
    return any(parameter is model.head.output.weight for parameter in model.embed.parameters())


def is_adapter(name: str) -> bool:
    """Whether a tensor of a model or a checkpoint is part of an adapter, as "model.layers.0.ffn.w1.lora_b"."""
    return name.rpartition(".")[2] in (A, B)


def every_layer(name: str) -> str:
    """The name with its layer's number replaced by a star."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
