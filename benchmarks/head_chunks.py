"""Time and memory of the head's loss and gradients for several sizes of a chunk of logits.

    python -m benchmarks.head_chunks [--dim 4096] [--vocabulary 128256] [--tokens 16384]

The result decides `SIZES` in models/head.py. Without a GPU it measures the CPU.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from torch import nn

from models.head import SIZES, Head, Kernels, chunk_of

_LOGITS = (2**24, 2**25, 2**26, 2**27, 2**28, 2**29, 2**30)


class Row(NamedTuple):
    """One size."""

    logits: int  # as in models.head.Sizes
    chunk: int  # tokens
    milliseconds: float  # median of one forward and backward pass
    peak_bytes: int  # allocated besides weight and hidden states; 0 on a CPU, which does not count them


def measure(
    device: torch.device, dim: int, vocabulary: int, tokens: int, logits: tuple[int, ...] = _LOGITS, repeats: int = 10
) -> list[Row]:
    """One row for each size, for a bfloat16 head without norm, with compiled kernels. Sizes with the same chunk count once."""
    torch.manual_seed(0)
    head = Head(nn.Identity(), dim, vocabulary).to(device, torch.bfloat16)
    head.kernels = Kernels(*(torch.compile(kernel, fullgraph=True) for kernel in head.kernels))
    hidden = torch.randn(1, tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens), device=device)
    rows: dict[int, Row] = {}
    for count in logits:
        head.sizes = SIZES[device.type]._replace(logits=count)
        chunk = chunk_of(tokens, vocabulary, head.sizes)
        if chunk not in rows:
            seconds, peak = _repeated(head, hidden, labels, repeats)
            rows[chunk] = Row(count, chunk, statistics.median(seconds) * 1000, peak)
    return list(rows.values())


def _repeated(head: Head, hidden: torch.Tensor, labels: torch.Tensor, repeats: int) -> tuple[list[float], int]:
    """Seconds of each pass after the first two, which compile; and the peak memory of all passes."""
    seconds, on_gpu = [], hidden.is_cuda
    before = torch.cuda.memory_allocated() if on_gpu else 0
    for number in range(repeats + 2):
        if on_gpu and number == 2:
            torch.cuda.reset_peak_memory_stats()
        begin = _now(on_gpu)
        head(hidden, labels).backward()
        seconds.append(_now(on_gpu) - begin)
        head.zero_grad()
        hidden.grad = None
    return seconds[2:], torch.cuda.max_memory_allocated() - before if on_gpu else 0


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        f"| 2^{row.logits.bit_length() - 1} | {row.chunk} | {row.milliseconds:.1f} | {row.peak_bytes / 2**30:.2f} |"
        for row in rows
    ]
    return "\n".join(["| logits | tokens of a chunk | ms | peak GiB |", "| --- | --- | --- | --- |", *lines])


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.head_chunks", allow_abbrev=False)
    for name, default in (("dim", 4096), ("vocabulary", 128_256), ("tokens", 16_384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(table(measure(device, given.dim, given.vocabulary, given.tokens)))


if __name__ == "__main__":
    main()
