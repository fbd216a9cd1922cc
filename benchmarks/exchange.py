"""What expert parallelism sends for a token and MoE layer in a step: `python -m benchmarks.exchange`.

Before (until commit 5949028) each of a token's experts got a message; now each rank that has experts for it does. These are
averages over tokens that choose evenly, by `titanlite/plan/experts.py`, in bfloat16; what stays on a token's rank counts.
"""

import argparse

from models import deepseek_v3, qwen3_moe
from models.all_to_all import Layout
from titanlite.plan.experts import on_busiest_rank

CASES = {
    "qwen3_moe:30b-a3b": (qwen3_moe.FLAVORS["30b-a3b"], 8),
    "deepseek_v3:671b": (deepseek_v3.FLAVORS["671b"], 64),
}
TOKENS = 4096
# dispatch and combination, their gradients, and what is sent again where blocks are recomputed
ALL_TO_ALLS = {"no recomputation": (4, 4), "full": (6, 5)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model | EP | recomputation | messages of a token before | now | KiB a token and layer before | now | ratio |")
    print("| - | - | - | - | - | - | - | - |")
    for name, (shape, ranks) in CASES.items():
        layout = Layout(ranks, shape.n_experts // ranks, TOKENS, shape.top_k, int(1.5 * TOKENS * shape.top_k))
        each = on_busiest_rank((1,) * shape.n_experts, layout)[0].sent / TOKENS
        packed = 2 * shape.dim + 8 * shape.top_k  # there, with the numbers and weights of experts; less on the way back
        for reduced, (before, now) in ALL_TO_ALLS.items():
            sizes = before * shape.top_k * 2 * shape.dim / 1024, now * each * packed / 1024
            numbers = f"{shape.top_k} | {each:.2f} | {sizes[0]:.0f} | {sizes[1]:.0f} | {sizes[1] / sizes[0]:.2f}"
            print(f"| {name} | {ranks} | {reduced} | {numbers} |")


if __name__ == "__main__":
    main()
