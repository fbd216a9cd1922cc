"""What expert parallelism sends per token and MoE layer in a step: `python -m benchmarks.exchange`.

Before (until commit 5949028) a token was sent to each of its experts; now it is sent to each rank that has experts for it. The
results are averages over evenly routed tokens, by `titanlite/plan/experts.py`, in bfloat16; what stays on a token's rank
counts.

The second table is the traffic between nodes and inside of them, without what stays on a rank: with one message to each rank,
and with one to each node, from which it goes on to the ranks there (parallelism.expert_parallel_node_size).
"""

import argparse

from models import deepseek_v3, qwen3_moe
from models.all_to_all import Layout
from titanlite.plan.experts import on_rank_0

CASES = {
    "qwen3_moe:30b-a3b": (qwen3_moe.FLAVORS["30b-a3b"], 8),
    "deepseek_v3:671b": (deepseek_v3.FLAVORS["671b"], 64),
}
TOKENS = 4096
# model, ranks, the nodes to which a token may be sent, nodes
NODES = (
    ("qwen3_moe:30b-a3b", 8, 2, 2),
    ("qwen3_moe:30b-a3b", 16, 2, 2),
    ("deepseek_v3:671b", 64, 8, 8),
    ("deepseek_v3:671b", 64, 4, 8),
)
# (before, now): dispatch and combination, their gradients, and what recomputed blocks send again
ALL_TO_ALLS = {"no recomputation": (4, 4), "full": (6, 5)}


def reached(experts: int, ranks: int, top_k: int) -> float:
    """The number of ranks (or nodes) to which a token is sent, of those over which experts are split."""
    layout = Layout(ranks, experts // ranks, TOKENS, top_k, int(1.5 * TOKENS * top_k))
    return on_rank_0("balanced", layout)[0].hops[0].sent / TOKENS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model | EP | recomputation | messages of a token before | now | KiB a token and layer before | now | ratio |")
    print("| - | - | - | - | - | - | - | - |")
    for name, (shape, ranks) in CASES.items():
        each = reached(shape.n_experts, ranks, shape.top_k)
        packed = 2 * shape.dim + 8 * shape.top_k  # dispatched with the numbers and weights of experts; combined without
        for reduced, (before, now) in ALL_TO_ALLS.items():
            sizes = before * shape.top_k * 2 * shape.dim / 1024, now * each * packed / 1024
            numbers = f"{shape.top_k} | {each:.2f} | {sizes[0]:.0f} | {sizes[1]:.0f} | {sizes[1] / sizes[0]:.2f}"
            print(f"| {name} | {ranks} | {reduced} | {numbers} |")
    print()
    print(
        "| model | EP | nodes, of these a token may go to | recomputation | KiB between, to each rank | node | inside | node |"
    )
    print("| - | - | - | - | - | - | - | - |")
    for name, ranks, groups, nodes in NODES:
        shape, local = CASES[name][0], ranks // nodes
        experts = shape.n_experts * groups // nodes
        to_ranks, to_nodes = (reached(experts, number, shape.top_k) for number in (groups * local, groups))
        away, beside = (nodes - 1) / nodes, (local - 1) / local
        for reduced, (_, now) in ALL_TO_ALLS.items():
            # dispatches include numbers and weights of 4 bytes; gradients of weights have 4 bytes too
            kib = (now * 2 * shape.dim + 4 * shape.top_k * (2 * (now - 3) + 1)) / 1024
            messages = to_ranks * away, to_nodes * away, to_ranks / nodes * beside, to_ranks * beside
            print(f"| {name} | {ranks} | {nodes}, {groups} | {reduced} |", *(f"{each * kib:.0f} |" for each in messages))


if __name__ == "__main__":
    main()
