"""Draws the loss of a run from its metrics.jsonl: python docs/plot_run.py outputs/llama_debug docs/debug_run.png"""

import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    folder, picture = Path(sys.argv[1]), sys.argv[2]
    reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 3.2), dpi=110)
    axes.plot([r["tokens_seen"] for r in reports], [r["loss"] for r in reports], marker=".", color="#1f5fa8")
    axes.axhline(math.log(4096), color="#999999", linewidth=0.8, linestyle="--")
    end = (reports[-1]["tokens_seen"], math.log(4096))
    axes.annotate("ln 4096: loss of a uniform guess", end, ha="right", va="top", fontsize=8)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"llama_debug, {reports[-1]['step']} steps; each point is one batch", fontsize=10)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
