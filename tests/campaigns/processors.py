"""The same tests on other kernels, threads, weights, orders, users, paths, locales and time zones, under load, and while their
processes are paused at random: no verdict may change.

    python -m tests.campaigns processors --only sample        each variant with a few tests, in minutes
    python -m tests.campaigns processors --only "numbers, ATEN_CPU_CAPABILITY=avx2"

A row is a part of the suite under one variant. Tests that fail are run once more without it; a row names each test that fails,
and whether it fails without the variant too. A variant changes the machine, never the inputs of titanlite.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import disturbed
from tests.campaigns import NOT_RUN, Report, verdicts
from tests.mutations.private_copy import copy_tree
from tests.repetitions import IN_MAKE_TEST

ROOT = Path(__file__).parents[2]
_ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")  # files belong to the user outside


class Variant(NamedTuple):
    """What differs from a plain run."""

    variables: Mapping[str, str] = {}
    options: tuple[str, ...] = ()  # of pytest
    busy: int = 0  # processes that compute in parallel with the tests, per core
    paused: bool = False  # whether random processes of the tests are paused at random instants
    through: tuple[str, ...] = ()  # a command that starts pytest
    folder: str = ""  # of a copy of the tree, below a temporary one, where the tests also put their files
    needs: str = ""  # a flag in /proc/cpuinfo; without it the first kernel ends PyTorch with SIGILL


VARIANTS = {
    "plain": Variant(),
    **{
        f"ATEN_CPU_CAPABILITY={name}": Variant({"ATEN_CPU_CAPABILITY": name}, needs=flag)
        for name, flag in (("default", ""), ("avx2", "avx2"), ("avx512", "avx512vl"))
    },
    **{f"MKL_CBWR={name}": Variant({"MKL_CBWR": name}) for name in ("COMPATIBILITY", "AVX2")},
    **{f"ONEDNN_MAX_CPU_ISA={name}": Variant({"ONEDNN_MAX_CPU_ISA": name}) for name in ("SSE41", "AVX2", "AVX512_CORE")},
    **{f"{number} threads": Variant({"OMP_NUM_THREADS": str(number)}) for number in (1, 2, 4)},
    "weights disturbed by 1e-7": Variant({disturbed.VARIABLE: "1e-7"}),
    "full load": Variant(busy=2),
    "pauses": Variant(paused=True),
    **{f"random order, seed {seed}": Variant(options=("--shuffle", str(seed))) for seed in (1, 2, 3)},
    "an ordinary user": Variant(through=_ORDINARY),
    "a deep path": Variant(folder="with a space/" + "/".join(f"deeper-{depth:02}" for depth in range(20))),
    "a Turkish locale": Variant({"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}),
    # Python uses UTF-8 in these; with ASCII (PYTHONUTF8=0), PyTorch 2.13 cannot import its compiler
    "LC_ALL=C": Variant({"LC_ALL": "C", "LANG": "C"}),
    "TZ=Pacific/Chatham": Variant({"TZ": "Pacific/Chatham"}),  # 12:45 or 13:45 hours ahead of UTC
}
# Tests that depend on rounding, memory, order, paths and texts more than others, and take seconds.
SAMPLE = (
    "tests/distributed/test_mixture_extremes.py::test_split_experts_train_as_on_one_process"
    "[most experts get no token of a step-AdamW]",
    "tests/distributed/test_exchange.py::test_a_step_with_the_worst_routing_takes_no_more_memory_than_the_estimate_says[full]",
    "tests/distributed/test_stop.py::test_a_rank_is_one_step_ahead_of_one_that_has_not_come_and_no_more",
    "tests/unit/test_optimizer.py",
    "tests/unit/test_order.py",
    "tests/unit/test_rounding.py",
    "tests/unit/test_run_folder.py",
    "tests/unit/test_documents.py",
)
PARTS = {
    "sample": SAMPLE,
    "numbers": ("tests/unit", "tests/hostile"),
    "ranks": ("tests/distributed",),
    "commands": ("tests/end_to_end",),
}
# these compare weights with a formula, which disturbed ones do not match
_EXACT_WEIGHTS = "--ignore=tests/unit/test_initialize.py"


def items() -> dict[str, Any]:
    return {
        f"{part}, {name}": lambda folder, part=part, name=name: play(folder, VARIANTS[name], PARTS[part])
        for part in PARTS
        for name in VARIANTS
    }


def together(names: Sequence[str]) -> Variant:
    """The union of these variants; no two of them set the same."""
    variants = [VARIANTS[name] for name in names]
    return Variant(
        {name: value for each in variants for name, value in each.variables.items()},
        tuple(option for each in variants for option in each.options),
        max(each.busy for each in variants),
        any(each.paused for each in variants),
        tuple(word for each in variants for word in each.through),
        "".join(each.folder for each in variants),
    )


def play(folder: Path, variant: Variant, targets: Sequence[str]) -> Report:
    """Runs these tests under a variant, and those that fail once more without it. Not where this processor cannot."""
    if variant.needs and variant.needs not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
        return Report({"why": f"this processor has no {variant.needs}"}, [], NOT_RUN)
    code, said, found = run(folder / "variant", variant, targets)
    others = [name for name, verdict in found.items() if verdict != "passed"]
    plain = run(folder / "plain", Variant(), others)[2] if others else {}
    plainly = {name: plain.get(name, "not run") for name in others}
    broken = [f"{name} fails, plainly: {plainly[name]}" for name in others if found[name] == "failed"]
    if code not in (0, 1) or not found:
        broken.append(f"pytest ended with {code}: {said[-300:]}")
    skipped = [name for name in others if found[name] == "skipped" and plainly[name] in ("passed", "failed")]
    figures: dict[str, object] = {"tests": len(found)}
    return Report(figures | ({"skipped only here": " ".join(skipped)} if skipped else {}), broken)


def run(folder: Path, variant: Variant, targets: Sequence[str]) -> tuple[int, str, dict[str, str]]:
    """-> (exit code of pytest, its output, verdict of each test). folder: does not exist."""
    place = folder / variant.folder
    place.mkdir(parents=True)
    root = ROOT
    if variant.folder:
        root = place / "tree"
        copy_tree(root)
    own = {"PYTHONPATH": str(root), "TMPDIR": str(place), verdicts.VARIABLE: str(place / "verdicts")}
    dropped = {name for each in VARIANTS.values() for name in each.variables}
    dropped |= {name for name in os.environ if name.startswith("PYTEST_")}  # set by a test that runs this
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | own | variant.variables
    options = ["-q", "-m", IN_MAKE_TEST, "-p", "tests.campaigns.verdicts", "-p", "no:cacheprovider"]
    options += variant.options
    if disturbed.VARIABLE in variant.variables:
        options.append(_EXACT_WEIGHTS)
    command = [*variant.through, sys.executable, "-m", "pytest", *options, *targets]
    mark = (verdicts.VARIABLE, own[verdicts.VARIABLE])
    with busy(variant.busy * (os.cpu_count() or 1)), pauses(*mark) if variant.paused else contextlib.nullcontext():
        done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout, verdicts.read(place / "verdicts")


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs this many computing processes while the context is open."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def pauses(variable: str, value: str) -> Iterator[None]:
    """Pauses random processes with this variable while the context is open."""
    command = [sys.executable, "-m", "tests.campaigns.pauses", variable, value]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as pausing:
        yield
        assert pausing.poll() is None
