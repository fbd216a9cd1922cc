"""Memory and time of every mode of activation checkpointing: python -m benchmarks.recompute [--flavor debug] [--rounds 9]

For each mode of activation_checkpoint, compiled and not: the bytes that the blocks keep between forward and backward pass, and
the time of a step (forward and backward pass), each relative to mode "none" without compile. Each round takes one step of every
variant. The ratio is the median over rounds of the ratio inside a round, so a machine whose speed drifts gives the same ratios.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import SeqInfo
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.launch.addresses import set_up_gloo
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.registry.family import Family, load_family

MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "every second layer": {"mode": "selective", "selective_ac_option": 2},
    "selective, op": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
}
BUDGETS = {f"memory_budget {share:g}": {"mode": "memory_budget", "memory_budget": share} for share in (0.5, 0.25)}


class Storages(TorchDispatchMode):
    """Records every storage that operations create while the mode is active, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # it only observes: compiled code stays compiled

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if type(tensor) is Tensor:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes of the storages that are still referenced."""
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def kept_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Bytes that a model without its head holds between forward and backward pass, for inputs (batch, seq)."""
    seq = SeqInfo(torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs))
    model(inputs, seq).sum().backward()  # creates what exists only after the first use
    with Storages() as storages:
        hidden = model(inputs, seq)
        gc.collect()
        alive = storages.alive()
        hidden.sum().backward()
    return alive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="debug")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_up_gloo()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device.type)
    original = load_family("llama3", args.flavor)
    variants = {name: (mode, False) for name, mode in MODES.items()}
    variants |= {f"{name}, compiled": (mode, True) for name, mode in (MODES | BUDGETS).items()}
    batch = Batch(torch.randint(original.config.vocab_size, (args.batch, args.seq_len + 1), device=device))
    models, kept = {}, {}
    for name, (mode, compiled) in variants.items():
        values = {
            "activation_checkpoint": mode,
            "compile": {"enable": compiled},
            "training": {"mixed_precision_param": "float32" if device.type == "cpu" else "bfloat16"},
        }
        models[name] = build_model(_fresh(original), Config.model_validate(values), mesh, device)
        kept[name] = kept_bytes(models[name], batch.inputs())
        summed_loss(models[name], batch).backward()
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.rounds):
        seconds = {name: _timed(model, batch, device) for name, model in models.items()}
        for name in models:
            ratios[name].append(seconds[name] / seconds["none"])
    print(f"llama3 {args.flavor}, {args.batch} x {args.seq_len} tokens, {device}, PyTorch {torch.__version__}")
    print("| activation_checkpoint.mode | kept activations | step time |\n| --- | --- | --- |")
    for name in models:
        print(f"| {name} | {kept[name] / kept['none']:.2f} | {statistics.median(ratios[name]):.2f} |")
    dist.destroy_process_group()


def _fresh(family: Family) -> Family:
    """The same family from a new module: dynamo caches compiled code by function, and ignores memory budgets."""
    spec = importlib.util.spec_from_file_location(f"family_{time.perf_counter_ns()}", family.module.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return Family(module, family.config)


def _timed(model: nn.Module, batch: Batch, device: torch.device) -> float:
    begin = time.perf_counter()
    summed_loss(model, batch).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
