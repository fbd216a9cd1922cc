"""`titanlite COMMAND ...` in forks of a process that has imported PyTorch: what a user gets, without the seconds of a start.

For tests of what a command does. run_train.sh and launcher.py test how it is started, and signals. A command's own ranks are
forks of the same process; test_ranks.py has those of a command that starts them itself.
"""

import atexit
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.distributed.pool import context
from tests.end_to_end.launcher import free_port
from tests.waiting import PATIENCE
from titanlite.config.read import toml_value

_OF_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK")


RUN: dict[str, Any] = {
    "job.dump_folder": "out",
    "training.dataset": "data.txt",
    "training.steps": 10,
    "training.seq_len": 32,
    "training.local_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
}


def prepare(folder: Path, name: str = "", flavor: str = "large", more: str = "", **sections: dict[str, Any]) -> Path:
    """Writes a run of a model on a text, with these keys in place of RUN's; None: without this key. more: TOML to append."""
    (folder / "data.txt").write_text("one two three four five six seven eight nine ten\n" * 300)
    given = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    model = {"model.name": name, "model.flavor": flavor} if name else {}
    lines = [f"{key} = {toml_value(value)}\n" for key, value in (RUN | model | given).items() if value is not None]
    (folder / "run.toml").write_text("".join(lines) + more)
    return folder


class Done(NamedTuple):
    """The outcome of a command, with the output of all ranks."""

    code: int  # of rank 0
    out: str
    err: str


class Command:
    """A started command, as one process or as several ranks."""

    def __init__(self, *words: object, folder: Path, ranks: int = 0, **variables: str):
        self._output = tempfile.TemporaryDirectory()
        places = _ranks(ranks) if ranks else [{}]
        self.processes = []
        for rank, place in enumerate(places):
            environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCHER}
            environment |= {"CUDA_VISIBLE_DEVICES": "", **place, **variables}
            streams = [f"{self._output.name}/{name}-{rank}" for name in ("out", "err")]
            arguments = ([str(word) for word in words], str(folder), environment, streams)
            self.processes.append(context().Process(target=_run, args=arguments))
            self.processes[-1].start()

    def finish(self, timeout: float = PATIENCE) -> Done:
        """Waits for the end. Kills processes that have not ended in time, and raises TimeoutError."""
        with self._output:
            for rank, process in enumerate(self.processes):
                if rank and self.processes[0].exitcode:
                    process.kill()  # as the launcher does
                process.join(timeout)
            late = [process for process in self.processes if process.exitcode is None]
            for process in late:
                process.kill()
            out, err = ("".join(self._read(f"{name}-{n}") for n in range(len(self.processes))) for name in ("out", "err"))
            if late:
                raise TimeoutError(f"still there after {timeout:.0f} s:\n{err}")
            code = self.processes[0].exitcode
            return Done(128 - code if code < 0 else code, out, err)

    def _read(self, name: str) -> str:
        path = Path(self._output.name) / name
        return path.read_text() if path.exists() else ""


def titanlite(*words: object, folder: Path, timeout: float = PATIENCE, **variables: str) -> Done:
    """`titanlite WORDS` in a folder."""
    return Command(*words, folder=folder, **variables).finish(timeout)


def train(*words: object, folder: Path, ranks: int = 1, timeout: float = PATIENCE, **variables: str) -> Done:
    """`titanlite train WORDS` in a folder, on this many ranks."""
    return Command("train", *words, folder=folder, ranks=ranks, **variables).finish(timeout)


def _ranks(count: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each of its ranks."""
    if count == 1:
        return [{}]
    same = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    same |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **same} for rank in range(count)]


def _enter(folder: str, environment: dict[str, str], streams: list[str]) -> None:
    """In a fork: works in a folder, with these variables, and writes to the files of standard output and error."""
    from titanlite.launch import children

    children.end_with_starter()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)


def _run(words: list[str], *place: Any) -> None:
    """In the fork: becomes the command."""
    import torch.multiprocessing

    from titanlite import __main__ as program

    _enter(*place)
    start_processes = torch.multiprocessing.start_processes

    def from_the_same_server(function: Callable[..., None], words: tuple, nprocs: int, start_method: str) -> None:
        """In place of start_processes, whose server would import PyTorch again."""
        with patch.object(multiprocessing.forkserver._forkserver, "ensure_running"):  # type: ignore[attr-defined]
            start_processes(_rank, (function, words, place), nprocs=nprocs, start_method=start_method)

    torch.multiprocessing.start_processes = from_the_same_server  # type: ignore[assignment]
    sys.argv = ["titanlite", *words]
    code: object = 1
    try:
        program.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(code, str):
            os.write(2, f"{code}\n".encode())
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _rank(rank: int, function: Callable[..., None], words: tuple, place: tuple) -> None:
    """In a fork of the command's ranks."""
    _enter(*place)
    function(rank, *words)
