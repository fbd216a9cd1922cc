"""The faults of history.json: where each stands in the tree, and the text of that file with the fault in it.

A fault replaces a piece of a function, an expression or a statement. The function is found by its name, in whichever file it
is; the piece is compared as a syntax tree, so neither layout, nor comments, nor the code around it matter.
"""

import ast
import functools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HISTORY = Path(__file__).with_name("history.json")
_FOLDERS = ("titanlite", "models")


class Fault(NamedTuple):
    """A piece of a function and what stands there instead.

    function: `Class.method` or a function's name; what leads to it (`gemma3.RMSNorm.forward`, the end of a dotted path) only
    where several functions of that name have the piece. before, after: two expressions, or a statement and what replaces it.
    why: what the fault does. tests: files or tests that are tried, cheap ones first.

    The rest is of faults that another framework has had. source: where it was reported. named: a pattern of the part that a
    command should name, or of the number that is wrong where the fault is in no part of a model. verify: options for `titanlite
    verify`. model: the argument of `titanlite check-model`.
    """

    id: str
    function: str
    before: str
    after: str
    why: str
    tests: list[str]
    source: str = ""
    named: str = ""
    verify: str = ""
    model: str = ""


class _Function(NamedTuple):
    path: Path
    name: str  # dotted, with the module
    node: ast.AST


def read_faults() -> list[Fault]:
    return [Fault(**entry) for entry in json.loads(HISTORY.read_text(encoding="utf-8"))]


def with_fault(root: Path, fault: Fault) -> tuple[Path, str]:
    """The file of a tree that a fault changes, and its text with the fault. LookupError: it has not one place."""
    before, after = _expression(fault.before), _expression(fault.after)
    if before is None or after is None:
        before, after = ast.parse(fault.before).body[0], ast.parse(fault.after)
    functions = [each for each in _functions(root) if f".{each.name}".endswith(f".{fault.function}")]
    wanted = ast.dump(before)
    places = {
        (each.path, _span(node, each.path.read_bytes()))
        for each in functions
        for node in ast.walk(each.node)
        if type(node) is type(before) and ast.dump(node) == wanted
    }
    if len(places) != 1:
        raise LookupError(_advice(fault, [each.name for each in functions], len(places)))
    path, (begin, end) = places.pop()
    source = path.read_bytes()
    if isinstance(after, ast.expr):
        text = f"({fault.after})"
    else:
        column = begin - (source.rfind(b"\n", 0, begin) + 1)
        text = textwrap.indent(ast.unparse(after), " " * column).lstrip()
    return path, (source[:begin] + text.encode() + source[end:]).decode()


def _expression(code: str) -> ast.expr | None:
    """An expression, or None for a statement."""
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return None


@functools.cache
def _functions(root: Path) -> list[_Function]:
    """All functions and classes of a tree, nested ones too."""

    def inside(node: ast.AST, path: Path, prefix: str) -> Iterator[_Function]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}"
                yield _Function(path, name, child)
            yield from inside(child, path, name)

    found: list[_Function] = []
    for path in (path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        found += inside(ast.parse(path.read_bytes()), path, module)
    return found


def _span(node: ast.AST, source: bytes) -> tuple[int, int]:
    """Where a node begins and ends, in bytes."""
    lines = source.splitlines(keepends=True)
    first, last = sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno - 1]))
    return first + node.col_offset, last + node.end_col_offset


def _advice(fault: Fault, functions: list[str], places: int) -> str:
    """Why a fault has no place of its own, and what to do."""
    if not functions:
        found = f"no function of titanlite/ or models/ is named {fault.function}"
    else:
        found = f"{', '.join(functions)}: {places} places have `{fault.before}`, not one"
    return (
        f"{fault.id} ({fault.why}) has lost its place: {found}. In tests/mutations/history.json, give its entry the new name "
        f'in "function", or express the same fault in the new code in "before" and "after" (tests/mutations/README.md).'
    )
