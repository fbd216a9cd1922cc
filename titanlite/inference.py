"""A checkpoint -> a model that answers: no optimizer, no FSDP, weights in the precision they are used in."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite import lora
from titanlite.checkpoint import load
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config import Config
from titanlite.errors import UserError
from titanlite.initialize import fill, match_initial, materialize
from titanlite.parallelize import apply_tensor_parallel, sharding_faults
from titanlite.zoo import Family, load_family


def family_of(source: Path, found: Manifest) -> tuple[Family, Config]:
    """The model and the configuration that a checkpoint is of. Raises UserError where its dimensions have changed since."""
    config = Config.model_validate(found.numbers["config"])
    keys = config.model
    family = load_family(keys.name, keys.flavor, keys.hf_assets_path)
    if changed := family.changes_since(found.numbers["architecture"]):
        raise UserError("\n  ".join([f"{source}: {keys.name} {keys.flavor} was another model then:", *changed]))
    return family, config


def load_model(
    source: Path,
    found: Manifest,
    family: Family,
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
    tp: DeviceMesh | None = None,
) -> nn.Module:
    """The model of a verified checkpoint, on the tp mesh where there is one; all ranks together, in a process group."""
    model = lora.on_meta(family, config)
    if tp is not None and tp.size() > 1:
        if faults := sharding_faults(model, family, tp.size()):
            raise UserError("\n".join(faults))
        apply_tensor_parallel(model, family, tp)
    materialize(model.to(dtype), device)
    distributions, _ = match_initial(model, family)
    for name, buffer in model.named_buffers():
        fill(buffer, name, distributions[name], seed=0)  # constants all, and not all of them are stored
    load.load_tensors(source, found, model_tensors(model), prefix="model.")
    return model.eval()
