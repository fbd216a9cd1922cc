"""Memory of a step on one long sequence, split over ranks: python -m benchmarks.long_sequences [--tokens 32768] [--ranks 1 2 4]

Each rank takes a step (forward and backward pass). Two columns have the peak of the largest rank, above its memory before the
step: the bytes of all tensors that were alive together, and the growth of the process's resident memory (VmHWM), which depends
on the allocator. Times are not comparable: the ranks share the processors.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.launch.local_ranks import on_ranks
from titanlite.loop.step import build_model, forward_backward
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.plan.record import Allocations
from titanlite.registry.family import family_of


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def step(device: torch.device, config: Config, degrees: dict[str, int]) -> tuple[list[int], float, float]:
    """([peak bytes of tensors, of resident memory] of the largest rank, seconds, loss) of the second of two steps."""
    mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1) | degrees, "cpu")
    model = build_model(family_of(config.model), config, mesh, device)
    tokens = torch.randint(512, (1, 1, config.training.seq_len + 1), generator=torch.Generator().manual_seed(0))
    forward_backward(model, Batch(tokens[..., :257]), mesh)  # allocates gradients and buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, begun, allocations = _resident("VmRSS"), time.monotonic(), Allocations()
    with allocations:  # begins at 0: it counts only later allocations
        loss = forward_backward(model, Batch(tokens), mesh).share
    seconds, most = time.monotonic() - begun, torch.tensor([max(allocations.peaks.values()), _resident("VmHWM") - before])
    dist.all_reduce(loss)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist(), seconds, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--recompute", choices=("none", "full"), default="full")
    words = parser.parse_args()
    print("| method | ranks | MiB of tensors | of one rank's | MiB resident | of one rank's | seconds | loss |")
    print("|" + " - |" * 8)
    ones: list[int] = []
    for method in ("gather", "ulysses"):
        for ranks in words.ranks if method == "gather" else [count for count in words.ranks if count > 1]:
            values: dict[str, Any] = {
                "model": {"name": "llama3", "flavor": "debug"},
                "training": {"seq_len": words.tokens, "local_batch_size": 1, "mixed_precision_param": "float32"},
                "parallelism": {"context_parallel_degree": ranks, "context_parallel_method": method},
                "activation_checkpoint": {"mode": words.recompute},
            }
            run = functools.partial(on_ranks, timeout_seconds=3600, use_gpus=False)
            most, seconds, loss = run(ranks, step, Config.model_validate(values), {"cp": ranks})
            ones = ones or most
            sizes = " | ".join(f"{size / 2**20:,.0f} | {size / one:.2f}" for size, one in zip(most, ones, strict=True))
            print(f"| {method} | {ranks} | {sizes} | {seconds:.0f} | {loss:.6f} |", flush=True)


if __name__ == "__main__":
    main()
