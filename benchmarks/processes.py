"""Contestants as processes: start, run steps, pause during other contestants' turns, end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.contestants.job import Job

ROOT = Path(__file__).resolve().parent.parent


class Left(Exception):
    """A contestant's process has ended, or cannot do its job; the message is the reason and the log."""

    def __init__(self, reason: str, failed: bool, log: str = ""):
        """reason: its last line is the summary. failed: False if it does not support the job. log: its output."""
        super().__init__(f"{reason}\n{log}" if log else reason)
        self.failed, self.summary = failed, reason.strip().splitlines()[-1]


class Process:
    """The ranks of one contestant. `first_step`: seconds from their start to the end of their first step."""

    def __init__(self, job: Job, python: str, environment: dict[str, str], cache: Path):
        """python: its interpreter; environment: replaces that of this process; cache: the folder of the compiler caches."""
        self.job = job
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        variables = environment | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}",
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": str(job.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if job.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if job.ranks > 1:
            variables |= {"WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        begin = time.perf_counter()
        self._ranks = [
            subprocess.Popen(
                [python, "-m", "benchmarks.contestants.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=ROOT,
                env=variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if job.ranks > 1 else {}),
                start_new_session=True,
            )
            for rank in range(job.ranks)
        ]
        try:
            for rank in range(job.ranks):
                self._say(rank, asdict(replace(job, rank=rank)))
                self._say(rank, {"first": 0, "steps": 1})
            self.imported, self.built = self._hear(), self._hear()
            self.first = self._hear()
        except BaseException:
            self.close()
            raise
        self.first_step = time.perf_counter() - begin

    def run(self, first: int, steps: int) -> dict[str, Any]:
        """Steps `first`, `first` + 1, ...: seconds of the slowest rank, losses of the batch, CPU seconds and memory of all."""
        self._signal(signal.SIGCONT)
        for rank in range(self.job.ranks):
            self._say(rank, {"first": first, "steps": steps})
        return self._hear()

    def pause(self) -> None:
        """Stops the process, which uses no CPU time until `run`."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kills the process."""
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()
            with contextlib.suppress(BrokenPipeError):  # it has not read all of its input
                rank.stdin.close()
            rank.stdout.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            try:
                os.killpg(rank.pid, number)  # including compilers that it may have started
            except ProcessLookupError:
                continue  # the process group has ended

    def _say(self, rank: int, value: dict[str, Any]) -> None:
        try:
            self._ranks[rank].stdin.write(json.dumps(value) + "\n")
            self._ranks[rank].stdin.flush()
        except BrokenPipeError:
            pass  # `_hear` reports why the process has ended

    def _hear(self) -> dict[str, Any]:
        """The next answer of all ranks, combined."""
        answers = []
        for rank in self._ranks:
            line = rank.stdout.readline()
            if not line:
                raise Left(f"ended by itself, exit code {rank.wait()}", failed=True, log=self._tail())
            answers.append(json.loads(line))
            if answers[-1]["did"] in ("unfit", "fail"):
                failed = answers[-1]["did"] == "fail"
                raise Left(answers[-1]["reason"], failed, log=self._tail() if failed else "")
        together = dict(answers[0])
        together["memory"] = {name: sum(a["memory"][name] for a in answers) for name in answers[0]["memory"]}
        if "seconds" in together:
            together["seconds"] = max(answer["seconds"] for answer in answers)
            together["cpu_seconds"] = sum(answer["cpu_seconds"] for answer in answers)
            # each rank's loss is its share of the global batch's loss
            together["losses"] = [sum(parts) for parts in zip(*(answer["losses"] for answer in answers), strict=True)]
        return together

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def base_environment(allocator: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """This process's environment without the caller's thread counts, caches and allocators, so that all runs are equal.

    `allocator`, then `given`, override it.
    """
    prefixes = (
        "MALLOC_",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_",
        "KMP_",
        "GOMP_",
        "TORCHINDUCTOR_",
        "TRITON_",
        "LD_PRELOAD",
        "MKL_",
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return inherited | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | allocator | given


def missing_packages(python: str, packages: tuple[str, ...]) -> list[str]:
    """The packages that an interpreter cannot import."""
    code = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
    return subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout.split()


def python_of(module: str, given: dict[str, str]) -> str:
    """The interpreter of a contestant: its own, or this one."""
    return given.get(module, sys.executable)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
