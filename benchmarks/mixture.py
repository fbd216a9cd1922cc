"""Speed of a mixture of experts beside transformers' with the same weights and routing, on a CPU: python -m benchmarks.mixture

Forward and backward pass of one feed-forward layer, alternated; medians, and the ratio of each pair. transformers' has two
implementations: "eager", a loop over experts, and "grouped_mm". Both layers get the same choice of experts, twice: with the
shares of one layer of a run's routing.json, and as many rows for each expert. The load of the busiest expert is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from models.moe import Experts, MoE, Router
from titanlite.plan.trace import read_trace, spread

_TRACE = Path(__file__).parent / "results/routing_debug.json"


def layers(dim: int, hidden: int, experts: int, top_k: int, theirs: str) -> tuple[MoE, nn.Module]:
    """Both layers, with equal weights. theirs: transformers' implementation."""
    torch.manual_seed(0)
    ours = MoE(Router(dim, experts, top_k), Experts(experts, dim, hidden))
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=dim**-0.5)
    config = Qwen3MoeConfig(
        hidden_size=dim, moe_intermediate_size=hidden, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True
    )
    config._experts_implementation = theirs
    peer = Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        peer.gate.weight.copy_(ours.router.weight)
        peer.experts.gate_up_proj.copy_(torch.cat([ours.experts.w1, ours.experts.w3], dim=1))
        peer.experts.down_proj.copy_(ours.experts.w2)
    return ours, peer


def choice(counts: list[int], tokens: int, top_k: int) -> Tensor:
    """(tokens, top_k): experts by these counts, in any order of tokens. No expert has more rows than there are tokens, so that
    rows of one expert, in a run of at most so many, are of different tokens."""
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).view(top_k, tokens).T
    return chosen[torch.randperm(tokens)].contiguous()


def route(ours: MoE, peer: nn.Module, chosen: Tensor) -> None:
    """Both routers compute their scores, and choose these experts."""
    gate = peer.gate

    def choose(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        scores = logits.softmax(dim=-1, dtype=torch.float).gather(1, chosen)
        return logits, (scores / scores.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen

    ours.router.choose = lambda _: chosen  # type: ignore[method-assign]  # of this instance
    gate.forward = choose


def seconds(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, Tensor]:
    """Of a forward and a backward pass; and the gradient of x."""
    x = x.detach().requires_grad_()
    begun = time.perf_counter()
    layer(x).square().sum().backward()
    return time.perf_counter() - begun, x.grad if x.grad is not None else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"dim": 1024, "hidden": 512, "experts": 64, "top_k": 8, "tokens": 2048, "repeat": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--trace", type=Path, default=_TRACE, help="a run's folder, or its routing.json")
    words = parser.parse_args()
    rows, recorded = words.tokens * words.top_k, read_trace(words.trace)
    layer = max(recorded.mixtures, key=lambda mixture: max(mixture.counts) / sum(mixture.counts))  # the least even one
    if (len(layer.counts), layer.top_k) != (words.experts, words.top_k):
        parser.error(f"{words.trace}: has {len(layer.counts)} experts and top_k {layer.top_k}")
    routings = {"recorded": layer.counts, "balanced": [1] * words.experts}
    print(
        "| transformers' | routing | busiest expert | seconds | titanlite's | ratio, median (least to most) "
        "| gradients differ by |\n| - | - | - | - | - | - | - |"
    )
    medians: dict[tuple[str, str], float] = {}
    for theirs in ("eager", "grouped_mm"):
        ours, peer = layers(words.dim, words.hidden, words.experts, words.top_k, theirs)
        x = torch.randn(1, words.tokens, words.dim)
        for name, shares in routings.items():
            counts = spread(shares, rows)
            route(ours, peer, choice(counts, words.tokens, words.top_k))
            difference = (seconds(ours, x)[1] - seconds(peer, x)[1]).norm() / seconds(ours, x)[1].norm()
            pairs = [(seconds(peer, x)[0], seconds(ours, x)[0]) for _ in range(words.repeat)]
            a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
            medians[theirs, name] = b
            ratios = sorted(their / our for their, our in pairs)
            spread_of = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            busiest = max(counts) * words.experts / rows
            print(f"| {theirs} | {name} | {busiest:.2f} x | {a:.3f} | {b:.3f} | {spread_of} | {difference:.1e} |", flush=True)
    slower = ", ".join(f"{medians[each, 'recorded'] / medians[each, 'balanced']:.2f}" for each in ("eager", "grouped_mm"))
    print(f"\ntitanlite's, recorded / balanced, in both runs: {slower}")
    print(f"{vars(words)}; {torch.get_num_threads()} threads, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
