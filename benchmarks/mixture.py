"""Speed of a mixture of experts beside transformers' with the same weights and routing, on a CPU: python -m benchmarks.mixture

Forward and backward pass of one feed-forward layer, alternated; medians, and the ratio of each pair. transformers' has two
implementations: "eager", a loop over experts, and "grouped_mm". Routing is uneven as an untrained router makes it; the load of
the busiest expert is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from models.moe import Experts, MoE, Router


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
    words = parser.parse_args()
    print(
        "| transformers' | seconds | titanlite's | ratio, median (least to most) | gradients differ by |\n| - | - | - | - | - |"
    )
    for theirs in ("eager", "grouped_mm"):
        ours, peer = layers(words.dim, words.hidden, words.experts, words.top_k, theirs)
        x = torch.randn(1, words.tokens, words.dim)
        difference = (seconds(ours, x)[1] - seconds(peer, x)[1]).norm() / seconds(ours, x)[1].norm()
        pairs = [(seconds(peer, x)[0], seconds(ours, x)[0]) for _ in range(words.repeat)]
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(their / our for their, our in pairs)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {theirs} | {a:.3f} | {b:.3f} | {spread} | {difference:.1e} |", flush=True)
    busiest = ours.router(x)[1].flatten().bincount(minlength=words.experts).max() / (words.tokens * words.top_k / words.experts)
    print(
        f"\n{words}; busiest expert {busiest:.2f} of the mean; {torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
