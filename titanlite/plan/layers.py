"""Which layers of a model are run to predict all of them: those that differ in what they are or in what surrounds them."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from models.attention import AttentionCore
from models.decoder import Decoder
from models.moe import Experts
from titanlite.config.schema import Config
from titanlite.ground.torch_private import tree_flatten
from titanlite.registry.family import Family
from titanlite.transforms.meta import on_meta, run_forward

_PLAIN = (bool, int, str, type(None))


class Layers(NamedTuple):
    """The layers to run, by name and in the order of the model."""

    # Every layer of the model has an equal in `few`, which comes between equals of its neighbors.
    few: tuple[str, ...]
    stands_for: dict[str, str]  # each layer of the model -> its equal in `few`
    same: list[list[str]]  # the layers of each kind of parameters

    @classmethod
    def of(cls, model: Decoder, family: Family, config: Config) -> "Layers":
        """model: the whole model, as it is run. What a layer does is found from its modules and from its arguments."""
        names = list(model.layers)
        given, _ = run_kinds(on_meta(family, config), config.training.seq_len)
        kinds = [(_modules(model.layers[name]), _parameters(model.layers[name]), given[name]) for name in names]
        # FSDP gathers so many layers ahead, and frees a layer's buffers while the next one runs.
        few, equals = _shortest(kinds, max(1, config.parallelism.fsdp_prefetch))
        same: dict[Hashable, list[str]] = {}
        for name, (_, parameters, _) in zip(names, kinds, strict=True):
            same.setdefault(parameters, []).append(name)
        stands_for = {name: names[equal] for name, equal in zip(names, equals, strict=True)}
        return cls(tuple(names[index] for index in few), stands_for, list(same.values()))

    def times(self, name: str) -> int:
        """How many layers of the model this one of `few` stands for."""
        return [*self.stands_for.values()].count(name)


def run_kinds(model: Decoder, seq_len: int) -> tuple[dict[str, Hashable], dict[str, Counter[str]]]:
    """Of each layer: what the model gives to it, such as a mask, by types and shapes, and `used` of its calls together.

    It is a forward pass without memory that runs one layer of each kind. model: on the meta device, for nothing else.
    """
    given: dict[str, Hashable] = {}
    uses: dict[str, Counter[str]] = {name: Counter() for name in model.layers}
    results: dict[Hashable, tuple[Any, Counter[str]]] = {}

    def run(name: str, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        modules = _modules(layer), _parameters(layer)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            values, structure = tree_flatten((args, kwargs))
            given[name] = str(structure), tuple(map(_shape, values))
            kind = modules, given[name]
            if kind not in results:
                with used(layer) as own:
                    results[kind] = forward(*args, **kwargs), own
            result, own = results[kind]
            uses[name].update(own)
            return result

        return recorded

    for name, layer in model.layers.items():
        layer.forward = run(name, layer, layer.forward)
    run_forward(model, 1, seq_len)
    return given, uses


@contextmanager
def used(layer: nn.Module) -> Iterator[Counter[str]]:
    """By name in the layer: how often linear layers and attention are called, and to how many experts a token goes."""
    uses: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        def noted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            if isinstance(module, Experts):
                uses[name] += (kwargs["chosen"] if "chosen" in kwargs else args[2]).shape[1]
            else:
                uses[name] += 1

        return noted

    watched = [(name, each) for name, each in layer.named_modules() if isinstance(each, nn.Linear | AttentionCore | Experts)]
    hooks = [each.register_forward_hook(note(name), with_kwargs=True) for name, each in watched]
    yield uses
    for hook in hooks:
        hook.remove()


def _shape(value: Any) -> Any:
    """What a value may change of a layer's memory and work. An integer, such as a window or a number of the layer, counts."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_shape, value))
    if isinstance(value, float):  # a scale changes no shape, but 0 can leave something out
        return bool(value)
    return value if isinstance(value, _PLAIN) else type(value)


def _modules(layer: nn.Module) -> Hashable:
    """Classes of a layer and its modules, and attributes such as a window; `forward` is one where the layer is recomputed."""
    return tuple(
        (name, type(module), tuple((key, _shape(value)) for key, value in vars(module).items() if not key.startswith("_")))
        for name, module in layer.named_modules()
    )


def _parameters(layer: nn.Module) -> Hashable:
    """Shapes, precisions and placements of a layer's parameters and buffers."""
    return tuple(
        (name, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.placements if isinstance(tensor, DTensor) else None)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]
    )


def _shortest(kinds: list[Any], reach: int) -> tuple[list[int], list[int]]:
    """(indices of a shorter sequence, for each index the one in it that has the same kind and the same neighbors).

    reach: how many neighbors on each side. Every stretch between two indices with the same surroundings is left out, if what
    occurs in it occurs elsewhere: after that cut, all that remain have the neighbors that they had.
    """
    number = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    padded = [-1] * reach + [number[kind] for kind in kinds] + [-1] * reach
    seams = [tuple(padded[index : index + 2 * reach]) for index in range(len(kinds) + 1)]
    contexts = [tuple(padded[index : index + 2 * reach + 1]) for index in range(len(kinds))]
    indices, start = list(range(len(kinds))), 0
    while start < len(indices):
        for end in range(len(indices) - 1, start, -1):
            cut = seams[indices[start]] == seams[indices[end]]
            if cut and {contexts[p] for p in indices[start:end]} <= {contexts[p] for p in indices[:start] + indices[end:]}:
                del indices[start:end]
                break
        else:
            start += 1
    equal = {contexts[index]: index for index in indices}
    return indices, [equal[context] for context in contexts]
