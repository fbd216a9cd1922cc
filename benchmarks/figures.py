"""Computes the rows of a run's tables from its raw measurements: medians, ratios, utilization, memory."""

import statistics
from typing import Any, NamedTuple

from models import llama3

OURS = "titanlite"
_STATE_BYTES = {"bfloat16": 16, "float32": 16, "bfloat16-pure": 8}  # a parameter, its gradient and its two moments


class Figures(NamedTuple):
    """The results of one contestant; rates are medians over rounds."""

    tokens_per_second: float
    to_ours: float  # its speed / titanlite's, the median over rounds of the ratio inside a round
    mfu_causal: float | None  # relative to the data sheet's peak; None if unknown
    mfu_palm: float | None
    hfu: float | None  # causal attention plus recomputation; None if the recomputed part is unknown
    matmul_causal: float  # the same, relative to a large matmul in this run
    matmul_palm: float
    matmul_hfu: float | None
    peak: int  # peak bytes during training: resident, or allocated on a GPU
    above_state: int  # without parameters, gradients and optimizer state
    net: int  # also without the resident memory after the imports
    cold: float  # seconds from process start to the end of its first step, without a compiler cache
    warm: float | None  # with a compiler cache: the median
    cpu: float | None  # CPU seconds of a step, over all threads and ranks: the median; None in results before 2026-11-26
    cpu_to_ours: float | None  # titanlite's / its own, as `to_ours`; other programs on the machine affect it less


def state_bytes(parameters: int, precision: str) -> int:
    """Bytes of parameters, gradients and AdamW's moments."""
    return parameters * _STATE_BYTES[precision]


def least_bytes(c: llama3.Config, precision: str, tokens: int, recompute: bool, float32_logits: bool) -> int:
    """A lower bound of the bytes that a peer needs on a GPU; tokens: of one pass.

    State, autocast's copies of the weights, activations that the matmuls of each block (or of one, if blocks are recomputed)
    save for the backward pass, and the logits with their gradients.
    """
    width = 4 if precision == "float32" else 2
    parameters = c.n_layers * (2 * c.dim * (c.n_heads + c.n_kv_heads) * c.head_dim + 3 * c.dim * c.ffn_dim)
    parameters += c.vocab_size * c.dim * (1 if c.tied_embeddings else 2)
    copies = 2 * parameters if precision == "bfloat16" else 0
    block = 2 * c.dim + 2 * (c.n_heads + c.n_kv_heads) * c.head_dim + 2 * c.ffn_dim
    kept = c.n_layers * c.dim + block if recompute else c.n_layers * block
    logits = 2 * c.vocab_size * (4 if float32_logits else width)
    return state_bytes(parameters, precision) + copies + tokens * (width * kept + logits)


def figures(result: dict[str, Any]) -> dict[str, Figures]:
    """The results of every measured contestant by name, in the order of `result`."""
    job, flops = result["job"], result["flops"]
    tokens = job["accumulate"] * job["batch"] * job["seq"] * result["steps"]
    product = result["matmul"]["flops"] * result["steps"] / statistics.median(result["matmul"]["seconds"])
    datasheet, state = result["datasheet_flops"], state_bytes(job["parameters"], job["precision"])
    ours, our_cpu = (result["contestants"][OURS].get(kind) for kind in ("seconds", "cpu_seconds"))
    found = {}
    for name, raw in result["contestants"].items():
        speed = statistics.median(tokens / seconds for seconds in raw["seconds"])
        done = {"causal": flops["causal"], "palm": flops["palm"], "hfu": None}
        if raw["recomputed"] is not None:
            done["hfu"] = flops["causal"] + raw["recomputed"] * flops["blocks_forward"]

        def share(kind: str, peak: float | None, speed: float = speed, done: dict[str, Any] = done) -> float | None:
            return None if peak is None or done[kind] is None else speed * done[kind] / peak

        memory = raw["memory"]
        kind = "allocated" if job["device"] == "cuda" else "resident"
        peak = memory["peak"][f"peak_{kind}"]
        found[name] = Figures(
            tokens_per_second=speed,
            to_ours=statistics.median(a / b for a, b in zip(ours, raw["seconds"], strict=True)),
            mfu_causal=share("causal", datasheet),
            mfu_palm=share("palm", datasheet),
            hfu=share("hfu", datasheet),
            matmul_causal=share("causal", product),
            matmul_palm=share("palm", product),
            matmul_hfu=share("hfu", product),
            peak=peak,
            above_state=peak - state,
            net=peak - state - memory["import"][kind],
            cold=raw["first_step"]["cold"],
            warm=statistics.median(raw["first_step"]["warm"]) if raw["first_step"]["warm"] else None,
            cpu=statistics.median(raw["cpu_seconds"]) / result["steps"] if our_cpu else None,
            cpu_to_ours=statistics.median(a / b for a, b in zip(our_cpu, raw["cpu_seconds"], strict=True)) if our_cpu else None,
        )
    return found


def table(result: dict[str, Any]) -> list[list[str]]:
    """A header and a row for each contestant, the fastest first."""
    found = figures(result)
    sheet = result["datasheet_flops"] is not None
    header = ["", "tokens/s", "of titanlite's", "titanlite is"]
    header += ["MFU causal", "MFU PaLM", "HFU"] if sheet else []
    header += ["causal / matmul", "PaLM / matmul", "HFU / matmul"]
    header += ["peak GB", "above state", "less libraries", "first step cold s", "warm s"]
    timed = found[OURS].cpu is not None
    header += ["CPU s a step", "titanlite is"] if timed else []
    rows = [header]
    for name, f in sorted(found.items(), key=lambda item: -item[1].tokens_per_second):
        row = [name, f"{f.tokens_per_second:,.0f}", f"{f.to_ours:.3f}", f"{1 / f.to_ours:.2f} x"]
        row += [_percent(share) for share in (f.mfu_causal, f.mfu_palm, f.hfu)] if sheet else []
        row += [_percent(share) for share in (f.matmul_causal, f.matmul_palm, f.matmul_hfu)]
        row += [f"{size / 1e9:.2f}" for size in (f.peak, f.above_state, f.net)]
        row += [f"{f.cold:.1f}", "-" if f.warm is None else f"{f.warm:.1f}"]
        row += [f"{f.cpu:.3f}", f"{1 / f.cpu_to_ours:.2f} x"] if timed else []
        rows.append(row)
    return rows


def markdown(rows: list[list[str]]) -> str:
    """A table as Markdown: the first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "| " + " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1)) + " |")
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def disagreements(losses: dict[str, list[float]], tolerance: float) -> tuple[str, dict[str, str]]:
    """The reference, and {name: sentence} for each contestant whose losses differ from it.

    The reference is "plain", else "plain-compiled", else the first. tolerance: relative, for each loss.
    """
    reference = next((name for name in ("plain", "plain-compiled") if name in losses), next(iter(losses)))
    found = {}
    for name, theirs in losses.items():
        apart = [abs(a - b) / abs(b) for a, b in zip(theirs, losses[reference], strict=True)]
        # not "any above": NaN is not above anything
        if not all(difference <= tolerance for difference in apart):
            listed = ", ".join(f"{loss:.6f}" for loss in theirs)
            expected = ", ".join(f"{loss:.6f}" for loss in losses[reference])
            found[name] = (
                f"losses {listed}; {reference}'s are {expected}; apart by up to {max(apart):.2e}, allowed {tolerance:g}"
            )
    return reference, found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
