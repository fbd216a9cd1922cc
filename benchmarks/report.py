"""The tables and plots of benchmarks/README.md from the JSON files of benchmarks/results/: python -m benchmarks.report

It replaces the part of README.md between the two marks and leaves the rest unchanged.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import curves
from benchmarks.figures import OURS, figures, markdown, table

BEGIN, END = "<!-- benchmarks.report begins -->", "<!-- benchmarks.report ends -->"
_HERE = Path(__file__).resolve().parent


def title(result: dict[str, Any]) -> str:
    """One line: what was measured."""
    job = result["job"]
    model = job["model"]
    where = result["hardware"].get("gpu") or f"{job['threads']} CPU thread{'s' if job['threads'] > 1 else ''}"
    size = f"{job['parameters'] / 1e6:,.0f} M parameters, vocabulary {model['vocab_size']:,}"
    return f"{where}: {size}, {job['precision']}, allocator {result['environment']['allocator']}"


def section(result: dict[str, Any], picture: str, source: str) -> str:
    """One result as Markdown. picture, source: its plot and its raw data, relative to README.md."""
    job, model, hardware = result["job"], result["job"]["model"], result["hardware"]
    versions: dict[str, str] = {}
    for raw in result["contestants"].values():
        versions |= raw["versions"]
    product = [result["matmul"]["flops"] * result["steps"] / seconds for seconds in result["matmul"]["seconds"]]
    passes = f", {job['accumulate']} passes a step" if job["accumulate"] > 1 else ""
    variables = " ".join(f"{name}={value}" for name, value in result["environment"]["variables"].items())
    facts = [
        f"Llama 3 with dim {model['dim']}, {model['n_layers']} layers, {model['n_heads']} heads ({model['n_kv_heads']} of "
        f"keys and values), feed-forward {model['ffn_dim']}; {job['batch']} x {job['seq']} tokens{passes}; recomputed: "
        f"{job['recompute']}. Medians of {result['rounds']} rounds of {result['steps']} steps, "
        f"{'a process at a time' if result['one_at_a_time'] else 'all processes kept'}.",
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']:.0f} GB"
        + (f", {hardware['gpu']}, CUDA {hardware['cuda']}" if "gpu" in hardware else "")
        + f". {', '.join(f'{name} {version}' for name, version in versions.items())}."
        + (f" Environment: `{variables}`." if variables else ""),
        f"A large matmul: {sorted(product)[len(product) // 2] / 1e12:.3g} TFLOP/s"
        + ("" if result["datasheet_flops"] is None else f"; data sheet: {result['datasheet_flops'] / 1e12:,.0f} TFLOP/s")
        + f". A token: {result['flops']['causal'] / 1e9:.3g} GFLOP causal, {result['flops']['palm'] / 1e9:.3g} PaLM.",
    ]
    options = {name: raw["keys"].get("options") for name, raw in result["contestants"].items() if raw["keys"].get("options")}
    facts += [f"`{name}`: `{' '.join(words)}`." for name, words in options.items()]
    absent = result["left_out"] | result["failed"]
    facts += [f"Not measured: {name}: {reason.strip().splitlines()[-1]}." for name, reason in absent.items()]
    changed = " with uncommitted changes" if result["changed"] else ""
    made = f"[{source}]({source}), {result['date'][:10]}, commit {str(result['commit'])[:10]}{changed}: `{result['command']}`"
    lines = [f"### {title(result)}", "", *facts, "", markdown(table(result)), "", f"![{title(result)}]({picture})", "", made]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Two panels: tokens per second of every contestant, each round a point; and its peak memory by parts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    job = result["job"]
    tokens = job["accumulate"] * job["batch"] * job["seq"] * result["steps"]
    found = dict(sorted(figures(result).items(), key=lambda item: item[1].tokens_per_second))
    colors = ["tab:orange" if name.startswith(OURS) else "tab:blue" for name in found]
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 1.2 + 0.4 * len(found)), sharey=True)
    speed.barh(list(found), [f.tokens_per_second for f in found.values()], color=colors, alpha=0.6)
    for place, name in enumerate(found):
        rates = [tokens / seconds for seconds in result["contestants"][name]["seconds"]]
        speed.plot(rates, [place] * len(rates), "k.", markersize=3)
    speed.set_xlabel("tokens per second: median, and each round")
    state = [(f.peak - f.above_state) / 1e9 for f in found.values()]
    libraries = [(f.above_state - f.net) / 1e9 for f in found.values()]
    rest = [f.net / 1e9 for f in found.values()]
    memory.barh(list(found), state, color="0.5", label="parameters, gradients, moments")
    memory.barh(list(found), libraries, left=state, color="0.8", label="libraries")
    bottom = [a + b for a, b in zip(state, libraries, strict=True)]
    memory.barh(list(found), rest, left=bottom, color=colors, alpha=0.6, label="all else")
    memory.set_xlabel("peak memory, GB")
    memory.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    figure.suptitle(title(result), fontsize="medium", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def fill(text: str, sections: list[str]) -> str:
    """The text with the sections between the marks. Raises ValueError unless it has both marks once, in this order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"must contain one line {BEGIN} followed by one line {END}")
    body = "\n\n".join(sections) if sections else "No results yet."
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{body}\n\n{text[text.index(END) :]}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--folder", type=Path, default=_HERE, help="the folder of README.md and results/")
    folder = parser.parse_args(words).folder
    sections = []
    for path in sorted((folder / "results").glob("throughput_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        picture = path.with_suffix(".png")
        plot(result, picture)
        sections.append(section(result, f"results/{picture.name}", f"results/{path.name}"))
    for path in sorted((folder / "results").glob("curves.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        picture = path.with_suffix(".png")
        curves.plot(result, picture)
        sections.append(curves.section(result, f"results/{picture.name}", f"results/{path.name}"))
    readme = folder / "README.md"
    try:
        readme.write_text(fill(readme.read_text(encoding="utf-8"), sections), encoding="utf-8")
    except ValueError as error:
        print(f"{readme}: {error}", file=sys.stderr)
        return 1
    print(f"{readme}: {len(sections)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
