"""Exceptions that nobody has foreseen, in the phases of each command."""

import contextlib
import functools
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.hostile.judge import Case
from titanlite import __main__
from titanlite.ground import errors
from titanlite.launch import stacks

_RUN = """[job]
dump_folder = "out"
"""


_STEP = "step-00000010"
_ERRORS_A_WAY = 1


class Way(NamedTuple):
    """A phase of a command that fails."""

    command: str
    fails: str  # the function that raises instead of what it does
    phase: str  # as the report names it
    replaced: tuple[str, ...] = ()  # functions before it, which do nothing


CONFIG = "reading the configuration", "checking the configuration"
HF = "--checkpoint out --output new"
WAYS = [
    Way("no-such", "difflib.get_close_matches", "starting"),
    *(
        Way(f"{command} run.toml", f"titanlite.config.read.{part}", CONFIG[0])
        for part in ("_load_toml", "_parse_options")
        for command in ("check", "launch", "estimate", "data show", "data stats", "verify")
    ),
    *(
        Way(f"{command} run.toml", f"titanlite.loop.checks.{part}", CONFIG[1])
        for command in ("check", "estimate", "data stats", "verify")
        for part in ("run_folder.faults", "mesh.faults", "sources.faults")
    ),
    Way("check run.toml", "titanlite.launch.run_folder.other_run", "starting", ("titanlite.loop.checks.check",)),
    Way("launch run.toml", "titanlite.tools.launch.read_layout", "starting"),
    Way(
        "estimate run.toml", "titanlite.plan.predict.resolve_degrees", "predicting a step", ("titanlite.tools.estimate.check",)
    ),
    Way("data stats run.toml", "titanlite.data.mixture.open_tokenizer", "opening the data", ("titanlite.tools.data.check",)),
    Way("data stats run.toml", "titanlite.data.mixture.open_source", "opening the data", ("titanlite.tools.data.check",)),
    Way("verify run.toml", "titanlite.data.mixture.open_source", "opening the data", ("titanlite.tools.verify.check",)),
    Way(
        "verify run.toml",
        "titanlite.launch.local_ranks.multiprocessing.start_processes",
        "starting",
        ("titanlite.tools.verify.check", "titanlite.tools.verify.open_data"),
    ),
    Way("tokenize --input x --output y --tokenizer out", "titanlite.tools.tokenize.load_tokenizer", "starting"),
    Way(
        "tokenize --input x --output y --tokenizer out",
        "titanlite.data.prepare.prepare._refuse_existing",
        "tokenizing",
        ("titanlite.tools.tokenize.load_tokenizer", "titanlite.tools.tokenize.load_template"),
    ),
    Way("checkpoint list out", "titanlite.tools.checkpoint.list_steps", "starting"),
    Way("checkpoint list out", "titanlite.tools.checkpoint.checkpoints", "starting"),
    Way("checkpoint show out", "titanlite.tools.checkpoint.checkpoints", "starting"),
    Way(f"checkpoint verify out/checkpoint/{_STEP}", "titanlite.checkpoint.load.manifest.read", "verifying the checkpoint"),
    Way("check-model llama3", "titanlite.tools.check_model.load_module", "starting"),
    Way("check-model llama3", "titanlite.tools.check_model.choose_small", "starting"),
    Way("import-hf --source out --output new", "titanlite.tools.import_hf.recognize", "starting"),
    Way("export-hf " + HF, "titanlite.tools.export_hf.checkpoints", "starting"),
    Way("export-torch " + HF, "titanlite.tools.export_torch.start_output", "starting"),
    Way("replay out --step 3", "titanlite.tools.replay.setting_of", "starting"),
    Way("replay out --step 3", "titanlite.config.read._load_toml", CONFIG[0]),
    Way("generate out --prompt x", "titanlite.tools.generate.model_source", "starting"),
    Way("generate out --prompt x", "titanlite.tools.generate.on_ranks", "starting", ("titanlite.tools.generate.model_source",)),
    Way("eval out --tasks x", "titanlite.tools.eval.model_source", "starting"),
]
TRAIN = [
    Way("train run.toml", "titanlite.config.read._load_toml", CONFIG[0]),
    *(Way("train run.toml", f"titanlite.loop.checks.{part}", CONFIG[1]) for part in ("run_folder.faults", "mesh.faults")),
    Way("train run.toml", "titanlite.train.resolve_degrees", "starting"),
    Way("train run.toml", "titanlite.train.RunLock", "starting"),
    Way("train run.toml", "titanlite.train.process.start", "starting"),
    Way("train run.toml", "titanlite.launch.stacks.file_of", "starting", ("titanlite.train.process.start",)),
    Way("train run.toml", "titanlite.train.open_on_every_rank", "starting", ("titanlite.train.process.start",)),
    Way("train run.toml", "titanlite.data.mixture.open_source", "opening the data", ("titanlite.train.process.start",)),
]

# what is raised -> (the exception, its words in the report, the exit code)
ERRORS: dict[str, tuple[Callable[[], BaseException], str, int]] = {
    "KeyError": (lambda: KeyError("boom"), "KeyError: 'boom'", 1),
    "two lines": (lambda: RuntimeError("one\ntwo"), "RuntimeError: one", 1),
    "no text": (TypeError, "TypeError", 1),
    "an assertion": (lambda: AssertionError("no"), "AssertionError: no", 1),
    "RecursionError": (lambda: RecursionError("too deep"), "RecursionError: too deep", 1),
    "OverflowError": (lambda: OverflowError("too large"), "OverflowError: too large", 1),
    "no memory": (MemoryError, "out of memory", 2),
    "no memory on a GPU": (
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        "out of memory, 2.00",
        2,
    ),
    "a full disk": (lambda: OSError(28, "No space left on device", "out/config.toml.tmp"), "OSError: .Errno 28. No space", 2),
}


def run_command(*words: str) -> None:
    """`titanlite` with these words, in this process."""
    with contextlib.ExitStack() as stack:
        for name in ("signal.signal", "titanlite.launch.stop.listen", "titanlite.launch.stop.leave_at_once"):
            stack.enter_context(mock.patch(name))
        stack.enter_context(mock.patch.object(os, "_exit", sys.exit))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        stack.enter_context(mock.patch.object(sys, "argv", ["titanlite", *words]))
        stack.enter_context(mock.patch.object(errors, "_position", (0, "starting")))
        stack.callback(stacks.close_dump)
        __main__.main()


def failing(way: Way, error: Callable[[], BaseException], folder: Path) -> Callable[[], object]:
    """A command of `titanlite` in this process, of which a function fails."""
    (folder / "run.toml").write_text(_RUN)
    (folder / f"out/checkpoint/{_STEP}").mkdir(parents=True)
    (folder / f"out/checkpoint/{_STEP}/manifest.json").write_text("{}")
    (folder / "out/config.toml").write_text(_RUN)
    (folder / "out/provenance.json").write_text("[]")

    def run() -> None:
        patch = functools.partial(mock.patch, new_callable=mock.MagicMock)
        with contextlib.ExitStack() as stack:
            for name in way.replaced:
                stack.enter_context(patch(name))
            stack.enter_context(patch(way.fails, side_effect=lambda *_, **__: _raise(error())))
            run_command(*way.command.split())

    return run


def _raise(error: BaseException) -> Any:
    raise error


def cases(seed: int) -> Iterator[Case]:
    """Each phase with some of the exceptions, drawn."""
    draw = random.Random(seed)
    for way in [*WAYS, *TRAIN]:
        who = "rank 0" if way in TRAIN else f"titanlite {way.command.split()[0]}"
        for name in draw.sample(list(ERRORS), _ERRORS_A_WAY):
            error, words, code = ERRORS[name]
            place = ", ".join(dict.fromkeys((who, "starting", re.escape(way.phase))))
            pattern = rf"{place}: {words}[^\n]*; traceback: \S+(\n|$)"
            leaves = r"out/(\.lock|stacks/rank-0\.txt)" if way in TRAIN else ""
            title = f"{way.command}: {way.fails.removeprefix('titanlite.')} raises {name}"
            yield Case("unforeseen", title, functools.partial(failing, way, error), pattern, code=code, leaves=leaves)
