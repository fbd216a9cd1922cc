"""Whether the best learning rate stays the same when a model becomes wider: `python -m benchmarks.transfer`.

A Llama of two layers learns the bytes of this repository's pages, at four widths and a grid of learning rates that double, with
muP (models/mup.py) and with the standard parametrization. At the base width both are the same run. Results are written to
benchmarks/results/transfer.json and .png.
"""

import argparse
import json
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import Optimizer
from titanlite.loop.loss import sequence_of
from titanlite.optim.build import build_optimizer, set_lr
from titanlite.registry.family import load_family
from titanlite.transforms.initialize import initialize

BASE, HEAD, LAYERS, VOCABULARY = 16, 8, 2, 256
WIDTHS = (16, 32, 64, 128)
STEPS, WARMUP, ROWS, TOKENS = 100, 10, 8, 64
EXPONENTS = tuple(range(-10, -1))  # learning rates 2^-10 to 2^-2
LAST = 20  # steps, whose mean loss is compared
_ROOT = Path(__file__).parents[1]


def text() -> Tensor:
    """The bytes of the pages of docs/, in the order of their names: int64 (bytes,)."""
    pages = sorted((_ROOT / "docs").rglob("*.md"))
    return torch.tensor(list(b"\n".join(page.read_bytes() for page in pages)))


def final_loss(width: int, rate: float, mup: bool, data: Tensor, steps: int = STEPS, seed: int = 0) -> float:
    """The mean cross entropy of the last steps; infinite if the run diverges."""
    sizes = {"dim": width, "n_heads": width // HEAD, "n_kv_heads": width // HEAD, "head_dim": HEAD, "ffn_dim": 3 * width}
    others: dict[str, Any] = {"n_layers": LAYERS, "vocab_size": VOCABULARY} | ({"mup_base_dim": BASE} if mup else {})
    family = load_family("llama3", "debug", overrides=sizes | others)
    model = family.on_meta()
    initialize(model, family, seed, torch.device("cpu"))
    optimizer = build_optimizer(model, Optimizer(lr=rate, weight_decay=0.0, implementation="fused"))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    assert model.head is not None
    for step in range(steps):
        starts = torch.randint(len(data) - TOKENS, (ROWS, 1), generator=generator)
        rows = data[starts + torch.arange(TOKENS + 1)]
        decay = min(1.0, (step + 1) / WARMUP) * min(1.0, (steps - step) / (steps / 2))  # constant, then linear to 0
        set_lr(optimizer, rate * decay)
        optimizer.zero_grad()
        loss = model.head(model(rows[:, :-1], sequence_of(rows[:, :-1], None)), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.inf
    return statistics.mean(losses[-LAST:])


def measure(data: Tensor) -> dict[str, dict[str, list[float]]]:
    """{parametrization: {width: losses at each learning rate}}."""
    found: dict[str, dict[str, list[float]]] = {"standard": {}, "muP": {}}
    for width in WIDTHS:
        for name in found:
            same = name == "muP" and width == BASE
            runs = (final_loss(width, 2.0**exponent, name == "muP", data) for exponent in EXPONENTS)
            found[name][str(width)] = found["standard"][str(width)] if same else list(runs)
            best = best_exponent(found[name][str(width)])
            print(f"{name:<10}{width:>5}  best 2^{best:<4}", *(f"{loss:7.3f}" for loss in found[name][str(width)]), flush=True)
    return found


def best_exponent(losses: list[float]) -> int:
    return EXPONENTS[losses.index(min(losses))]


def moved(of_widths: dict[str, list[float]]) -> int:
    """Grid steps between the lowest and the highest best learning rate of the widths."""
    best = [best_exponent(losses) for losses in of_widths.values()]
    return max(best) - min(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch.set_num_threads(1)  # the models are small: threads would spend more time waiting for each other than computing
    parser.parse_args()
    found = measure(text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, cwd=_ROOT
    ).stdout.strip()
    summary = {name: moved(of_widths) for name, of_widths in found.items()}
    print("the best rate moves by", ", ".join(f"{steps} steps of the grid ({name})" for name, steps in summary.items()))
    results = {"commit": commit, "torch": torch.__version__, "exponents": EXPONENTS, "moved": summary, "losses": found}
    target = _ROOT / "benchmarks/results/transfer.json"
    target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, target.with_suffix(".png"))


def draw(results: dict[str, Any], path: Path) -> None:
    """The loss against the learning rate, one panel for each parametrization, one line for each width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2), dpi=110, sharey=True)
    for axes, (name, of_widths) in zip(panels, results["losses"].items(), strict=True):
        for width, losses in of_widths.items():
            axes.plot(results["exponents"], losses, marker=".", label=f"width {width}")
            best = losses.index(min(losses))
            axes.plot(results["exponents"][best], losses[best], marker="o", color=axes.lines[-1].get_color())
        axes.set(title=name, xlabel="log2 of the learning rate")
    panels[0].set_ylabel("loss")
    panels[1].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
