"""The one exception that means: the user can correct this."""

from collections.abc import Iterable


class UserError(ValueError):
    """A fault in the user's input: a key, a file, a model module, a mesh that does not fit the machine.

    Its text says what is wrong, what is allowed and, if there is a guess, what was meant. Commands print the text without a
    traceback and exit with code 2. Any other exception is a defect of titanlite. Only `on_ranks` of the tools makes one of any
    exception, since the user's model runs there.
    """


class MachineFault(str):
    """A fault of a configuration that another machine may not have, such as one with a GPU."""


def listed(title: str, faults: Iterable[object], remedy: str = "") -> str:
    """The text of a UserError with a line for each fault."""
    return "\n".join([title, *(f"  {fault}" for fault in faults), *([remedy] if remedy else [])])
