"""titanlite check-model NAME[:flavor] [--rows causality,tp2] [--model.overrides.dim 512 ...]

Proves that a model file still shards, compiles, checkpoints and converts. On the meta device the command checks the named
flavor, or all of them. On the CPU it trains a small flavor for a few steps on random tokens, in one process and on meshes of
two and four. Each failure names the parameter or the line in your file. Exit code 0: all checks passed; 1: a check failed; 2:
there is nothing to check; 3: no check failed, but a difference is undecided: it is a fault or rounding.

--coordinates trains the small flavor at four widths instead, and compares the sizes of activations: with muP
(--model.overrides.mup_base_dim 64) they are equal at each width. --output draws them.

--rows selects rows of the table, by names with or without spaces, and runs the rows that they need. Overrides change dimensions
of every flavor, including the one that is trained.
"""

import difflib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from titanlite.config.read import read_config
from titanlite.config.schema import Model
from titanlite.ground.errors import UserError
from titanlite.registry.family import BrokenModule, Family, flavor_of, load_module
from titanlite.tools.options import command_parser, new_file, nonempty
from titanlite.verify.coordinates import growing, measure, picture, table
from titanlite.verify.table import ROWS, choose_small, family_of_flavor, rows_of


def _use_one_thread() -> None:
    """In this process, and in each rank, unless OMP_NUM_THREADS is set.

    The models are small. Threads wait for each other after each operation: where other programs run too, that took ten times
    as long for MoE models, whose matmuls are many and small.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def _selected(names: str | None) -> list[str]:
    """The rows that --rows names; spaces and case do not matter. Raises UserError for an unknown one."""
    rows = {row.replace(" ", "").lower(): row for row in ROWS}
    words = [] if names is None else [word.replace(" ", "").lower() for word in names.split(",")]
    if unknown := [word for word in words if word not in rows]:
        close = [f"; did you mean {rows[word]}?" for word in difflib.get_close_matches(unknown[0], rows, n=1)]
        raise UserError(f"--rows {names}: there is no row {unknown[0]!r}{''.join(close)}\nthe rows: {', '.join(ROWS)}")
    return [rows[word] for word in words]


def _overrides(options: list[str]) -> dict[str, Any]:
    """The dimensions of --model.overrides.NAME VALUE. Raises UserError for any other option."""
    key = "--model.overrides"
    if other := [word for word in options if word.startswith("--") and not word.startswith((f"{key}.", f"{key}="))]:
        raise UserError(f"{', '.join(other)}: check-model takes --rows, --coordinates, --output and {key}.NAME VALUE")
    return read_config(None, options).model.overrides


def _check_overrides(name: str, module: ModuleType, flavors: list[str], overrides: dict[str, Any]) -> None:
    """Raises UserError for wrong overrides, before the first line of the table."""
    refused = {}
    for flavor in flavors:
        try:
            family_of_flavor(name, module, flavor, overrides)
        except UserError as error:
            refused[flavor] = error
    if refused:
        others = [f"{name}:{flavor}" for flavor in flavors if flavor not in refused]
        of_flavors = (
            f"\nrefused by the flavors {', '.join(refused)}; name one that takes them: {', '.join(others)}" if others else ""
        )
        raise UserError(f"{next(iter(refused.values()))}{of_flavors}")


def _check_coordinates(family: Family, output: Path | None) -> int:
    """Prints the table of the coordinate check, and draws it; returns the exit code."""
    measured = measure(family)
    print(table(measured))
    if output is not None:
        output.write_text(picture(measured), encoding="utf-8")
    for fault in (faults := growing(measured)):
        print(f"FAILED  {fault}")
    print(f"{len(faults)} of {len(measured.sizes)} grow or shrink with the width" if faults else "all stay flat")
    return 1 if faults else 0


def main() -> None:
    """Exit code 0: all checks passed; 1: a check failed; 2: a user error; 3: none failed, but one is undecided."""
    parser = command_parser("check-model", __doc__)
    parser.add_argument("model", type=nonempty, help="such as llama3, llama3:8b or my_models.mine:debug")
    parser.add_argument("--rows", type=nonempty, help=", ".join(ROWS))
    parser.add_argument("--coordinates", action="store_true", help="the coordinate check of muP, instead of the rows")
    parser.add_argument("--output", type=new_file, metavar="FILE.svg", help="with --coordinates: the picture")
    known, options = parser.parse_known_args()
    if known.output is not None and not known.coordinates:
        raise UserError("--output: has an effect with --coordinates only")
    if known.rows and known.coordinates:
        raise UserError("--rows: has no effect with --coordinates, which shows no rows")
    _use_one_thread()
    model, overrides, selected = known.model, _overrides(options), _selected(known.rows)
    name, _, flavor = model.partition(":")
    try:
        module = load_module(name)
        flavor = flavor_of(module, flavor)
        if not module.FLAVORS or (flavor and flavor not in module.FLAVORS):
            raise UserError(f"{model}: {name} has the flavors {', '.join(module.FLAVORS) or '(none)'}")
        flavors = [flavor] if flavor else list(module.FLAVORS)
        if flavor or not known.coordinates:  # which trains one flavor; others may refuse these overrides
            _check_overrides(name, module, flavors, overrides)
        if known.coordinates:
            chosen = choose_small(name, module, flavors, overrides) or flavors[0]
            family = family_of_flavor(name, module, chosen, overrides)
            print(f"{Model(name=name, flavor=chosen, overrides=overrides).title} trained at four widths")
            sys.exit(_check_coordinates(family, known.output))
        small = choose_small(name, module, flavors, overrides)
    except BrokenModule as error:
        print(f"{'imported':<20} FAILED    {error}")
        sys.exit(1)
    title = Model(name=name, flavor=", ".join(flavors), overrides=overrides).title.replace(" ", ": ", 1)
    print(f"{title} on meta; {small or 'nothing'} trained")
    verdicts, begun = list[str](), time.monotonic()
    for row in rows_of(name, module, flavors, small, overrides, selected):
        verdicts.append(row.verdict)
        lines = [line for text in row.texts for line in text.splitlines()]
        words = f"{row.name:<20} {row.verdict:<9} {row.seconds:5.1f} s", *lines[:1]
        print("  ".join(words), *(f"{'':<40}{line}" for line in lines[1:]), sep="\n", flush=True)
    failed, undecided = verdicts.count("FAILED"), verdicts.count("undecided")
    result = f"{failed} of {len(verdicts)} checks failed" if failed else f"{undecided} undecided" if undecided else "all passed"
    print(f"{'total':<30} {time.monotonic() - begun:5.1f} s", result, sep="\n")
    sys.exit(1 if failed else 3 if undecided else 0)
