"""Speed of an MoE layer compared with transformers', with the same weights and routing, on a CPU: python -m benchmarks.mixture

Forward and backward pass of one feed-forward layer in float32. All contestants take turns in one process, A B C A B C ...;
times are medians over the rounds, and ratios are medians of the ratio inside a round. CPU seconds exclude those of other
programs, and are summed over threads. The contestants:

- titanlite, and the same compiled;
- transformers' "grouped_mm", its default, and the same compiled, and "eager", its loop over experts. Its "batched_mm" copies
  the matrices of its experts for each token, and takes part only if these copies have less than 4 GiB;
- only the nine matmuls of each expert: by `torch.mm`, which transformers uses, and as titanlite computes them. No
implementation with the same matmuls can be faster.

`--allocator keep` is what run_train.sh sets on a CPU. Routing is balanced; for 64 experts with top 8, it is also "recorded":
the shares of the least balanced layer of results/routing_debug.json, after 120 steps of training.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.allocators import ALLOCATORS, environment
from benchmarks.throughput import commit, hardware
from models.grouped import _multiply
from models.moe import Experts, MoE, Router

_RECORDED = Path(__file__).parent / "results/routing_debug.json"
_OURS = "titanlite"


class Shape(NamedTuple):
    """The sizes of an MoE layer."""

    dim: int
    hidden: int
    experts: int
    top_k: int


SHAPES = {
    "realistic": Shape(1024, 512, 64, 8),
    "debug": Shape(256, 128, 8, 2),  # of olmoe, qwen3_moe and mixtral
}


def ours_of(shape: Shape) -> MoE:
    torch.manual_seed(0)
    ours = MoE(Router(shape.dim, shape.experts, shape.top_k), Experts(shape.experts, shape.dim, shape.hidden))
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=shape.dim**-0.5)
    return ours


def theirs_of(ours: MoE, shape: Shape, implementation: str) -> nn.Module:
    """transformers' layer with the same weights."""
    config = Qwen3MoeConfig(
        hidden_size=shape.dim,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    theirs = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([ours.experts.w1, ours.experts.w3], dim=1))
        theirs.experts.down_proj.copy_(ours.experts.w2)
    return theirs


def choose(counts: list[int], top_k: int) -> Tensor:
    """(tokens, top_k): experts by these counts, for tokens in random order. No count exceeds the number of tokens, so the rows
    of an expert belong to different tokens.
    """
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).view(top_k, -1).T
    return chosen[torch.randperm(len(chosen))].contiguous()


def fix_choice(ours: MoE, peers: list[nn.Module], chosen: Tensor) -> None:
    """Makes all routers compute their scores, but choose these experts."""
    ours.router.choose = lambda _: chosen  # type: ignore[method-assign]  # of this instance

    def replace(gate: nn.Module) -> None:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            scores = logits.softmax(dim=-1, dtype=torch.float).gather(1, chosen)
            return logits, (scores / scores.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen

        gate.forward = forward

    for peer in peers:
        replace(peer.gate)


def step_of(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """A forward and a backward pass -> the gradient of x."""

    def step() -> Tensor:
        leaf = x.detach().requires_grad_()
        layer(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return step


def products_of(
    ours: MoE, x: Tensor, counts: list[int], multiply: Callable[[Tensor, Tensor, Tensor], Any]
) -> Callable[[], None]:
    """All matmuls of a step, one expert after the other: three forward, and two for each of them backward."""
    w1, w2, w3 = (each.detach() for each in ours.experts.parameters())
    to_weights = [torch.empty_like(each) for each in (w1, w2, w3)]
    most = max(counts)
    rows = x.flatten(0, 1).repeat(-(-most // x.shape[1]), 1)[:most]
    results, gate, up = torch.empty_like(rows), *(rows.new_zeros(most, w1.shape[1]) for _ in range(2))

    def step() -> None:
        for e, n in enumerate(counts):
            if n:
                multiply(rows[:n], w1[e].t(), gate[:n])
                multiply(rows[:n], w3[e].t(), up[:n])
                multiply(gate[:n], w2[e].t(), results[:n])
        for e, n in enumerate(counts):
            if n:
                multiply(rows[:n], w2[e], gate[:n])
                multiply(rows[:n].t(), gate[:n], to_weights[1][e])
                multiply(gate[:n].t(), rows[:n], to_weights[0][e])
                multiply(up[:n].t(), rows[:n], to_weights[2][e])
                multiply(gate[:n], w1[e], results[:n])
                multiply(up[:n], w3[e], results[:n])

    return step


def contestants(shape: Shape, x: Tensor, counts: list[int], loop: bool) -> dict[str, tuple[nn.Module | None, Any]]:
    """By name: the layer, or None for matmuls only; and its step."""
    ours = ours_of(shape)
    names = ["grouped_mm", "eager"] if loop else ["grouped_mm"]
    if x.shape[1] * shape.top_k * 3 * shape.dim * shape.hidden * 4 < 2**32:
        names.append("batched_mm")
    peers = {name: theirs_of(ours, shape, name) for name in names}
    fix_choice(ours, list(peers.values()), choose(counts, shape.top_k))
    found: dict[str, tuple[nn.Module | None, Any]] = {_OURS: (ours, step_of(ours, x))}
    found[f"{_OURS}, compiled"] = (ours, step_of(torch.compile(ours, fullgraph=True), x))
    for name, peer in peers.items():
        found[f"transformers {name}"] = (peer, step_of(peer, x))
    grouped = peers["grouped_mm"]
    found["transformers grouped_mm, compiled"] = (grouped, step_of(torch.compile(grouped, fullgraph=True), x))
    found["products alone, torch.mm"] = (None, products_of(ours, x, counts, lambda a, b, result: torch.mm(a, b, out=result)))
    found["products alone, titanlite's"] = (None, products_of(ours, x, counts, _multiply))
    return found


def measure(shape: Shape, tokens: int, counts: list[int], rounds: int, loop: bool) -> dict[str, Any]:
    """For each contestant the (CPU, wall) seconds of each round, and how its gradient of x differs from titanlite's."""
    torch._dynamo.reset()
    x = torch.randn(1, tokens, shape.dim)
    taking_part = contestants(shape, x, counts, loop)
    expected = taking_part[_OURS][1]()
    differences = {
        name: float((step() - expected).norm() / expected.norm()) for name, (layer, step) in taking_part.items() if layer
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in taking_part}
    for _ in range(rounds):
        for name, (layer, step) in taking_part.items():
            if layer is not None:
                layer.zero_grad(set_to_none=True)
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {"counts": counts, "differences": differences, "seconds": found}


def table(result: dict[str, Any]) -> str:
    """The table of one routing: medians, and the ratio of a contestant's CPU seconds to titanlite's."""
    seconds = result["seconds"]
    lines = [
        "| contestant | CPU s | wall s | titanlite is (least to most) | gradient differs by |",
        "| - | -: | -: | -: | -: |",
    ]
    for name, rounds in seconds.items():
        cpu, wall = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = sorted(other[0] / own[0] for other, own in zip(rounds, seconds[_OURS], strict=True))
        difference = f"{result['differences'][name]:.0e}" if name in result["differences"] else ""
        spread_of = f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {cpu:.4f} | {wall:.4f} | {spread_of} | {difference} |")
    return "\n".join(lines)


def spread(counts: list[int], rows: int) -> list[int]:
    """The counts scaled to sum to `rows`, rounded; unchanged if they already do."""
    total = sum(counts)
    ends = [end * rows // total for end in itertools.accumulate(counts)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="realistic")
    for name, value in {"tokens": 2048, "rounds": 7, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="keep", help="of benchmarks/allocators.py")
    parser.add_argument("--no-loop", action="store_true", help="without transformers' loop over experts, the slowest by far")
    parser.add_argument("--output", type=Path, help="a JSON file for all results")
    args = parser.parse_args(words)
    variables = environment(args.allocator)
    if any(os.environ.get(name) != value for name, value in variables.items()):  # an allocator reads them at the start
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.mixture", *words], os.environ | variables)
    code = commit()  # the code that runs, even if the checkout changes meanwhile
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    shares = {"balanced": [1] * shape.experts}
    layers = json.loads(_RECORDED.read_text(encoding="utf-8"))["mixtures"]
    layer = max(layers, key=lambda each: max(each["counts"]) / sum(each["counts"]))
    if (len(layer["counts"]), layer["top_k"]) == (shape.experts, shape.top_k):
        shares["recorded"] = layer["counts"]
    routings = {}
    for name, each in shares.items():
        counts = spread(each, args.tokens * shape.top_k)
        routings[name] = measure(shape, args.tokens, counts, args.rounds, not args.no_loop)
        busiest = max(counts) * shape.experts / sum(counts)
        print(
            f"{args.shape} {tuple(shape)}, {name}, busiest expert {busiest:.2f} x the mean\n\n{table(routings[name])}\n",
            flush=True,
        )
    if args.output:
        result = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.mixture " + " ".join(words).replace(f" --output {args.output}", ""),
            **code,
            "hardware": hardware("cpu"),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "precision": "float32",
            "threads": args.threads,
            "allocator": args.allocator,
            "shape": shape._asdict(),
            "tokens": args.tokens,
            "load_average": os.getloadavg(),
            "routings": routings,
        }
        args.output.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
