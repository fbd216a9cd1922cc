"""Loads a checkpoint for inference: no optimizer, no FSDP, weights in the compute precision."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.decoder import Decoder
from titanlite.checkpoint import load
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.read import stored_config
from titanlite.data.sources import open_tokenizer
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.errors import UserError, listed
from titanlite.launch.process import rank_and_world
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.initialize import fill, match_initial, materialize
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import family_of
from titanlite.transforms.source import warn_of_changes


class LoadedModel(NamedTuple):
    """A model in evaluation mode, with its tokenizer."""

    model: Decoder
    seq_len: int  # training.seq_len of its run
    tokenizer: LoadedTokenizer
    tp: int  # the number of ranks that the model is split over


def open_checkpoint(source: Path, device: torch.device, dtype: str | None = None, assets: str = "") -> LoadedModel:
    """The model of a checkpoint, split over all ranks by tensor parallelism. All ranks call this together, in a process group.

    dtype: None: the compute precision of the run. assets: the folder of a tokenizer; empty: the tokenizer of the run. Raises
    UserError for a damaged checkpoint, and for a model whose dimensions have changed since.
    """
    manifest = load.verified(source)
    config = stored_config(manifest.numbers["config"])
    cfg = config.model
    family = family_of(cfg)
    if changed := family.changes_since(manifest.numbers["architecture"]):
        raise UserError(listed(f"{source}: {cfg.name} {cfg.flavor} has changed since it was saved:", changed))
    if rank_and_world()[0] == 0:
        warn_of_changes(source, manifest.numbers.get("model_source"), family.module)
    add_bos = config.training.add_bos
    tokenizer = load_tokenizer(assets, "--tokenizer", add_bos) if assets else open_tokenizer(cfg.hf_assets_path, add_bos)
    model = on_meta(family, config)
    tp = dist.get_world_size()
    if tp > 1:
        apply_tensor_parallel(model, family, build_mesh({**dict.fromkeys(DIMENSIONS, 1), "tp": tp}, device.type)["tp"])
    materialize(model.to(DTYPES[dtype or config.training.mixed_precision_param]), device)
    distributions, _ = match_initial(model, family)
    for name, buffer in model.named_buffers():
        fill(buffer, name, distributions[name], seed=0)  # all are constants, and some are not stored
    load.load_tensors(source, manifest, model_tensors(model), prefix="model.")
    return LoadedModel(model.eval(), config.training.seq_len, tokenizer, tp)
