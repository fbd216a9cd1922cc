"""titanlite: a reference training framework for large language models on PyTorch. Start reading at train.py.

From Python and notebooks: `titanlite.run(...)` trains, `titanlite.Run(folder)` reads what a run left (api.py).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.api import Run, run

__all__ = ["Run", "run"]


def __getattr__(name: str) -> Any:
    """Imports api.py, and with it PyTorch, when one of its names is first used: commands that need neither start faster."""
    if name not in __all__:
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    from titanlite import api

    return getattr(api, name)
