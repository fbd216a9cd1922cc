"""The kernels that inductor makes for an H100, as a table that is committed: kernels_sm90.md.

    python -m tests.cuda_shim.kernels          writes the table
    python -m tests.cuda_shim.kernels CASE     prints the section of a case

inductor.py compiles them, in a process with the shim.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cuda_shim import build

TABLE = Path(__file__).with_name("kernels_sm90.md")


def _case(name: str, flavor: str, parts: list[str], planted: bool = False, **sections: dict[str, Any]) -> dict[str, Any]:
    """parts: "model", "loss" (as in `compile.components`) and "optimizer"; the others do not run."""
    training = {"seq_len": 4096, "local_batch_size": 1, "mixed_precision_param": "bfloat16", "dtype": "bfloat16"}
    config = {
        "model": {"name": name, "flavor": flavor},
        "compile": {"enable": True, "components": [part for part in parts if part != "optimizer"] or ["model"]},
        "activation_checkpoint": {"mode": "none"},
        **sections,
        "training": training | sections.get("training", {}),
    }
    return {"config": config, "parts": parts, "planted": planted}


CASES: dict[str, dict[str, Any]] = {
    "Llama 3 8B: block, head, AdamW": _case("llama3", "8b", ["model", "loss", "optimizer"]),
    "Llama 3 8B: AdamW with remainders": _case("llama3", "8b", ["optimizer"], optimizer={"rounding": "compensated"}),
    "Llama 3 8B: Muon": _case("llama3", "8b", ["optimizer"], optimizer={"name": "Muon"}),
    "Llama 3 8B: block with document_mask": _case("llama3", "8b", ["model"], training={"document_mask": True}),
    "Qwen 3 8B: block": _case("qwen3", "8b", ["model"]),
    "Gemma 3 4B: blocks": _case("gemma3", "4b", ["model"]),
    "planted": _case("llama3", "debug", ["model"], planted=True, training={"seq_len": 128}),
}


def why_not() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed: pip install 'titanlite[dev]'"
    return build.why_not()


def versions() -> str:
    """What the table depends on."""
    return f"PyTorch {importlib.metadata.version('torch').partition('+')[0]}, Triton {importlib.metadata.version('triton')}"


def compiled(cases: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The regions of each case, with their kernels."""
    command = [sys.executable, "-m", "tests.cuda_shim.inductor", *cases]
    result = subprocess.run(command, env=build.build(folder), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    return {line["case"]: line["regions"] for line in map(json.loads, result.stdout.splitlines())}


# What a block may call besides inductor's own kernels: matmuls, and attention's kernels.
_PRODUCTS = ("mm", "addmm", "bmm")


def fallbacks(kernels: list[dict[str, Any]]) -> list[str]:
    """The calls that are neither Triton's kernels nor matmuls nor attention."""
    names = [kernel["name"] for kernel in kernels]
    return [name for name in names if not (name.startswith("triton_") or name in _PRODUCTS or "_dot_product_" in name)]


def section(case: str, regions: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"## {case}", ""]
    for region, kernels in regions.items():
        lines += [f"### {region}", "", "| kernel | configurations | registers | spilled bytes | shared bytes |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for kernel in kernels:
            numbers = (str(kernel.get(key, "")) for key in ("configurations", "registers", "spilled", "shared"))
            lines.append(f"| `{kernel['name']}` | {' | '.join(numbers)} |")
        lines.append("")
    return "\n".join(lines)


def committed(case: str) -> str:
    """The section of the table."""
    text = TABLE.read_text() + "\n## "
    begin = text.index(f"## {case}\n")
    return text[begin : text.index("\n## ", begin)]


_HEAD = """# Kernels of compiled training steps for sm_90

{versions}. `python -m tests.cuda_shim.kernels` writes this file, and `tests/unit/test_cuda_kernels.py` compares it. One rank,
bfloat16 parameters, one sequence of 4,096 tokens, no recomputation. Nothing here was measured on a GPU.

Each region lists what inductor's program calls, in order; "#2" is the same function compiled for other shapes. Registers and
spilled bytes (the stack) are those of a thread, by the machine code that ptxas makes; shared bytes are a block's, which an H100
has 232,448 for. Where autotuning would choose among
several configurations, they are the largest of any.

"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        chosen = sys.argv[1:] or [case for case in CASES if case != "planted"]
        sections = [section(case, regions) for case, regions in compiled(chosen, Path(folder)).items()]
    if sys.argv[1:]:
        print("\n".join(sections))
    else:
        TABLE.write_text(_HEAD.format(versions=versions()) + "\n".join(sections))


if __name__ == "__main__":
    main()
