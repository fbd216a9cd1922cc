"""python -m tests.campaigns PART [--only TEXT] [--minutes M] [--again]: proofs that take hours, run by hand.

PART is one of
  cells      every supported mesh x family x compile x recompute x precision, each against one process
  pipelines  every schedule x mesh with stages x variant, each against one process
  kills      runs that are killed 10 times each, on two and on four ranks
  damage     stopped runs that continue with one damaged file
  elastic    runs that continue with other numbers of ranks, and on other meshes
  two-hosts  two network namespaces and the cable between them
  processors the tests under other kernels, threads, weights, orders, users, paths, locales, time zones, load and pauses (69
             rows of 5 to 20 minutes; `--only sample`: a few tests under each, 3 minutes)
  collectives  200,000 small collectives that overlap, among four ranks
  mutants    faults in the code, each caught by some test: python -m tests.mutations.score --suite
  tests      the cases of the tests that `make test-all` leaves out: pytest -m campaign

Each item is a row of tests/campaigns/results/PART.md as soon as it is done. An interrupted campaign continues if the commit is
the same; another commit or --again starts over. With --only, the rows of another commit are a second table below the first.
Each table names the commit it was made on. Exit code 1: an item of the table has broken a promise, and its folder is kept.
"""

import argparse
import itertools
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from tests.campaigns import NOT_RUN, Mesh, Report, collectives, damage, elastic, kill, pipelines, processors, two_hosts
from tests.distributed import cells, cover
from tests.distributed.pool import Pool, WorkerFailure
from titanlite.verify.compare import compare

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).parents[2]
Item = Callable[[Path], Report]  # takes a working folder
FULL = ("mesh", "family", "compile", "recompute", "precision")
_HEADER = "| item | result | seconds | measured |\n| --- | --- | --- | --- |\n"


def every_cell() -> Iterator[cover.Cell]:
    """The full product of some factors; the values of the others are drawn for each cell."""
    for values in itertools.product(*(cover.FACTORS[factor] for factor in FULL)):
        given = dict(zip(FULL, values, strict=True))
        if cover.possible(given) and given["mesh"] not in cover.PIPELINES:  # PART=pipelines has these
            draw = random.Random(repr(values))
            drawn = {factor: draw.choice(cover.FACTORS[factor]) for factor in cover.FACTORS if factor not in FULL}
            cell = given
            for factor, value in drawn.items():
                cell |= {factor: value if cover.possible(cell | {factor: value}) else cover.PLAIN[factor]}
            yield {factor: cell[factor] for factor in cover.FACTORS}


def against_one_process(pools: dict[int, Pool], every: Iterable[cover.Cell]) -> dict[str, Item]:
    references: dict[tuple[str, ...], cells.Trajectory] = {}

    def play(cell: cover.Cell) -> Report:
        plain = cells.reference_of(cell)
        key = tuple(plain.values())
        try:
            if key not in references:
                references[key] = cells.run(pools, plain)[0]
            found, graphs = cells.run(pools, cell)
        except WorkerFailure as failure:
            return Report({}, [str(failure).splitlines()[-1]])
        faults = cells.faults(cell, found, references[key])
        faults += [] if graphs in cells.graphs_of(cell) else [f"{graphs} graphs"]
        comparison = compare(found, references[key])
        return Report(
            {quantity: f"{comparison.worst(quantity).size:.1e}" for quantity in ("losses", "norms", "gradients")}, faults
        )

    return {cover.name(cell): lambda _, cell=cell: play(cell) for cell in every}


def cell_items() -> dict[str, Item]:
    return against_one_process({size: Pool(size) for size in (1, 2, 4, 8)}, every_cell())


def pipeline_items() -> dict[str, Item]:
    return against_one_process({size: Pool(size) for size in (1, 2, 4)}, pipelines.every_cell())


def kill_items() -> dict[str, Item]:
    kills = kill.ALL_VICTIMS
    return {
        f"{name}, seed {seed}": lambda folder, kind=kind, seed=seed: kill.campaign(folder, kind, kills, seed, at_once=3)
        for seed in range(3)
        for name, kind in kill.KINDS.items()
    }


def damage_items() -> dict[str, Item]:
    items = [("", Mesh(2), seed) for seed in range(10)] + [("2 stages, ", Mesh(stages=2), seed) for seed in range(2)]
    return {
        f"{name}seed {seed}": lambda folder, seed=seed, mesh=mesh: damage.campaign(folder, 20, seed, mesh)
        for name, mesh, seed in items
    }


def elastic_items() -> dict[str, Item]:
    shards = ("4 2 3 4", "1 2 4 3 1", "3 1 2 1 4 2")
    of_stages = ("1x1x1x2 1 1x1x1x4", "2x1x1x2 2 1x1x1x2 4", "1x1x2x2 1x1x1x4 3 2x1x2")
    return {
        series: lambda folder, series=series: elastic.campaign(folder, [*map(Mesh.of, series.split())], steps=4)
        for series in shards + of_stages
    }


def host_items() -> dict[str, Item]:
    if reason := two_hosts.obstacle():
        sys.exit(f"no two hosts here: {reason}")
    return {case: lambda folder, case=case: two_hosts.campaign(folder, [case]) for case in two_hosts.CASES}


PARTS = {
    "cells": cell_items,
    "pipelines": pipeline_items,
    "kills": kill_items,
    "damage": damage_items,
    "elastic": elastic_items,
    "two-hosts": host_items,
    "processors": processors.items,
    "collectives": lambda: {f"seed {seed}": lambda _, seed=seed: collectives.play(seed) for seed in collectives.SEEDS},
}


def commit() -> str:
    """The commit of the tree, and whether anything but results differs from it."""
    name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    words = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}"]
    changed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return name + (" with changes" if changed else "")


def begin(path: Path, part: str, again: bool, only: str) -> dict[str, str]:
    """The results in the table of this commit, by item. Tables of others are removed, or stay if `only` is given."""
    title = f"# make campaign PART={part}\n\nCommit {commit()}; {os.cpu_count()} cores, Python {platform.python_version()}, "
    title += f"PyTorch {torch.__version__}.\n\n"
    before = path.read_text() if path.exists() and not again else ""
    if title in before:
        rows = before.partition(title)[2].splitlines()
        cells = [line.split(" | ") for line in rows if line.startswith("| ")]
        return {name.removeprefix("| "): result for name, result, *_ in cells if result not in ("result", "---")}
    path.parent.mkdir(exist_ok=True)
    path.write_text((before + "\n" if before and only else "") + title + _HEADER)
    return {}


def row(name: str, report: Report, seconds: float) -> str:
    result = "; ".join(report.broken).replace("\n", " ").replace("|", "/") or report.verdict
    figures = ", ".join(f"{key.strip()} {value}" for key, value in report.figures.items())
    return f"| {name} | {result} | {seconds:.0f} | {figures} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("part", choices=[*PARTS, "mutants", "tests"])
    parser.add_argument("--only", default="", help="items with this in their names; of tests, an expression for pytest -k")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no item after so many minutes")
    parser.add_argument("--again", action="store_true")
    words = parser.parse_args()
    if words.part in ("mutants", "tests"):
        only = ["-k", words.only] if words.only else []
        if words.minutes < float("inf") or (only if words.part == "mutants" else words.again):
            parser.error("mutants has --again, and tests has --only; they have no other option")
        tests = ["pytest", "-q", "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", "-m", "campaign", *only]
        mutants = ["tests.mutations.score", "--suite", *["--again"] * words.again]
        os.execv(sys.executable, [sys.executable, "-m", *(tests if words.part == "tests" else mutants)])
    path, started = RESULTS / f"{words.part}.md", time.monotonic()
    results = begin(path, words.part, words.again, words.only)
    for name, play in PARTS[words.part]().items():
        if name in results or words.only not in name:
            continue
        if time.monotonic() - started > 60 * words.minutes:
            break
        begun = time.monotonic()
        folder = tempfile.mkdtemp(prefix=f"{words.part}-")
        report = play(Path(folder))
        if report.broken:
            print(f"all that was written is in {folder}")
        else:
            shutil.rmtree(folder)
        line = row(name, report, time.monotonic() - begun)
        with open(path, "a") as table:
            table.write(line)
        print(line, end="", flush=True)
        results[name] = line.split(" | ")[1]
    sys.exit(0 if "good" in results.values() and {*results.values()} <= {"good", NOT_RUN} else 1)


if __name__ == "__main__":
    main()
