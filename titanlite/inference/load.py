"""A checkpoint -> a model that answers: no optimizer, no FSDP, weights in the precision they are used in."""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import load
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Config
from titanlite.data.sources import open_tokenizer
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.errors import UserError
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.parallel.tensor import apply_tensor_parallel, sharding_faults
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.initialize import fill, match_initial, materialize
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import family_of


class Opened(NamedTuple):
    """A model that answers, and what there is to know of it."""

    model: nn.Module
    vocabulary: int
    seq_len: int  # of its training
    tokenizer: LoadedTokenizer
    tp: int


def open_checkpoint(source: Path, device: torch.device, dtype: str | None = None, assets: str = "") -> Opened:
    """The model of a checkpoint, split by tensor parallelism over all ranks; all together, in a process group.

    dtype: None: that of the training. assets: the folder of a tokenizer; empty: that of the run. Raises UserError for a
    checkpoint that is damaged, or of a model whose dimensions have changed since.
    """
    found = load.verified(source)
    config = Config.model_validate(found.numbers["config"])
    keys = config.model
    family = family_of(keys)
    if changed := family.changes_since(found.numbers["architecture"]):
        raise UserError("\n  ".join([f"{source}: {keys.name} {keys.flavor} was another model then:", *changed]))
    tokenizer = load_tokenizer(assets, "--tokenizer") if assets else open_tokenizer(keys.hf_assets_path)
    model = on_meta(family, config)
    tp = dist.get_world_size()
    if tp > 1:
        if faults := sharding_faults(model, family, tp):
            raise UserError("\n".join(faults))
        apply_tensor_parallel(model, family, build_mesh({**dict.fromkeys(DIMENSIONS, 1), "tp": tp}, device.type)["tp"])
    materialize(model.to(DTYPES[dtype or config.training.mixed_precision_param]), device)
    distributions, _ = match_initial(model, family)
    for name, buffer in model.named_buffers():
        fill(buffer, name, distributions[name], seed=0)  # constants all, and not all of them are stored
    load.load_tensors(source, found, model_tensors(model), prefix="model.")
    return Opened(model.eval(), family.config.vocab_size, config.training.seq_len, tokenizer, tp)
