"""titanlite import-hf --source DIR --output CHECKPOINT [--model NAME] [--ranks N]

Reads a model in Hugging Face's format (config.json and safetensors) and writes it as a checkpoint, in the dtypes of the files,
from which a run begins by checkpoint.initial_load_path. With --ranks N so many processes of this machine do it together: each
reads and writes its own slices, and none holds more. Every tensor's name, shape and kind is checked before any is read.
"""

import argparse
import datetime
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Contents, Manifest
from titanlite.checkpoint.storage import Writer
from titanlite.checkpoint.tensors import model_tensors
from titanlite.errors import UserError
from titanlite.hf.folder import find_weights, recognise
from titanlite.hf.load import load_weights
from titanlite.loop.metrics import peak_memory_gib
from titanlite.loop.resume import imported_numbers
from titanlite.tools.ranks import on_ranks

_PATIENCE = datetime.timedelta(hours=2)  # for a rank that reads and writes longer than the others


class Held(NamedTuple):
    """What a rank has held, in GiB."""

    slices: float
    peak: float  # of the whole process, mapped files and libraries too


def main() -> None:
    """Exit code 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="titanlite import-hf", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint that is written; must not be there yet")
    parser.add_argument("--model", default="", help="family of models/, or dotted module name (default: by config.json)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes (default: 1)")
    words = parser.parse_args()
    try:
        held = import_hf(words.source, words.output, words.model, words.ranks)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    found = recognise(words.source, words.model)
    print(
        f"{words.source} -> {words.output}: {sum(rank.slices for rank in held):.2f} GiB; a rank held at most "
        f"{max(rank.peak for rank in held):.2f} GiB, of which {max(rank.slices for rank in held):.2f} are its slices\n\n"
        f"[model]\nname = {json.dumps(found.name)}\nflavor = {json.dumps(found.flavor)}\n"
        f"hf_assets_path = {json.dumps(str(words.source.resolve()))}\n\n"
        f"[checkpoint]\nenable = true\ninitial_load_path = {json.dumps(str(words.output.resolve()))}"
    )


def import_hf(source: Path, output: Path, model: str = "", ranks: int = 1) -> list[Held]:
    """Writes the checkpoint with so many processes, whole or not at all; -> what each has held. Raises UserError."""
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be at least 1")
    if output.exists():
        raise UserError(f"{output}: is there already; name another output, or remove it")
    found = recognise(source, model)
    find_weights(source, found.family, found.family.on_meta())
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)  # of an import that was killed
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error}") from None
    return on_ranks(ranks, _import, source, output, unfinished, model)


def _import(_: torch.device, source: Path, output: Path, unfinished: Path, model: str) -> list[Held]:
    """One of the processes. Tensors stay in the CPU's memory, split along their first dimension."""
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = recognise(source, model)
    shapes = model_tensors(found.family.on_meta())
    weights = find_weights(source, found.family, found.family.on_meta())
    tensors = {
        name: empty(*shapes[name].shape, dtype=entries[0].dtype, device_mesh=mesh, placements=[Shard(0)])
        for name, entries in weights.items()
    }
    load_weights(tensors, weights)
    # flavor "hf" where the file is what the dimensions are to be read from again, as for an export
    keys = {"name": found.name, "flavor": found.flavor, "hf_assets_path": str(source.resolve())}
    commit = functools.partial(_commit, unfinished, output, imported_numbers(found.family, keys))
    try:
        dcp.save(tensors, storage_writer=Writer(unfinished, output.name, commit), process_group=group)
    except (CheckpointException, OSError) as error:
        raise UserError(f"{output}: cannot be written: {str(error).strip().splitlines()[-1]}") from None
    local = sum(t.to_local().numel() * t.element_size() for t in tensors.values())
    held: list[Held] = [Held(0, 0)] * dist.get_world_size()
    dist.all_gather_object(held, Held(local / 2**30, peak_memory_gib(torch.device("cpu"))), group=group)
    return held


def _commit(unfinished: Path, output: Path, numbers: dict, files: dict[str, Contents]) -> None:
    manifest.commit(unfinished, output, Manifest(numbers, files))


if __name__ == "__main__":
    main()
