"""titanlite: a reference training framework for large language models on PyTorch. Start reading at train.py.

From Python and notebooks: `titanlite.run(...)` trains, `titanlite.Run(folder)` reads what a run left (api.py).
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.api import Run, run

__all__ = ["Run", "run"]


def _load_models() -> None:
    """Imports the package models from beside this one: Python takes a folder models/ where a command starts for it."""
    file = Path(__file__).parents[1] / "models" / "__init__.py"
    if (found := sys.modules.get("models")) is None:
        spec = importlib.util.spec_from_file_location("models", file)
        assert spec is not None and spec.loader is not None
        sys.modules["models"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif (theirs := getattr(found, "__file__", None)) is None or os.path.realpath(theirs) != os.path.realpath(file):
        where = theirs or next(iter(getattr(found, "__path__", [])), "an unknown place")
        raise ImportError(f"models is imported from {where}, and titanlite needs its own, {file.parent}; rename yours")


_load_models()


def __getattr__(name: str) -> Any:
    """Imports api.py, and with it PyTorch, when one of its names is first used: commands that need neither start faster."""
    if name not in __all__:
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    from titanlite import api

    return getattr(api, name)
