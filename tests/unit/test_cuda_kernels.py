"""Inductor and Triton compile a training step for sm_90, without a GPU: the committed table of kernels (tests/cuda_shim).

A change of the table may be intended: `python -m tests.cuda_shim.kernels` writes it again, and its diff shows the change.
"""

import difflib
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_shim.kernels import CASES, TABLE, committed, compiled, fallbacks, section, versions, why_not

_OTHER_VERSIONS = not why_not() and versions() not in TABLE.read_text()
_COMPILED = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def regions(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The kernels of the cases in this session."""
    chosen = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    }
    return compiled([case for case in CASES if case in chosen], tmp_path_factory.mktemp("kernels"))


@pytest.mark.skipif(_OTHER_VERSIONS, reason="the table of kernels was made with other versions of PyTorch and Triton")
@pytest.mark.parametrize("case", [pytest.param(case, marks=_COMPILED) for case in CASES if case != "planted"])
def test_a_step_compiles_to_the_kernels_of_the_table(regions, case):
    """Names, order, registers, spilled bytes: so there is no new fallback to PyTorch, and no lost fusion."""
    found = section(case, regions[case]).splitlines()
    difference = "\n".join(difflib.unified_diff(committed(case).splitlines(), found, "the table", "here", lineterm="", n=0))
    assert not difference, difference


@pytest.mark.parametrize("case", [pytest.param("planted", marks=_COMPILED)])
def test_a_fallback_inside_a_block_is_named(regions, case):
    assert fallbacks(regions[case]["llama3.forward, forward"]) == ["aten.sort.stable"]


_SPILLS = {
    "Llama 3 8B: block with document_mask": "flex_attention_backward",
    "Qwen 3 8B: block": "mean_mul_neg_pow_rsqrt_split",  # norm and RoPE of queries, in the worst of three configurations
    "Gemma 3 4B: blocks": "flex_attention_backward",
}


_SHARED = 227 * 1024  # bytes of shared memory that a block may have on sm_90


def rows() -> list[tuple[str, str, str, str, str]]:
    """(case, region, kernel, spilled bytes, shared bytes) of every row of the table."""
    found, case, region = [], "", ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            case = line[3:]
        elif line.startswith("### "):
            region = line[4:]
        elif line.startswith("| `"):
            name, _, _, spilled, shared = (cell.strip(" `") for cell in line.strip("|").split("|"))
            found.append((case, region, name, spilled, shared))
    return found


def test_the_table_has_every_case_no_fallback_in_a_block_only_known_spills_and_blocks_that_fit_a_gpu():
    table = rows()
    assert list(dict.fromkeys(case for case, *_ in table)) == [case for case in CASES if case != "planted"]
    # PyTorch's own create_block_mask sorts; it runs once for each batch
    in_ours = [{"name": name} for _, region, name, *_ in table if "create_block_mask" not in region]
    assert len(in_ours) > 200 and not fallbacks(in_ours)
    spills = {(case, name) for case, _, name, spilled, _ in table if spilled not in ("", "0")}
    assert len(spills) == len(_SPILLS) and all(_SPILLS.get(case, "-") in name for case, name in spills), spills
    assert max(int(shared) for *_, shared in table if shared) <= _SHARED
