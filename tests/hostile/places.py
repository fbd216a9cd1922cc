"""Run folders that cannot be written, and folders that collide. Garbage in the files of a run: files.py."""

import functools
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.judge import Case
from titanlite.config.read import read_config
from titanlite.launch import stacks
from titanlite.launch.run_folder import RunLock, owned_folders, record_start
from titanlite.loop.checks import check
from titanlite.loop.divergence import Incidents
from titanlite.loop.metrics import Reporter

Make = Callable[[Path], Callable[[], object]]

_RUN = """[job]
dump_folder = "out"
[checkpoint]
enable = true
keep_latest_k = 1
[metrics]
enable_tensorboard = false
"""
_FOLDERS = {  # keys that name folders in a run folder -> the defaults
    "checkpoint.folder": "checkpoint",
    "metrics.save_tb_folder": "tb",
    "profiling.save_traces_folder": "profile_traces",
    "profiling.save_memory_snapshot_folder": "memory_snapshot",
}
_FILES = (".lock", "config.toml", "provenance.json", "metrics.jsonl", "incidents.jsonl", "checkpoint/.lock")
_STEP = "step-00000010"
_DRAWN = 80  # cases


def start(*options: str) -> None:
    """What a start does in its folder before the first step: the check, then rank 0's files."""
    config = read_config("run.toml", list(options))
    check(config, "run.toml", 1, open_files=False)
    dump = Path(config.job.dump_folder)
    lock = RunLock(*owned_folders(config))
    try:
        stacks.open_dump(dump, 0)
        record_start(config, {})
        reporter = Reporter(config, 1, active=True)
        Incidents(config, 8, 1, active=True)
        reporter.report(1, {"loss": 1.0})
        lock.keep()
        reporter.close()
        stacks.close_dump()
    finally:
        lock.close()
    assert read_config(dump / "config.toml", []) == config, "config.toml is another configuration"
    assert json.loads((dump / "metrics.jsonl").read_text().splitlines()[-1]) == {"step": 1, "loss": 1.0}, "no report"


def in_a_run(put: Callable[[Path], object], *options: str, action: Callable[..., None] = start) -> Make:
    """A run folder `out` with something put into it, and a start there."""

    def make(folder: Path) -> Callable[[], object]:
        (folder / "run.toml").write_text(_RUN)
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere/file").write_text("of another program")
        (folder / "out").mkdir()
        put(folder / "out")
        return functools.partial(action, *options)

    return make


def above(path: Path) -> Path:
    """The path, in a folder that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def elsewhere(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "out").parent / "elsewhere"


# ------------------------------------------------------------------------------------------------------ the folder itself


def run_folders() -> Iterator[Case]:
    """Things that are not a run folder."""
    values = {
        "a file": "elsewhere/file",
        "in a file": "elsewhere/file/out",
        "a device": "/dev/null",
        "in a device": "/dev/null/out",
        "a dangling link": "dangling",
        "a loop of links": "loop",
        "a FIFO": "fifo",
    }

    def put(out: Path) -> None:
        (out.parent / "dangling").symlink_to("nowhere")
        (out.parent / "loop").symlink_to("loop")
        os.mkfifo(out.parent / "fifo")

    for name, value in values.items():
        yield Case(f"job.dump_folder is {name}", in_a_run(put, "--job.dump_folder", value), r"job\.dump_folder")
    mine = "# of the user's\n"
    yield Case("config.toml is of the user's", in_a_run(lambda out: (out / "config.toml").write_text(mine)), r"config\.toml")


# ----------------------------------------------------------------------------------------------------- folders that collide


def colliding_options() -> Iterator[Case]:
    """Each key that names a folder, with the name of something else."""
    wrong = ["", ".", "..", "../elsewhere", "a/../..", "/tmp/elsewhere", "./", "elsewhere/../../out"]
    names = [name for name in _FILES if "/" not in name] + ["stacks", "comm_traces"]
    for key in _FOLDERS:
        taken = [*names, *(folder for other, folder in _FOLDERS.items() if other != key)]
        inside = [f"{name}/inside" for name in taken]
        for value in [*wrong, *taken, *inside, f"./{taken[-1]}/.", "stacks/../stacks"]:
            option = f"--{key}={value}"
            yield Case(f"{key} = {value[:30]!r}", in_a_run(lambda out: None, option), re.escape(key))
    pairs = [(one, other) for one in _FOLDERS for other in _FOLDERS if one < other]
    for one, other in pairs:
        for first, second in (("same", "same"), ("same", "same/inside"), ("same/inside", "same"), ("a/./b", "a//b")):
            options = (f"--{one}={first}", f"--{other}={second}")
            name = f"{one} = {first!r} and {other} = {second!r}"
            yield Case(name, in_a_run(lambda out: None, *options), re.escape(other))


def cases(seed: int) -> Iterator[Case]:
    """A random part of the colliding folders, and all other cases."""
    found = list(colliding_options())
    yield from random.Random(f"places {seed}").sample(found, min(_DRAWN, len(found)))
    yield from run_folders()
