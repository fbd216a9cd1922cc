"""The program on a simulated GPU (tests/cuda_shim) has no faults that a GPU would show, and planted ones are named."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.cuda_shim.build import build, why_not
from tests.cuda_shim.cells import CELLS
from tests.repetitions import campaign_but, slow_but
from tests.waiting import until

_HANGS = 6000.0  # seconds after which the program hangs: an idle core needs some 5 for a cell
pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(7200)]
_FEW = [
    "1 rank, bfloat16, compiled",
    "FSDP 4 x TP 2, EP 8, mixture, full",
    "PP 2 x FSDP 4, Interleaved1F1B, last rank, bfloat16",
]


def _covering(names: Iterable[str]) -> list[str]:
    """Those with a mesh, or a part of a variant, that none before them has."""
    shown: set[str] = set()
    found = []
    for name in names:
        if not (shows := {CELLS[name].mesh, *CELLS[name].variant.split(", ")}) <= shown:
            found.append(name)
            shown |= shows
    return found


_PLANTED = {
    "an .item() in the step": "host sync: aten._local_scalar_dense.default in tests.cuda_shim.planted:",
    "a bool index": "host sync: aten.nonzero.default in tests.cuda_shim.planted:",
    "a tensor made of numbers": "host sync: a blocking copy from cpu to cuda: ",
    "a wait for the device": "host sync: torch.cuda.synchronize() in tests.cuda_shim.planted:",
    "a float64 kernel": "float64 kernel on 262,144 values: aten._to_copy.default in tests.cuda_shim.planted:",
    "a kernel that CUDA lacks": "no CUDA kernel: aten._scaled_dot_product_flash_attention_for_cpu.default in ",
    "a recompilation": "recompiled: 1 graphs in the second step",
    "a slow kernel of attention": "wrong kernels of attention: [] instead of ",
    "a mask on the CPU": "two devices: aten._scaled_dot_product_efficient_attention.default in models.attention:",
    "a pageable copy": "pageable copy: the source is not pinned, so the host waits: aten._to_copy.default in titanlite.",
    "another copy of counts in the exchange": "host syncs: 8 copies of counts to the host in a step instead of 4",
    "a copy of counts outside of the exchange": "host sync: a blocking copy from cuda to cpu: aten._to_copy.default in ",
    "a microbatch's number on the device": "host sync: aten._local_scalar_dense.default in tests.cuda_shim.planted:",
    "a stream that does not wait": "race: it does not wait for the stream that writes what it reads: aten.sum.",
}
_OFTEN = ["an .item() in the step", "another copy of counts in the exchange"]


@pytest.fixture(scope="module")
def faults(request, tmp_path_factory) -> dict[str, str]:
    """The fault, or "", of each cell that this session runs, in two processes.

    Cells of PP x TP have a process of their own, because DTensor caches the group of another mesh's equal dimension.
    """
    chosen = [item.callspec.params["cell"] for item in request.session.items if item.path == Path(__file__)]
    folder = tmp_path_factory.mktemp("shim")
    environment = build(folder)
    running = []
    apart = [cell for cell in chosen if "PP" in cell and "TP" in cell]
    rest = [cell for cell in chosen if cell not in apart]
    parts = 2 if len(rest) > 8 else 1  # a start takes as long as a few cells
    for part, cells in enumerate(filter(None, [*(rest[part::parts] for part in range(parts)), apart])):
        output, errors = folder / f"{part}.jsonl", folder / f"{part}.log"
        command = [sys.executable, "-m", "tests.cuda_shim.program", *cells]
        process = subprocess.Popen(command, stdout=output.open("w"), stderr=errors.open("w"), env=environment)
        running.append((process, cells, output, errors))
    found = {}
    for process, cells, output, errors in running:
        until(lambda process=process: process.poll() is not None, patience=_HANGS)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        found |= dict.fromkeys(
            cells, f"the process ended with {process.returncode} before this cell: {errors.read_text()[-2000:]}"
        )
        found |= {line["cell"]: line["fault"] for line in lines}
    return found


@pytest.mark.parametrize("cell", campaign_but(_FEW, _covering([*_FEW, *CELLS]), CELLS))
def test_the_program_runs_on_a_simulated_gpu(faults, cell):
    """From initialization to generation, with the expected attention kernels. In the second step no host sync, pageable copy,
    float64 kernel, tensor on the CPU, operator without CUDA kernel, or recompilation. If experts are split, the host waits only
    for the counts, once per MoE layer and forward pass, including recomputation.
    """
    assert not faults[cell], faults[cell]


@pytest.mark.parametrize("cell", slow_but(_OFTEN, _PLANTED))
def test_a_planted_gpu_fault_is_named(faults, cell):
    assert faults[cell].startswith(f"Fault: {_PLANTED[cell]}"), faults[cell]
