"""Refuses nodes that would train something else: settings, code and versions are compared before the first collective.

Otherwise nodes with another learning rate, seed or model file train together without an error, and the loss is wrong.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, listed

Identity = dict[str, str]  # name -> value as JSON

# Each node may have the same files under another path. What is in the files is compared elsewhere.
PER_NODE = ("job.dump_folder", "model.hf_assets_path", "distillation.teacher", "*.dataset*", "*.sources.*.path")
_LINES = 12  # of a message
_READ_WITHIN = timedelta(seconds=10)  # the first rank that ends may end the store too


def identity(settled: Config, device: str, dimensions: dict[str, Any], model_code: dict[str, str]) -> Identity:
    """What this rank will train, by name.

    settled: the configuration without keys that have no effect here. dimensions: of the model. model_code: module -> hash.
    """
    values = {
        **settled.model_dump(),
        "architecture": dimensions,
        "code": model_code | _files(),
        "device": device,
        "torch": torch.__version__,
    }
    return {
        name: json.dumps(value, sort_keys=True)
        for name, value in leaves(values)
        if not any(fnmatchcase(name, pattern) for pattern in PER_NODE)
    }


def differences(first: Identity, other: Identity, first_name: str, other_name: str) -> list[str]:
    """A line for everything in which two identities differ."""
    names = [name for name in first | other if first.get(name) != other.get(name)]
    return [f"{other_name} has {n} = {other.get(n, 'unset')}, {first_name} has {first.get(n, 'unset')}" for n in names]


def agree(store: dist.Store, rank: int, world: int, own: Identity) -> None:
    """Compares the identities of all ranks with that of rank 0; all ranks together.

    Raises the same UserError on all ranks if one differs, and TimeoutError if a rank does not arrive within the timeout of the
    store.
    """
    node = f"node {os.environ['GROUP_RANK']}" if os.environ.get("GROUP_RANK") else f"rank {rank}"
    keys = [f"differences/{other}" for other in range(world)]
    if rank == 0:
        store.set("identity", json.dumps([node, own]))
    try:
        first_name, first = json.loads(store.get("identity"))
        store.set(keys[rank], json.dumps(differences(first, own, first_name, node)))
        store.wait(keys)
    except dist.DistStoreError:
        late = [str(other) for other, key in enumerate(keys) if not store.check([key])] if store.check(["identity"]) else ["0"]
        raise TimeoutError(f"ranks that did not start within comm.init_timeout_seconds: {', '.join(late)}") from None
    verdict = list(dict.fromkeys(line for lines in store.multi_get(keys) for line in json.loads(lines)))
    if not verdict:
        return
    with contextlib.suppress(RuntimeError):  # the store may have ended with the first rank; the lines are read already
        if store.add("read", 1) == world:
            store.set("all have read", "")
        store.wait(["all have read"], _READ_WITHIN)
    more = [f"... and {len(verdict) - _LINES} more"] if len(verdict) > _LINES else []
    raise UserError(
        listed(
            "the nodes do not start the same run:",
            [*verdict[:_LINES], *more],
            "Start every node with the same command, code and version of PyTorch",
        )
    )


def _files() -> dict[str, str]:
    """File of titanlite -> hash."""
    package = Path(__file__).parents[1]
    return {
        str(path.relative_to(package.parent)): hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(package.rglob("*.py"))
    }


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of everything in nested tables and lists of tables."""
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield name, values
        return
    for key, value in values.items():
        yield from leaves(value, f"{name}.{key}" if name else key)
