"""Draws one-line faults of titanlite/ and models/ with a seed: the same commit and seed give the same faults.

    python -m tests.mutations.draw [--commit f790db6] [--seed 14] [--count 40]     prints them as JSON

A file is drawn with a probability proportional to its number of lines, then a kind, then a place of that kind:

    comparison   < and <=, > and >=, == and !=, in and not in, is and is not are exchanged
    operator     + and -, * and /, // and %, and and or are exchanged; a `not` is removed; += and -= are exchanged
    index        an integer index or the bound of a slice is one higher or lower
    constant     True and False are exchanged; another integer is one higher or lower; a float is doubled, 0.0 is 1.0
    call         a call that stands alone on a line is dropped; calls of `log` are left out, since they compute nothing

Annotations and texts are left as they are. Nothing is run here: some faults may change nothing that a test could see.
"""

import argparse
import ast
import itertools
import json
import random
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

COMMIT = "f790db6"  # the last one before the test suite was rebuilt
SEED = 14
COUNT = 40

_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
_OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


class Change(NamedTuple):
    """One place of a file: its line, and what stands from column `start` to `end` (in characters) instead."""

    kind: str
    line: int  # from 0
    start: int
    end: int
    text: str


def scopes(source: str) -> list[str]:
    """For each line of a file, the dotted name of the innermost class or function around it; "" at the top."""
    names = [""] * (source.count("\n") + 1)

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                names[child.lineno - 1 : child.end_lineno] = [name] * (child.end_lineno - child.lineno + 1)
            visit(child, name)

    visit(ast.parse(source), "")
    return names


def changes(source: str) -> list[Change]:
    """Every change that can be drawn in a file, in the order of its lines; a few may not be valid."""
    return sorted(set(_changes(ast.parse(source), source.split("\n"), subscript=False)))


def apply(line: str, change: Change) -> str:
    """The line with the change."""
    return line[: change.start] + change.text + line[change.end :]


def is_valid(source: str, change: Change) -> bool:
    """Whether the file can still be compiled and is another program."""
    changed = source.split("\n")
    changed[change.line] = apply(changed[change.line], change)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse("\n".join(changed))
            compile(tree, "<fault>", "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def _changes(node: ast.AST, lines: list[str], subscript: bool) -> Iterator[Change]:
    """subscript: whether the node stands in an index."""
    yield from _at(node, lines, subscript)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                inside = isinstance(node, ast.Subscript) and name == "slice"
                yield from _changes(
                    child, lines, inside or (subscript and isinstance(child, ast.Slice | ast.Tuple | ast.UnaryOp))
                )


def _at(node: ast.AST, lines: list[str], subscript: bool) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for op, before, after in zip(ops, [left, *comparators], comparators, strict=False):
                yield from _between("comparison", before, after, _COMPARISONS.get(type(op)), lines)
        case ast.BinOp(left=left, op=op, right=right) if not _is_text(left) and not _is_text(right):
            yield from _between("operator", left, right, _OPERATORS.get(type(op)), lines)
        case ast.BoolOp(op=op, values=values):
            for before, after in itertools.pairwise(values):
                yield from _between("operator", before, after, _OPERATORS[type(op)], lines)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if operand.lineno == node.lineno:
            yield Change("operator", *_span(lines, node.lineno, node.col_offset, operand.col_offset), "")
        case ast.AugAssign(target=target, op=op, value=value) if isinstance(op, ast.Add | ast.Sub):
            yield from _between("operator", target, value, ("+=", "-=") if isinstance(op, ast.Add) else ("-=", "+="), lines)
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, ast.Constant) and bound.lineno == bound.end_lineno:
                    for sign in (" + 1", " - 1"):
                        yield Change("index", *_span(lines, bound.lineno, bound.end_col_offset, bound.end_col_offset), sign)
        case ast.Constant(value=bool(value)):
            yield Change("constant", *_node(lines, node), str(not value))
        case ast.Constant(value=int(value)):
            for other in (value - 1, value + 1):
                if other >= 0 or subscript:
                    yield Change("index" if subscript else "constant", *_node(lines, node), str(other))
        case ast.Constant(value=float(value)):
            yield Change("constant", *_node(lines, node), repr(2 * value or 1.0))
        case ast.Expr(value=ast.Call(func=func)) if node.lineno == node.end_lineno and not ast.unparse(func).startswith("log."):
            yield Change("call", *_node(lines, node), "pass")


def _between(kind: str, before: ast.expr, after: ast.expr, swap: tuple[str, str] | None, lines: list[str]) -> Iterator[Change]:
    """The exchange of an operator that stands between two expressions of one line."""
    if swap is None or before.end_lineno != after.lineno:
        return
    line, start, end = _span(lines, after.lineno, before.end_col_offset, after.col_offset)
    gap = lines[line][start:end]
    if gap.count(swap[0]) == 1:
        place = start + gap.index(swap[0])
        yield Change(kind, line, place, place + len(swap[0]), swap[1])


def _node(lines: list[str], node: ast.AST) -> tuple[int, int, int]:
    return _span(lines, node.lineno, node.col_offset, node.end_col_offset)


def _span(lines: list[str], number: int, start: int, end: int) -> tuple[int, int, int]:
    """From the syntax tree's columns, which count bytes, to characters; lines from 0."""
    line = lines[number - 1].encode()
    return number - 1, len(line[:start].decode()), len(line[:end].decode())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def describe(source: str, change: Change) -> dict[str, Any]:
    """What finds the place again when lines move: its text, and where that occurs more than once, the function and number."""
    lines = source.split("\n")
    text, stripped = lines[change.line].strip(), [line.strip() for line in lines]
    result = {"kind": change.kind, "line": text, "fault": apply(lines[change.line], change).strip()}
    if stripped.count(text) > 1:
        names = scopes(source)
        result["scope"] = names[change.line]
        same = [number for number, line in enumerate(stripped) if line == text and names[number] == names[change.line]]
        if len(same) > 1:
            result["nth"] = same.index(change.line)
    return result


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout


def draw(commit: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` different faults of a commit."""
    names = [
        name for name in _git("ls-tree", "-r", "--name-only", commit, "titanlite", "models").split() if name.endswith(".py")
    ]
    sources = {name: _git("show", f"{commit}:{name}") for name in sorted(names)}
    sizes = [source.count("\n") for source in sources.values()]
    generator, faults, taken = random.Random(seed), [], set()
    possible: dict[str, list[Change]] = {}
    while len(faults) < count:
        (name,) = generator.choices(list(sources), sizes)
        places = possible.setdefault(name, changes(sources[name]))
        if not places:
            continue
        kind = generator.choice(sorted({place.kind for place in places}))
        place = generator.choice([place for place in places if place.kind == kind])
        if (name, place.line) not in taken and is_valid(sources[name], place):
            taken.add((name, place.line))
            origin = {"id": f"d{len(faults) + 1:02}", "file": name, "origin": f"{name}:{place.line + 1}"}
            faults.append(origin | describe(sources[name], place))
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws one-line faults of titanlite/ and models/.")
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    print(json.dumps(draw(arguments.commit, arguments.seed, arguments.count), indent=1))


if __name__ == "__main__":
    main()
