"""Runs cells on a simulated GPU: titanlite's own functions, as train.py calls them.

    LD_PRELOAD=noop_cuda.so python -m tests.cuda_shim.program CELL...

prints a JSON object a cell: {"cell": ..., "fault": ..., "seconds": ...}. The fault is empty if there is none. A cell is one of
cells.py, or a fault of planted.py.
"""

import dataclasses
import json
import sys
import time
import traceback
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tests.cuda_shim import pretend

pretend.install()

from models.moe import experts_of  # noqa: E402  # after install
from tests import tiny, tiny_gemma3, tiny_moe  # noqa: E402
from tests.cuda_shim.cells import CELLS, Cell  # noqa: E402
from tests.cuda_shim.planted import PLANTED  # noqa: E402
from tests.cuda_shim.watch import Fault, Watch  # noqa: E402
from tests.distributed.scenarios import config_of, learnable_data  # noqa: E402
from titanlite.checkpoint.save import _Stager  # noqa: E402
from titanlite.checkpoint.tensors import WEIGHTS  # noqa: E402
from titanlite.config.schema import Config  # noqa: E402
from titanlite.data.batches import Batches, StepDataset  # noqa: E402
from titanlite.inference.generate import Sampling, generate  # noqa: E402
from titanlite.launch.process import seed_step  # noqa: E402
from titanlite.loop.checks import check  # noqa: E402
from titanlite.loop.divergence import Steps  # noqa: E402
from titanlite.loop.step import begin_training, forward_backward, update, warn_of_unused  # noqa: E402
from titanlite.loop.validation import validate  # noqa: E402
from titanlite.optim.state import run_tensors  # noqa: E402
from titanlite.parallel import parallelize as order  # noqa: E402
from titanlite.parallel.mesh import build_mesh, data_degree, data_rank, resolve_degrees, rng_rank  # noqa: E402
from titanlite.plan.step import simulated_ranks  # noqa: E402
from titanlite.registry.family import family_of  # noqa: E402
from titanlite.transforms.meta import on_meta  # noqa: E402

# FlexAttention does not support narrower heads; the default tokenizer has 4,096 entries
tiny.FLAVORS["cell"] = dataclasses.replace(tiny.FLAVORS["large"], head_dim=16)
tiny_gemma3.FLAVORS["cell"] = tiny_gemma3.FLAVORS["large"]
tiny_gemma3.FLAVORS["capped"] = dataclasses.replace(tiny_gemma3.FLAVORS["two"], n_layers=2, vocab_size=4096, window=64)
tiny_moe.FLAVORS["cell"] = tiny_moe.FLAVORS["large"]
DEVICE = pretend.DEVICE
# what attention runs, forward and backward
_KERNELS = {
    "cudnn": "aten._scaled_dot_product_cudnn_attention{}.default",
    "efficient": "aten._scaled_dot_product_efficient_attention{}.default",
    "flex": "flex_attention{}",
}


class _Rows(StepDataset):
    """A dataset that reads real rows, which NumPy needs."""

    def __getitem__(self, step: int) -> Any:
        with unset_fake_temporarily():
            return super().__getitem__(step)


def _on_meta(*args: Any) -> Any:
    """A model on the meta device cannot get memory if its tensors are already fake."""
    with unset_fake_temporarily():
        return on_meta(*args)


def run(config: Config, ranks: int, rank: int, waits_for_counts: int) -> set[str]:
    """Runs two steps and what surrounds them, and watches the second; returns its operations.

    waits_for_counts: allowed in the second step, per MoE layer; all other waits are faults.
    """
    torch._dynamo.reset()
    check(config, "cell", ranks, open_files=False)
    family, data = family_of(config.model), learnable_data(config)
    home = torch.device("cpu") if config.parallelism.cpu_offload else DEVICE
    with ExitStack() as stack:
        stack.enter_context(simulated_ranks(ranks, rank))
        mesh = build_mesh(resolve_degrees(config.parallelism, ranks), "cuda")
        part = data_rank(mesh), data_degree(mesh)
        source = _Rows(config, data, part)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(order, "on_meta", _on_meta))
        watch = Watch(mode, config.parallelism.cpu_offload)
        stack.callback(watch.close)
        model, optimizer, loss_scale = begin_training(family, config, mesh, DEVICE)
        batches, unread = Batches(source, DEVICE), Steps(mesh)
        stack.callback(batches.close)

        def step(number: int) -> None:
            seed_step(config.training.seed, number, rng_rank(mesh))
            batch = next(batches)
            assert len(batch.microbatches()) == 2
            loss = forward_backward(model, batch, mesh, loss_scale)
            if number == 1:
                warn_of_unused(model)
            norm = update(model, optimizer, 1e-3, config.training.max_norm, loss_scale, loss.labels)
            batches.prepare()
            unread.add(number, 0, loss, norm)
            assert loss.share.device == DEVICE and norm.device == home, (loss.share.device, norm.device)

        step(1)
        graphs = counters["stats"]["unique_graphs"]
        with watch.step():
            step(2)
        if (new := counters["stats"]["unique_graphs"] - graphs) > 0:
            raise Fault(f"recompiled: {new} graphs in the second step")
        if watch.waits_for_counts != (expected := waits_for_counts * len(experts_of(model))):
            raise Fault(f"host syncs: {watch.waits_for_counts} copies of counts to the host in a step instead of {expected}")
        next(batches)  # raises errors of `prepare`
        # a report
        assert len(unread.read()) == 2 and batches.waited() == 0
        # a checkpoint
        tensors = run_tensors(model, optimizer, loss_scale)
        buffers = {f"{WEIGHTS}{name}" for name, _ in model.named_buffers()}
        homes = {name: DEVICE if name in buffers else home for name, tensor in tensors.items() if tensor.ndim}
        strays = {name: place for name, place in homes.items() if tensors[name].device.type != place.type}
        assert not strays, f"not there: {strays}"
        assert _Stager(pinned=True).stage(tensors).keys() == tensors.keys()
        # validation, samples
        assert validate(model, data, config, mesh, DEVICE)
        if model.pipeline is not None:  # no rank has all layers
            return watch.operations
        watch.latest.clear()
        new_ids = generate(model, [[1, 2, 3], [4]], 2, (), Sampling(temperature=0))
        assert list(map(len, new_ids)) == [2, 2]
        kernels = {name for name in watch.latest if "dot_product" in name or "softmax" in name}
        if config.model.name == "tests.tiny" and kernels != {_KERNELS["efficient"].format("")}:
            raise Fault(f"wrong kernels of attention with a cache: {sorted(kernels)}")
        return watch.operations


def judge(operations: set[str], cell: Cell) -> None:
    """Raises Fault if a step has not run the expected kernels."""
    expected = {_KERNELS[name].format(part) for name in cell.attention for part in ("", "_backward")}
    found = {name for name in operations if "attention" in name}
    if found != expected:
        raise Fault(f"wrong kernels of attention: {sorted(found)} instead of {sorted(expected)}")
    if missing := cell.runs - operations:
        raise Fault(f"missing kernels: {sorted(missing)}")


def outcome(name: str) -> dict[str, Any]:
    """What happened in a cell."""
    begin, fault = time.perf_counter(), ""
    planted = PLANTED.get(name)
    cell = CELLS[planted.cell if planted else name]
    with ExitStack() as stack:
        if planted:
            stack.enter_context(mock.patch.object(planted.owner, planted.name, planted.fault))
        config = config_of(cell.degrees, "cell", accumulation=2, **cell.sections)
        try:
            judge(run(config, cell.ranks, cell.rank, cell.waits_for_counts), cell)
        except Exception as error:  # every cell runs, and its test reports what failed
            inner = error.__cause__ if isinstance(error.__cause__, Fault) else error  # a pipeline's stage wraps it
            fault = f"{type(inner).__name__}: {inner}\n{traceback.format_exc()}"
    return {"cell": name, "fault": fault, "seconds": round(time.perf_counter() - begin, 1)}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(outcome(name)), flush=True)
