"""The source code of a model: the modules that it consists of, a hash of each, and what has changed since a checkpoint.

These are the family's module and all that it imports, directly or not, wherever an import statement stands: modules of
`models`, of the family's own top-level package, and of any other folder that Python's path names. titanlite, the standard
library and installed packages are left out; provenance.json has their versions.
"""

import ast
import difflib
import functools
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

Source = dict[str, dict[str, str]]  # module -> {"hash": of its syntax tree, "text": of its file}

_LINES = 40  # of a diff in a message


@functools.cache
def source_of(module: ModuleType) -> Source:
    """The source code of a family, from files that are read at the first call of a process, soon after their import."""
    own, found, waiting = {"models", module.__name__.partition(".")[0]}, {}, [module.__name__]
    while waiting:
        name = waiting.pop()
        spec = _spec(name) if name not in found and _is_a_models(name, own) else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue  # an attribute of a module, a folder without __init__.py, an extension
        text = importlib.util.decode_source(Path(spec.origin).read_bytes())
        tree = ast.parse(text)
        found[name] = {"hash": hash_of(tree), "text": text}
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        waiting += [above for imported in (name, *_imports(tree, package)) for above in _with_packages(imported)]
    return dict(sorted(found.items()))


def hash_of(tree: ast.Module) -> str:
    """A hash of a syntax tree without docstrings. Every version of Python that parses a text gives it the same hash."""
    return hashlib.blake2b(repr(_plain(tree)).encode(), digest_size=16).hexdigest()


def changed_modules(before: Source, now: Source) -> list[str]:
    """The modules whose hashes differ, or that only one of the two has."""
    return [name for name in sorted(before.keys() | now) if _entry(before, name, "hash") != _entry(now, name, "hash")]


def diff(before: Source, now: Source) -> str:
    """The first lines of a unified diff of the changed modules, each indented."""
    lines: list[str] = []
    for name in changed_modules(before, now):
        then, here = (_entry(source, name, "text").splitlines() for source in (before, now))
        lines += difflib.unified_diff(then, here, f"{name} then", f"{name} now", lineterm="", n=1)
    rest = [f"... and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return "\n".join(f"    {line}" for line in [*lines[:_LINES], *rest])


def warn_of_changes(checkpoint: Path, before: Source | None, module: ModuleType) -> None:
    """Logs what has changed since a checkpoint was saved. before: of its manifest; None: of a version without it."""
    if before is not None and (names := changed_modules(before, source_of(module))):
        what, where = diff(before, source_of(module)), "its manifest.json has the code of then"
        log.warning("%s: the code of the model has changed since: %s; %s\n%s", checkpoint, ", ".join(names), where, what)


def _entry(source: Source, name: str, key: str) -> str:
    return source.get(name, {}).get(key, "")


# ---------------------------------------------------------------------------------------------------------------- modules


def _is_a_models(name: str, own: set[str]) -> bool:
    """Whether a module belongs to the model. own: top-level packages that do, also where they are installed."""
    root = name.partition(".")[0]
    if root in own:
        return True
    if root == "titanlite" or root in sys.stdlib_module_names or (spec := _spec(root)) is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return not any(part in ("site-packages", "dist-packages") for place in places for part in Path(place).parts)


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is, None if there is no such module. importlib.util.find_spec would import its packages."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    package = name.rpartition(".")[0]
    above = _spec(package) if package else None
    if package and (above is None or above.submodule_search_locations is None):
        return None
    return PathFinder.find_spec(name, above.submodule_search_locations if above else None)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The names that import statements may import; some are attributes of modules. package: that of the importing module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _with_packages(name: str) -> list[str]:
    """["a", "a.b", "a.b.c"] of "a.b.c": an import runs the files of the packages, too."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# ------------------------------------------------------------------------------------------------------------ syntax trees


def _plain(node: Any) -> object:
    """A syntax tree as tuples, without places, docstrings and what versions of Python write in different ways."""
    if isinstance(node, list):
        return tuple(_plain(each) for each in node if not _is_idle(each))
    if isinstance(node, ast.JoinedStr):
        return "JoinedStr", tuple(_parts(node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment"))
    # an empty field is left out, since a newer version may have it and an older one not
    return type(node).__name__, *((name, _plain(value)) for name, value in fields if value is not None and value != [])


def _is_idle(node: Any) -> bool:
    """Whether a statement does nothing: `pass`, or a text such as a docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Pass)


def _parts(node: ast.JoinedStr) -> Iterator[object]:
    """The parts of an f-string; texts that follow each other are one, and empty ones none."""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        yield from [text] if text else []
        yield _plain(part)
        text = ""
    yield from [text] if text else []
