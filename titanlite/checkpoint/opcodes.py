"""What a pickle may hold, so that reading it takes time and memory in proportion to its size.

A pickle is a program, and classes are not its only danger: 839 bytes of tuples within tuples are hashed 2^200 times, ten bytes
claim a memo of 2^32 entries, and a tuple that is copied at each reference grows as the square. `check` follows the opcodes,
with the sizes of values in place of values. It admits the opcodes that the metadata of a checkpoint needs, under one rule: a
tuple, and what is referenced again, has few parts. So what is read is a tree of about as many parts as there are opcodes.
"""

import pickletools
from pickle import UnpicklingError

_PARTS = 100  # of a tuple with all that is in it, or of what is made from one; the largest in metadata has 9
_GROWS = _PARTS + 1  # the parts of a list, a table or an object, which may get more: never within a tuple or referenced again
_TEXT = 2**16  # characters; the name of a tensor has a hundred

_PUSHED = {  # opcode -> the parts of the value that it pushes
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "BININT", "BININT1", "BININT2", "LONG1"), 1),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), 1),
    **dict.fromkeys(("EMPTY_DICT", "EMPTY_LIST"), _GROWS),
}
_POPPED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_UP_TO_MARK = ("TUPLE", "APPENDS", "SETITEMS")


def check(content: bytes) -> None:
    """Raises UnpicklingError for a pickle that could take more; ValueError or IndexError for what is none."""
    stack: list[int] = []  # the parts of each value
    marks: list[int] = []  # heights of the stack
    memo: list[int] = []
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in _PUSHED:
            if (isinstance(argument, int) and abs(argument) >= 2**63) or (isinstance(argument, str) and len(argument) > _TEXT):
                raise UnpicklingError(f"it has a number of more than 63 bits, or a text of more than {_TEXT:,} characters")
            stack.append(_PUSHED[name])
        elif name in ("BINGET", "LONG_BINGET"):
            assert argument is not None
            stack.append(_few(memo[argument]))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _POPPED or name in _UP_TO_MARK:
            height = marks.pop() if name in _UP_TO_MARK else len(stack) - _POPPED[name]
            parts, stack[height:] = sum(stack[height:]), []
            if name.startswith("TUPLE"):
                stack.append(_few(parts + 1))
        elif name in ("STACK_GLOBAL", "REDUCE", "NEWOBJ"):  # a class by its names; a value or an object by class and arguments
            parts = stack.pop() + stack.pop()
            stack.append(_GROWS if name == "NEWOBJ" else _few(parts))
        elif name == "BUILD":  # sets attributes
            stack.pop()
            if stack[-1] != _GROWS:
                raise UnpicklingError("it changes a value that others may share")
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise UnpicklingError(f"it has the opcode {name}, which no titanlite checkpoint has")


def _few(parts: int) -> int:
    if parts > _PARTS:
        raise UnpicklingError(f"it has a tuple, or references a value, of more than {_PARTS} parts")
    return parts
