"""The source code of a model: its modules, a hash of each, and what has changed since a checkpoint.

These are the family's module and everything that it imports, directly or indirectly, also inside functions: modules of
`models`, of the family's own top-level package, and of any other folder on Python's path. titanlite, the standard library and
installed packages are excluded; provenance.json has their versions.
"""

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

log = logging.getLogger(__name__)

ModelSource = dict[str, dict[str, str]]  # module -> {"hash": of its syntax tree, "text": of its file}

_LINES = 40  # the most lines of a diff in a message


@functools.cache
def source_of(module: ModuleType) -> ModelSource:
    """The source code of a family. The files are read at the first call in a process, soon after their import."""
    own, found, waiting = {"models", module.__name__.partition(".")[0]}, {}, [module.__name__]
    while waiting:
        name = waiting.pop()
        spec = _spec(name) if name not in found and _belongs_to_model(name, own) else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue  # an attribute of a module, a folder without __init__.py, an extension
        text = importlib.util.decode_source(Path(spec.origin).read_bytes())
        found[name] = {"hash": hash_of(text), "text": text}
        for imported in (name, *_imports(ast.parse(text), spec.parent or "")):
            waiting += itertools.accumulate(imported.split("."), "{}.{}".format)  # an import also runs parent packages
    return dict(sorted(found.items()))


def edited_file(module: ModuleType) -> str | None:
    """A file of a family that was edited after `source_of` had read it: this process goes on with its earlier code."""
    for name, kept in source_of(module).items():
        file = Path(sys.modules[name].__file__ or "") if name in sys.modules else None
        if file and (not file.is_file() or hash_of(importlib.util.decode_source(file.read_bytes())) != kept["hash"]):
            return str(file)
    return None


def hash_of(text: str) -> str:
    """A hash of a module's syntax tree, without docstrings; of its text, if this version of Python cannot parse it."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [each for each in body if not _does_nothing(each)]  # type: ignore[attr-defined]  # not every node has one
        text = ast.dump(tree)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def changed_modules(before: ModelSource, now: ModelSource) -> list[str]:
    """The modules that differ, or that only one of the two has. Where the hashes differ, the texts decide: another version of
    Python or titanlite may have computed the hashes.
    """
    return [name for name in sorted(before.keys() | now) if name not in before or not _same(before[name], now.get(name))]


def _same(then: dict[str, str], now: dict[str, str] | None) -> bool:
    return now is not None and (then["hash"] == now["hash"] or hash_of(then["text"]) == hash_of(now["text"]))


def _does_nothing(node: ast.AST) -> bool:
    """Whether a statement does nothing: `pass`, or a text such as a docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Pass)


def diff(before: ModelSource, now: ModelSource) -> str:
    """The first lines of a unified diff of the changed modules, each indented."""
    lines: list[str] = []
    for name in changed_modules(before, now):
        then, here = (source.get(name, {"text": ""})["text"].splitlines() for source in (before, now))
        lines += difflib.unified_diff(then, here, f"{name} then", f"{name} now", lineterm="", n=1)
    rest = [f"... and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return "\n".join(f"    {line}" for line in [*lines[:_LINES], *rest])


def warn_of_changes(checkpoint: Path, before: ModelSource | None, module: ModuleType) -> None:
    """Logs what has changed since a checkpoint was saved. before: the source code in its manifest; None for imported
    weights.
    """
    if before is not None and (names := changed_modules(before, source_of(module))):
        what, where = diff(before, source_of(module)), "its manifest.json has the code that it was saved with"
        log.warning("%s: the code of the model has changed since: %s; %s\n%s", checkpoint, ", ".join(names), where, what)


# ---------------------------------------------------------------------------------------------------------------- modules


def _belongs_to_model(name: str, own: set[str]) -> bool:
    """Whether a module belongs to the model. own: top-level packages that do, even if they are installed."""
    root = name.partition(".")[0]
    if root in own and root != "torch":  # `own` has torch if the key names an optimizer of PyTorch
        return True
    if root in ("titanlite", "torch") or root in sys.stdlib_module_names or (spec := _spec(root)) is None:
        return False
    paths = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return not any(part in ("site-packages", "dist-packages") for path in paths for part in Path(path).parts)


def _spec(name: str) -> ModuleSpec | None:
    """The spec of a module; None if there is none. Its package must be imported already, or the search would import it."""
    package = name.rpartition(".")[0]
    with contextlib.suppress(ImportError, ValueError):  # an attribute of a module; a program without a spec
        return importlib.util.find_spec(name) if not package or package in sys.modules else None
    return None


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The names that import statements may import; some are attributes of modules. package: that of the importing module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import beyond the top-level package
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{base}.{alias.name}" for alias in node.names)
