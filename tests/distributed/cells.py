"""Runs a cell of the covering table (cover.py), and compares it with one plain process."""

import contextlib
import functools
import math
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from models.blocks import Normal
from tests.distributed.cover import PLAIN, Cell
from tests.distributed.mixtures import watched_margins
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, GRAPHS, MODES, config_of, degrees_of, learnable_data, learnable_ids, mesh_of
from tests.token_files import data_of
from titanlite.config.schema import Config
from titanlite.data.mixture import Data
from titanlite.loop.validation import validate
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import load_family
from titanlite.transforms import lora
from titanlite.verify.compare import Run, Trajectory, batches_of, begin, compare, record_run

STEPS = 3
FAMILIES = {
    "Llama 3": ("tests.tiny", "plain"),
    "Llama 3 tied": ("tests.tiny", "tied"),
    "Llama 3 of 515 tokens": ("tests.tiny", "uneven"),
    "Qwen 3": ("tests.tiny_qwen3", "tied"),
    "Qwen 2": ("tests.tiny_qwen3", "biased"),
    "Gemma 3": ("tests.tiny_gemma3", "plain"),
    "Gemma 2": ("tests.tiny_gemma3", "two"),
    "OLMo 2": ("tests.tiny_olmo2", "plain"),
    "Mixture": ("tests.tiny_moe", ""),  # of its router
}
ROUTERS = {"softmax": "plain", "sigmoid, bias, shared": "shared", "grouped": "grouped"}
BALANCES: dict[str, dict[str, float]] = {
    "none": {},
    "losses": {"balance_loss": 0.42, "router_z_loss": 0.01},  # with these, no routing in these runs depends on rounding
    "moving bias": {"bias_update_speed": 0.01},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"training": {"mixed_precision_param": "bfloat16"}},
    "float8": {"float8": {"enable": True, "emulate": True}},
    "float8 rows": {"float8": {"enable": True, "emulate": True, "recipe_name": "rowwise"}},
    "float8 gather": {"float8": {"enable": True, "emulate": True, "enable_fsdp_float8_all_gather": True}},
    "bfloat16 states": {
        "training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
        "optimizer": {"rounding": "compensated", "implementation": "for-loop"},
    },
}
GATHERS: dict[str, dict[str, Any]] = {
    "default": {},
    "never": {"fsdp_reshard_after_forward": "never"},
    "always": {"fsdp_reshard_after_forward": "always"},
    "prefetch": {"fsdp_prefetch": 2},
}


# The largest relative differences from one process.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {},  # the tolerances of titanlite verify
    # sums in another order are rounded differently, to 256 values per power of two
    "bfloat16": {"losses": 5e-3, "norms": 6e-2, "gradients": 6e-2},
    # a value between two of eight may flip to the other one: one flip affects all gradients after it
    "float8": {"losses": 2e-3, "norms": 5e-2, "gradients": 1e-1},
}
# The factors that the reference process has too: all others must not change the mathematics.
MATHEMATICS = (
    *("family", "blocks", "precision", "documents", "adapter", "optimizer", "z-loss", "router", "balance"),
    "validation",  # validation losses are compared too
)


def config_of_cell(cell: Cell, backend: str = "aot_eager") -> Config:
    module, flavor = FAMILIES[cell["family"]]
    precision = PRECISIONS[cell["precision"]]
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": module},
        "training": {"steps": STEPS, **precision.get("training", {})},
        "activation_checkpoint": MODES[cell["recompute"]],
        "parallelism": {**GATHERS[cell["gather"]], "reduce_every_microbatch": "end" not in cell["accumulation"]},
        "optimizer": {**precision.get("optimizer", {})},
    }
    if cell["blocks"] != "few":
        sections["model"]["overrides"] = {"n_layers": int(cell["blocks"])}
    if "pipeline" in cell["mesh"]:
        sections["parallelism"]["pipeline_parallel_schedule"] = cell["schedule"]
    if cell["stages"] != "equal":
        sections["parallelism"]["pipeline_parallel_layers_per_stage"] = int(cell["stages"][0])
    if cell["z-loss"] != "none":
        sections["training"]["z_loss"] = float(cell["z-loss"])
    if cell["validation"] != "none":
        sections["validation"] = {"enable": True, "steps": 2}
    if cell["family"] == "Mixture":
        flavor = ROUTERS[cell["router"]]
        # a rank receives this share of the mean at a time, so that the routing of these runs takes several chunks
        sections["moe"] = BALANCES[cell["balance"]] | ({"max_tokens_factor": 0.3} if "several" in cell["received"] else {})
        sections["training"]["seed"] = 3  # with 0 to 2, a choice of experts in some cells is within rounding: with_margin
    if cell["method"] == "heads exchanged":
        sections["parallelism"]["context_parallel_method"] = "ulysses"
    if cell["documents"] == "many":
        sections["training"] |= {"document_policy": "best_fit", "document_mask": True}
    if cell["compile"] != "no":
        sections["compile"] = {"enable": True, "backend": backend}
    if "float8" in precision:
        sections["float8"] = precision["float8"]
    if cell["adapter"] == "lora":
        sections["lora"] = {"enable": True, "rank": 4, "alpha": 6.0}
        if cell["family"] == "Mixture":
            sections["lora"]["modules"] = ["layers.*.attention.*"]
    if cell["optimizer"] == "Muon":
        sections["optimizer"] |= {"name": "Muon", "implementation": "for-loop"}  # the compiled one takes long to compile
    return config_of(mesh_of_cell(cell), flavor, int(cell["accumulation"][0]), **sections)


def mesh_of_cell(cell: Cell) -> dict[str, int]:
    return degrees_of(f"{cell['mesh']}, {cell['experts'].replace('split', 'ep')}")


def reference_of(cell: Cell) -> Cell:
    """The plain cell on one process with the same mathematics."""
    return PLAIN | {factor: cell[factor] for factor in MATHEMATICS}


def documents(config: Config, vocabulary: int) -> Data:
    """The learnable tokens, cut into documents of 1 to 60."""
    ids, lengths = learnable_ids(vocabulary), np.random.default_rng(1).integers(1, 61, 2000)
    ends = np.minimum(lengths.cumsum(), len(ids))
    return data_of([part for part in np.split(ids, ends) if len(part)], config, vocabulary)


def trajectory(cell: Cell, config: Config) -> tuple[Trajectory | None, int]:
    """The results of a cell's steps, on rank 0, and how many graphs this rank has compiled.

    Losses of validation, before the first step and after the last one, follow those of the steps.
    """
    torch._dynamo.reset()
    make = learnable_data
    if cell["documents"] == "many":
        make = functools.partial(documents, vocabulary=load_family(config.model.name, config.model.flavor).config.vocab_size)
    data, mesh = make(config), mesh_of(mesh_of_cell(cell))
    with mock.patch.object(lora.LoraLinear, "own_initial", _trained) if cell["adapter"] == "lora" else contextlib.nullcontext():
        run = begin(config, mesh, CPU)
    validation = [_validation_loss(run, data)] if cell["validation"] != "none" else []
    counters.clear()
    found = record_run(run, batches_of(config, data, mesh))
    graphs = counters["stats"]["unique_graphs"]
    if validation:
        found.losses.extend([*validation, _validation_loss(run, data)])
    return found if dist.get_rank() == 0 else None, graphs


def _validation_loss(run: Run, data: Data) -> float:
    return validate(run.model, data, run.config, run.mesh, run.device)["validation_loss"]


def with_margin(cell: Cell, config: Config) -> tuple[Trajectory | None, float]:
    """The results of one process, and the smallest margin of its routing decisions; infinite without routers."""
    with watched_margins() as margins:
        found, _ = trajectory(cell, config)
    return found, min(margins, default=math.inf)


def _trained(module: lora.LoraLinear) -> dict[str, Normal]:
    """Initial distributions with a nonzero B: while it is zero, A has no gradient to compare."""
    return {lora.A: Normal(0.1), lora.B: Normal(0.1)}


def run(pools: dict[int, Pool], cell: Cell, backend: str = "aot_eager") -> tuple[Trajectory, int]:
    ranks = ranks_of(degrees_of(cell["mesh"]))
    config = config_of_cell(cell, backend)
    results = pools[ranks].run("tests.distributed.cells:trajectory", cell=cell, config=config)
    return results[0][0], results[-1][1]  # of a pipeline, the last rank has the head


def graphs_of(cell: Cell) -> set[int]:
    """How many graphs may be compiled: one for blocks that are alike, and those of the head."""
    if cell["compile"] == "no":
        return {0}
    # Without documents only local layers have a mask; with them, those of both kinds have one, of the same shape.
    local_and_global = "Gemma" in cell["family"] and cell["documents"] == "one"
    graphs = {GRAPHS + local_and_global}
    if "pipeline" in cell["mesh"]:  # a stage can have layers of one kind
        graphs.add(GRAPHS)
    if cell["adapter"] != "none":  # the input of the first block needs no gradient, unless the model scales its embeddings
        graphs |= {count + 1 for count in graphs}
    # the head also has a graph without gradients
    return {count - 1 for count in graphs} if cell["validation"] != "none" else graphs


def faults(cell: Cell, found: Trajectory, reference: Trajectory) -> list[str]:
    """Differences from one process that rounding in the cell's precision does not explain."""
    tolerances = TOLERANCES[cell["precision"].split()[0]]
    excessive = [
        difference
        for difference in compare(found, reference).differences
        if not difference.size <= tolerances.get(difference.quantity, difference.tolerance)
    ]
    return [*map(str, excessive), *(f"a value is kept in {dtype}" for dtype in found.dtypes - reference.dtypes)]
