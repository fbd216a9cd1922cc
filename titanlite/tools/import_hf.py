"""titanlite import-hf --source DIR --output CHECKPOINT [--model NAME] [--ranks N]

Reads a model in Hugging Face's format (config.json and safetensors) and writes it as a checkpoint, in the dtypes of the files.
A run starts from it with checkpoint.initial_load_path. With --ranks N this machine uses N processes: each reads and writes its
own slices, and holds no more. The name, shape and dtype of every tensor are checked before any tensor is read.
"""

import datetime
import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.save import cause
from titanlite.checkpoint.storage import Writer
from titanlite.checkpoint.tensors import model_tensors
from titanlite.errors import UserError
from titanlite.hf.folder import find_weights
from titanlite.hf.load import load_weights
from titanlite.hf.output import start_output
from titanlite.loop.metrics import peak_memory_gib
from titanlite.loop.resume import imported_numbers
from titanlite.tools.open_model import recognise
from titanlite.tools.options import at_least, command_parser
from titanlite.tools.ranks import on_ranks

_TIMEOUT = datetime.timedelta(hours=2)  # for a rank that reads and writes longer than the others


class Held(NamedTuple):
    """Memory of a rank, in GiB."""

    slices: float
    peak: float  # of the whole process, with mapped files and libraries


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = command_parser("import-hf", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output", type=Path, required=True, help="the new checkpoint; must not exist yet")
    parser.add_argument("--model", default="", help="family of models/, or dotted module name (default: by config.json)")
    parser.add_argument("--ranks", type=at_least(1), default=1, metavar="N", help="processes (default: 1)")
    options = parser.parse_args()
    held = import_hf(options.source, options.output, options.model, options.ranks)
    recognised = recognise(options.source, options.model)
    print(
        f"{options.source} -> {options.output}: {sum(rank.slices for rank in held):.2f} GiB; a rank held at most "
        f"{max(rank.peak for rank in held):.2f} GiB, of which {max(rank.slices for rank in held):.2f} are its slices\n\n"
        f"[model]\nname = {json.dumps(recognised.name)}\nflavor = {json.dumps(recognised.flavor)}\n"
        f"hf_assets_path = {json.dumps(str(options.source.resolve()))}\n\n"
        f"[checkpoint]\nenable = true\ninitial_load_path = {json.dumps(str(options.output.resolve()))}"
    )


def import_hf(source: Path, output: Path, model: str = "", ranks: int = 1) -> list[Held]:
    """Writes the checkpoint with so many processes, complete or not at all; -> memory of each rank. Raises UserError."""
    family = recognise(source, model).family
    find_weights(source, family, family.on_meta())
    return on_ranks(ranks, _import, source, output, start_output(output), model)


def _import(_: torch.device, source: Path, output: Path, unfinished: Path, model: str) -> list[Held]:
    """One of the processes. Tensors are in CPU memory, split along their first dimension."""
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    recognised = recognise(source, model)
    whole = recognised.family.on_meta()
    shapes, weights = model_tensors(whole), find_weights(source, recognised.family, whole)
    tensors = {
        name: empty(*shapes[name].shape, dtype=entries[0].dtype, device_mesh=mesh, placements=[Shard(0)])
        for name, entries in weights.items()
    }
    load_weights(tensors, weights)
    # flavor "hf" where no flavor has the dimensions: an export reads them again from the source
    section = {"name": recognised.name, "flavor": recognised.flavor, "hf_assets_path": str(source.resolve())}
    numbers = imported_numbers(recognised.family, section)
    writer = Writer(unfinished, output.name, lambda files: manifest.commit(unfinished, output, Manifest(numbers, files)))
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError) as error:
        raise UserError(f"{output}: cannot be written: {cause(error)}") from None
    local = sum(tensor.to_local().nbytes for tensor in tensors.values())
    held: list[Held] = [Held(0, 0)] * dist.get_world_size()
    dist.all_gather_object(held, Held(local / 2**30, peak_memory_gib(torch.device("cpu"))), group=group)
    return held
