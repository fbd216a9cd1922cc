"""Single operations before and after a change, in one process, as JSON: python -m benchmarks.gpu.operations FILE [--rehearse]

    router          a router's matmuls, forward and backward, in float32 and on tensor cores
    block mask      FlexAttention with a softcap or sinks, forward and backward, without and with a block mask
    head chunks     the loss and its gradients for several sizes of a chunk of logits

Without a GPU the first two are the same before and after: a CPU has other kernels.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.device import seconds_of
from benchmarks.head_chunks import measure
from models.attention import SeqInfo, attend, with_mask
from models.moe import _wide_linear

Milliseconds = dict[str, dict[str, float]]  # case -> "before", "after"


class RouterCase(NamedTuple):
    """A router's sizes."""

    tokens: int
    dim: int
    experts: int


class AttentionCase(NamedTuple):
    """Sizes of an attention that only FlexAttention computes on CUDA."""

    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None  # None: sinks instead


ROUTERS = {
    "Qwen 3 30B-A3B": RouterCase(16_384, 2048, 128),
    "DeepSeek-V3": RouterCase(16_384, 7168, 256),
}
ATTENTION = {
    "gpt-oss 20B": AttentionCase(64, 8, 64, None),
    "Gemma 2 9B": AttentionCase(16, 8, 256, 50.0),
}
_LENGTH = 4096


def _milliseconds(work: Callable[[], None], device: str) -> float:
    work()  # compiles
    return statistics.median(seconds_of(work, device)) * 1000


def routers(device: str, cases: dict[str, RouterCase]) -> Milliseconds:
    """Milliseconds of routers with bfloat16 weights, as in training."""
    found: Milliseconds = {}
    for name, (tokens, dim, experts) in cases.items():
        x, weight = (torch.randn(rows, dim, device=device, dtype=torch.bfloat16) for rows in (tokens, experts))
        gradients = torch.randn(tokens, experts, device=device)
        leaves = [x.requires_grad_(), weight.requires_grad_()]

        def pass_of(linear: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor], gradients: Tensor) -> None:
            torch.autograd.grad(linear(*leaves), leaves, gradients)

        before = lambda x, weight: F.linear(x.float(), weight.float())  # noqa: E731
        after = lambda x, weight: _wide_linear(x, weight, None)  # noqa: E731
        found[name] = {
            "before": _milliseconds(lambda: pass_of(before, leaves, gradients), device),  # noqa: B023
            "after": _milliseconds(lambda: pass_of(after, leaves, gradients), device),  # noqa: B023
        }
    return found


def masked_attention(device: str, cases: dict[str, AttentionCase], length: int) -> Milliseconds:
    """Milliseconds of one sequence of one document, with training's block mask and without."""
    found: Milliseconds = {}
    seq = SeqInfo(torch.arange(length, device=device)[None])
    for name, case in cases.items():
        q, k, v = (
            torch.randn(1, heads, length, case.head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        )
        sinks = torch.zeros(case.heads, device=device) if case.softcap is None else None
        found[name] = {}
        for when, info in (("before", seq), ("after", with_mask(seq, plain=False))):

            def attention() -> None:
                out = attend(q, k, v, info.mask, None, case.softcap, sinks=sinks)  # noqa: B023
                torch.autograd.grad(out.sum(), (q, k, v))  # noqa: B023

            found[name][when] = _milliseconds(attention, device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.operations", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tiny = (
        {"tiny": RouterCase(64, 32, 8)},
        {"tiny": AttentionCase(2, 1, 16, None), "tiny, softcap": AttentionCase(2, 1, 16, 50.0)},
    )
    router_cases, attention_cases = tiny if args.rehearse else (ROUTERS, ATTENTION)
    chunks = (64, 512, 64) if args.rehearse else (4096, 128_256, 16_384)
    rows = measure(torch.device(device), *chunks, repeats=1 if args.rehearse else 10)
    found = {
        "router": routers(device, router_cases),
        "block mask": masked_attention(device, attention_cases, 64 if args.rehearse else _LENGTH),
        "head chunks": {str(row.logits): row._asdict() for row in rows},
    }
    args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
