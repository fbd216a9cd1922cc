"""Loads a checkpoint, or a folder in Hugging Face's format, for inference: no optimizer, no FSDP, weights in one precision."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from models.decoder import Decoder
from titanlite.checkpoint import load, manifest
from titanlite.checkpoint.storage import read_metadata, tensor_entries
from titanlite.checkpoint.tensors import AVERAGE_UPDATES, AVERAGES, WEIGHTS, model_tensors
from titanlite.checkpoint.whole import no_average
from titanlite.config.read import stored_config
from titanlite.config.schema import Config
from titanlite.data.sources import tokenizer_of_run
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.ground.errors import UserError, listed, phase
from titanlite.hf.folder import Entry, find_weights
from titanlite.hf.load import load_weights
from titanlite.launch.process import rank_and_world
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.registry.description import read_description
from titanlite.registry.family import FROM_ASSETS, Family, described, load_module, reader_of, stored_family, trusted
from titanlite.registry.source import warn_of_changes
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.initialize import fill, match_initial, materialize
from titanlite.transforms.meta import cast_parameters, on_meta

_DEFAULT_LENGTH = 2048  # lm-eval's default, for a config.json without max_position_embeddings


class Recognized(NamedTuple):
    """A model as a [model] section names it."""

    name: str
    flavor: str  # one of the family's FLAVORS, or "hf" if none has these dimensions
    family: Family
    overrides: Mapping[str, Any] = {}  # dimensions that differ from those of the flavor


class LoadedModel(NamedTuple):
    """A model in evaluation mode, with its tokenizer."""

    model: Decoder
    seq_len: int  # training.seq_len of its run, or max_position_embeddings of a folder in Hugging Face's format
    tokenizer: LoadedTokenizer


def is_hf_folder(source: Path) -> bool:
    """Whether a folder is in Hugging Face's format."""
    return os.path.lexists(source / "config.json")


def recognize(folder: Path, model: str = "") -> Recognized:
    """The model that a folder's config.json describes.

    model: a family of models/ or a dotted module name; empty: the family of models/ that reads this model_type. Raises
    UserError if there is none, or if it does not support what config.json sets.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    description = read_description(folder)
    model = model or reader_of(description, "; name one with --model")
    module = load_module(model)
    config = described(module, description)
    flavor = next((name for name, dimensions in module.FLAVORS.items() if dimensions == config), FROM_ASSETS)
    return Recognized(model, flavor, Family(module, config))


def family_at(source: Path, model: str = "", assets: str = "") -> Family:
    """The family of a checkpoint, or of a folder in Hugging Face's format. model: `name` of `open_model`; assets: as there.

    Raises UserError.
    """
    if is_hf_folder(source):
        return recognize(source, model).family
    return stored_family(_trusted_config(manifest.read(source), source, model).model, assets, "--tokenizer")


def _trusted_config(stored: manifest.Manifest, source: Path, model: str) -> Config:
    return trusted(stored_config(stored.numbers["config"], source), source, model)


@phase("opening the model")
def open_model(
    source: Path, device: torch.device, dtype: str | None = None, assets: str = "", name: str = "", average: bool = False
) -> LoadedModel:
    """The model of a checkpoint, or of a folder in Hugging Face's format, split over all ranks by tensor parallelism.

    All ranks call this together, in a process group. dtype: None means the compute precision of the run, or the dtype of the
    stored weights. assets: the folder of a tokenizer, for a checkpoint the new path of model.hf_assets_path; empty means that
    of the run or folder. name: the model's module, as the user's command names it; empty means the family of a folder's
    model_type, or the family of models/ that a checkpoint names. average: use a checkpoint's EMA. Raises UserError for a
    damaged checkpoint or folder, for a model whose dimensions have changed since, and for another tokenizer than the run's.
    """
    if is_hf_folder(source):
        return _open_folder(source, device, dtype, assets, name)
    return _open_checkpoint(source, device, dtype, assets, name, average)


def _open_checkpoint(
    source: Path, device: torch.device, dtype: str | None, assets: str, name: str, average: bool
) -> LoadedModel:
    found = load.verified(source)
    config = _trusted_config(found, source, name)
    if average and not config.optimizer.ema_decay:
        raise no_average(source)
    cfg = config.model
    family = stored_family(cfg, assets, "--tokenizer")
    if changed := family.changes_since(found.numbers["architecture"]):
        raise UserError(listed(f"{source}: {cfg.title} has changed since it was saved:", changed))
    if rank_and_world()[0] == 0:
        warn_of_changes(source, found.numbers.get("model_source"), family.module)
    tokenizer = tokenizer_of_run(source, found.numbers, assets or cfg.hf_assets_path, "--tokenizer")
    precision = DTYPES[dtype or config.training.mixed_precision_param]
    model = build(family, config, device, precision, dist.get_world_size())
    stored = tensor_entries(read_metadata(source, found.files))

    def further(prefix: str) -> list[str]:  # MTP modules, which only training uses
        return [f"{prefix}further.*"] if any(name.startswith(f"{prefix}further.") for name in stored) else []

    load.load_tensors(source, found, model_tensors(model), further(WEIGHTS), WEIGHTS)
    if average:
        # only of what was trained
        averages = {name: p.detach() for each, p in model.named_parameters() if (name := f"{AVERAGES}{each}") in stored}
        load.load_tensors(source, found, averages, [AVERAGE_UPDATES, *further(AVERAGES)], AVERAGES)
    return LoadedModel(model.eval(), config.training.seq_len, tokenizer)


def _open_folder(source: Path, device: torch.device, dtype: str | None, assets: str, name: str) -> LoadedModel:
    found = recognize(source, name)
    weights = find_weights(source, found.family, found.family.on_meta())
    config = Config.model_validate({"model": {"name": found.name, "flavor": FROM_ASSETS, "hf_assets_path": str(source)}})
    tokenizer = load_tokenizer(assets or str(source), "--tokenizer")._replace(model_folder=str(source))
    training = training_of(source, weights)
    model = build(found.family, config, device, DTYPES[dtype or training["mixed_precision_param"]], dist.get_world_size())
    load_weights(model_tensors(model), weights)
    return LoadedModel(model.eval(), training.get("seq_len", _DEFAULT_LENGTH), tokenizer)


def training_of(source: Path, weights: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """The keys of [training] that a folder in Hugging Face's format has: the dtype of its weights, and its length if it says
    one."""
    description, stored = read_description(source), next(iter(weights.values()))[0].dtype
    length = {"seq_len": description["max_position_embeddings"]} if description.get("max_position_embeddings") else {}
    return {"mixed_precision_param": next(name for name, dtype in DTYPES.items() if dtype == stored), **length}


def build(family: Family, config: Config, device: torch.device, dtype: torch.dtype, tp: int = 1) -> Decoder:
    """A model with buffers and adapters, without what only training has, and with memory for its weights. It is split over tp
    ranks, which are all there are, and into which `model_source` has found that it can be split."""
    model = on_meta(family, Config(model=config.model, lora=config.lora))
    cast_parameters(model, dtype)
    if tp > 1:
        apply_tensor_parallel(model, family, build_mesh({"tp": tp}, device.type)["tp"])
    materialize(model, device)
    distributions, _ = match_initial(model, family)
    for name, buffer in model.named_buffers():
        fill(buffer, name, distributions[name], seed=0)  # all are constants, and some are not stored
    return model
