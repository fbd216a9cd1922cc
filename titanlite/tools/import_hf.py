"""titanlite import-hf --source DIR --output CHECKPOINT [--model NAME] [--ranks N] [--upcycle-experts N [--top-k K] [--seed S]]

Reads a model in Hugging Face's format (config.json and safetensors) and writes it as a checkpoint, in the dtypes of the files.
A run starts from it with checkpoint.initial_load_path. With --ranks N this machine uses N processes: each reads and writes its
own slices, and holds no more. The name, shape and dtype of every tensor are checked before any tensor is read.

With --upcycle-experts N a dense model becomes an MoE model: each of N experts is a copy of its feed-forward layer, and a token
uses K of them, 2 by default. At first the MoE model computes the same as the dense model.
"""

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty

from titanlite.checkpoint import manifest
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.save import cause
from titanlite.checkpoint.storage import Writer
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.read import toml_value
from titanlite.ground.errors import UserError
from titanlite.ground.files import start_output
from titanlite.hf.folder import Entry, find_weights
from titanlite.hf.load import load_weights
from titanlite.launch.local_ranks import on_ranks
from titanlite.launch.process import of_all_ranks
from titanlite.loop.metrics import peak_memory_gib
from titanlite.registry.family import Family
from titanlite.tools.open_model import Recognized, recognize, training_of
from titanlite.tools.options import LOCAL_RANKS, SEED, WholeNumber, command_parser, existing_folder, new_path, nonempty
from titanlite.tools.upcycle import Upcycling, copied, fill_routers, moe_of

_TIMEOUT = datetime.timedelta(hours=2)  # for a rank that reads and writes more slowly than the others


class RankMemory(NamedTuple):
    """Memory of a rank, in GiB."""

    slices: float
    peak: float  # of the process, including mapped files and libraries


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = command_parser("import-hf", __doc__)
    parser.add_argument("--source", type=existing_folder, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output", type=new_path, required=True, help="the new checkpoint; must not exist yet")
    parser.add_argument("--model", type=nonempty, help="family or dotted module name (default: by config.json)")
    parser.add_argument("--ranks", type=LOCAL_RANKS, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--upcycle-experts", type=WholeNumber(2, 2**14), metavar="N", help="make an MoE model of N experts")
    parser.add_argument("--top-k", type=WholeNumber(1, 2**14), metavar="K", help="experts of a token (default: 2)")
    parser.add_argument("--seed", type=SEED, metavar="S", help="of the routers (default: 0); with --upcycle-experts")
    options = parser.parse_args()
    upcycling = _upcycling(options)
    name = options.model or ""
    held = import_hf(options.source, options.output, name, options.ranks, upcycling)
    model = target_of(options.source, name, upcycling)
    section = model_section(model, options.source)
    print(
        f"{options.source} -> {options.output}: {sum(rank.slices for rank in held):.2f} GiB; a rank held at most "
        f"{max(rank.peak for rank in held):.2f} GiB, of which {max(rank.slices for rank in held):.2f} are its slices\n\n"
        + "\n".join(["[model]", *(f"{key} = {toml_value(value)}" for key, value in section.items())])
        + f"\n\n[checkpoint]\nenable = true\ninitial_load_path = {json.dumps(str(options.output.resolve()))}"
    )


def _upcycling(options: argparse.Namespace) -> Upcycling | None:
    if options.upcycle_experts is None:
        for option, value in {"--top-k": options.top_k, "--seed": options.seed}.items():
            if value is not None:
                raise UserError(f"{option} {value}: has no effect without --upcycle-experts; leave the option out")
        return None
    return Upcycling(options.upcycle_experts, 2 if options.top_k is None else options.top_k, options.seed or 0)


def target_of(source: Path, model: str, upcycling: Upcycling | None) -> Recognized:
    """The model whose checkpoint is written. Raises UserError."""
    recognized = recognize(source, model)
    return moe_of(recognized, upcycling) if upcycling else recognized


def model_section(model: Recognized, source: Path) -> dict[str, Any]:
    """The keys of [model] for a run with the checkpoint."""
    # flavor "hf" if no flavor has the dimensions: an export reads them again from the source
    section: dict[str, Any] = {"name": model.name, "flavor": model.flavor, "hf_assets_path": str(source.resolve())}
    return section | ({"overrides": model.overrides} if model.overrides else {})


def imported_numbers(family: Family, **config: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a manifest for imported weights. config: the keys of [model] and [training] that describe them."""
    nothing = {"step": 0, "samples": 0, "global_batch": 0, "data": {}}
    return {**nothing, "architecture": family.dimensions(), "config": config, "imported": True}


def import_hf(
    source: Path, output: Path, model: str = "", ranks: int = 1, upcycling: Upcycling | None = None
) -> list[RankMemory]:
    """Writes the checkpoint atomically with `ranks` processes; -> memory of each rank. Raises UserError."""
    target_of(source, model, upcycling)
    family = recognize(source, model).family
    find_weights(source, family, family.on_meta())
    return on_ranks(ranks, _import, source, output, start_output(output), model, upcycling)


def _import(
    _: torch.device, source: Path, output: Path, unfinished: Path, model: str, upcycling: Upcycling | None = None
) -> list[RankMemory]:
    """One of the processes. Tensors are in CPU memory, split along their first dimension."""
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dense, target = recognize(source, model).family, target_of(source, model, upcycling)
    weights: Mapping[str, Sequence[Entry]] = find_weights(source, dense, dense.on_meta())
    shapes, training = model_tensors(target.family.on_meta()), training_of(source, weights)
    if upcycling:
        weights = copied(weights, upcycling.n_experts)

    def split(name: str, dtype: torch.dtype) -> DTensor:
        return empty(*shapes[name].shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

    tensors = {name: split(name, entries[0].dtype) for name, entries in weights.items()}
    load_weights(tensors, weights)
    if upcycling:
        routers = {name: split(name, torch.float32) for name in shapes if name not in weights}
        fill_routers(routers, target.family, upcycling.seed)
        tensors |= routers
    numbers = imported_numbers(target.family, model=model_section(target, source), training=training)
    writer = Writer(unfinished, output.name, lambda files: manifest.commit(unfinished, output, Manifest(numbers, files)))
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError) as error:
        raise UserError(f"{output}: cannot be written: {cause(error)}") from None
    local = sum(tensor.to_local().nbytes for tensor in tensors.values())
    return of_all_ranks(RankMemory(local / 2**30, peak_memory_gib(torch.device("cpu"))), group)
