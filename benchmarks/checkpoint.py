"""The cost of a checkpoint: python -m benchmarks.checkpoint [--dim 1024] [--layers 16] [--rounds 5] [--folder DIR]

Each round handles the state of a Llama with AdamW, by default 319 M parameters and 3.8 GB, in four ways:
    copied          from memory to allocated memory: the minimum of an asynchronous save
    written         as the same number of bytes into one file, with fsync: the minimum of any save
    saved, async    the time until training continues, and until the checkpoint is complete
    saved           the same, while training waits
Ratios are medians over rounds of the ratio inside a round. On a GPU, with --device cuda, saving uses pinned memory, and the
time of a step (forward, backward, optimizer) is measured in the same rounds.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from models import llama3
from titanlite.checkpoint.save import Saver
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.launch.addresses import set_up_gloo
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.registry.family import Family

_TOKENS = (1, 1, 129)  # of the timed step on a GPU: microbatches, sequences, length + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="a folder on the disk to measure; default: the temporary folder"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    set_up_gloo()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for name, value in measure(args.dim, args.layers, args.rounds, folder, torch.device(args.device)).items():
            print(f"{name:<36} {value}")
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


def measure(dim: int, layers: int, rounds: int, folder: Path, device: torch.device) -> dict[str, str]:
    """name -> result, with its unit."""
    config = Config.model_validate({"training": {"mixed_precision_param": "bfloat16" if device.type == "cuda" else "float32"}})
    sizes = llama3.Config(dim, layers, dim // 64, dim // 128, 64, 4 * dim, vocab_size=32_768)
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), device.type)
    model = build_model(Family(llama3, sizes), config, mesh, device)
    optimizer = build_optimizer(model, config.optimizer)
    tensors = run_tensors(model, optimizer, None)
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors.values()]
    room = [torch.empty_like(t, device="cpu", pin_memory=device.type == "cuda") for t in local]
    size = sum(t.nbytes for t in local)
    mode = "async_with_pinned_mem" if device.type == "cuda" else "async"
    cfg = config.checkpoint.model_copy(update={"keep_latest_k": 1})
    waiting = Saver(folder / "waiting", cfg, 600)
    going_on = Saver(folder / "async", cfg.model_copy(update={"async_mode": mode}), 600)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - begin)

    def step() -> None:
        forward_backward(model, Batch(torch.ones(_TOKENS, dtype=torch.int64, device=device)), mesh)
        update(model, optimizer, 0.0, 1.0)

    def write() -> None:
        with open(folder / "plain", "wb", buffering=0) as file:
            for tensor in room:
                file.write(tensor.numpy().data if tensor.ndim else tensor.numpy().tobytes())
            os.fsync(file.fileno())

    for number in range(rounds + 1):
        if device.type == "cuda":
            timed("step", step)
        timed("copied", lambda: torch._foreach_copy_(room, local))
        timed("written", write)
        (folder / "plain").unlink()
        begin = time.perf_counter()
        timed("async, training waits", lambda n=number: going_on.save(n, tensors, {"step": n}))
        going_on.finish()
        times.setdefault("async, until complete", []).append(time.perf_counter() - begin)
        timed("saved while training waits", lambda n=number: waiting.save(n, tensors, {"step": n}))
        waiting.finish()

    def ratio(name: str, to: str) -> str:
        return f"{statistics.median(a / b for a, b in list(zip(times[name], times[to], strict=True))[1:]):.2f}"

    seconds = {f"{name}, s": f"{statistics.median(found[1:]):.3f}" for name, found in times.items()}
    ratios = {
        "training waits / copied": ratio("async, training waits", "copied"),
        "until complete / written": ratio("async, until complete", "written"),
        "saved while waiting / written": ratio("saved while training waits", "written"),
    }
    if device.type == "cuda":
        ratios["training waits / step"] = ratio("async, training waits", "step")
    parameters = sum(p.numel() for p in model.parameters())
    first = {"first async, training waits, s": f"{times['async, training waits'][0]:.3f}"}
    return {"parameters": f"{parameters:,}", "state, GB": f"{size / 1e9:.2f}", **seconds, **first, **ratios}


if __name__ == "__main__":
    main()
