"""`[[optimizer.groups]]`: finds the entry of each parameter, and freezes parameters.

Patterns are globs, as in a family's tables and in `lora.modules`. Names are dotted paths, whose dots a regular expression would
have to escape, and for a misspelt glob the nearest name can be suggested. A star also matches dots.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from titanlite.config.read import suggest
from titanlite.config.schema import Group
from titanlite.ground.errors import UserError
from titanlite.transforms.parameters import every_layer

DEFAULT = Group(pattern="*")  # of parameters that no entry matches


def group_of(name: str, groups: Iterable[Group]) -> Group:
    """The first entry whose pattern matches a parameter's name."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), DEFAULT)


def apply_groups(model: nn.Module, groups: Sequence[Group]) -> None:
    """Freezes what the entries freeze, in place: on the meta device, so that no later step makes a gradient, a reduction or
    optimizer state for it.

    Raises UserError that lists the entries without effect: those that match no trained parameter that an earlier entry has
    left, and those with values for parameters that they freeze. Also where nothing is left to train.
    """
    if not groups:
        return
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    faults, first = [], {name: group_of(name, groups) for name in trained}
    for number, group in enumerate(groups, 1):
        where = f'optimizer.groups, entry {number}: pattern = "{group.pattern}"'
        if not any(each is group for each in first.values()):
            faults.append(f"{where}: {_why_nothing(group.pattern, trained, model)}")
        if group.frozen and (group.lr, group.weight_decay) != (DEFAULT.lr, DEFAULT.weight_decay):
            faults.append(f"{where}: lr and weight_decay have no effect with frozen = true")
    if faults:
        raise UserError("\n".join(faults))
    frozen = {name for name, group in first.items() if group.frozen}
    if frozen == trained.keys():
        raise UserError("optimizer.groups: freezes every trained parameter; nothing is left to train")
    for name in frozen:
        trained[name].requires_grad_(False)


def _why_nothing(pattern: str, trained: dict[str, nn.Parameter], model: nn.Module) -> str:
    """Why a pattern leaves an entry without effect."""
    if any(fnmatchcase(name, pattern) for name in trained):
        return "earlier entries match all of its parameters, and the first match counts; move it up"
    if any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
        return "all of its parameters are frozen already"
    kinds = list(dict.fromkeys(every_layer(name) for name in trained))
    return f"matches no parameter{suggest(every_layer(pattern), kinds)}"
