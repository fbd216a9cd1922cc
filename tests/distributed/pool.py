"""Gloo workers that live longer than a test.

A pool of N processes joins one default process group once; tests then send it functions by name, which all ranks run
together. Importing PyTorch for every case would take longer than the cases, so workers are forks of one process that has only
imported it. Making groups again inside a process would leave names of destroyed groups in DTensor's caches.
"""

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, until

_GRACE = 10.0  # seconds that the other ranks get after the first one has failed


def context() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forks of one with the imports of tests/preload.py."""
    multiprocessing.set_forkserver_preload(["tests.preload"])
    return multiprocessing.get_context("forkserver")


class WorkerFailure(AssertionError):
    """A rank raised, died or did not answer; the message says which one, with details."""


class Pool:
    """`size` ranks. After a failure that may have left ranks out of step, the next call starts new ones."""

    def __init__(self, size: int):
        self.size = size
        self.workers: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, function: str, timeout: float = PATIENCE, **arguments: Any) -> list[Any]:
        """Calls "module:name"(**arguments) on every rank at once; the results by rank. Raises WorkerFailure."""
        if not self.workers:
            self._start()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # its rank has died since the last call; `_receive` says how
                pipe.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self.pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if self.pipes[rank] in ready:
                    answers[rank] = self._receive(rank)
                    if not answers[rank][0]:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        failures = [f"rank {rank} of {self.size}: {answer}" for rank, (good, answer) in sorted(answers.items()) if not good]
        silent = [rank for rank in range(self.size) if rank not in answers]
        if failures or silent:
            stacks = [f"rank {rank} of {self.size} did not answer; it stands at:\n{self._stack(rank)}" for rank in silent]
            self.stop()
            raise WorkerFailure("\n".join([f"{function} failed", *failures, *stacks]))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        """Ends all workers; `run` starts new ones."""
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()
        self.workers, self.pipes = [], []

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context().Pipe()
            worker = context().Process(target=_work, args=(rank, self.size, self.folder.name, theirs), daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.workers[rank].join(5)
            code = self.workers[rank].exitcode
            how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            return False, f"died: {how}"

    def _stack(self, rank: int) -> str:
        os.kill(self.workers[rank].pid, signal.SIGUSR1)
        file = Path(self.folder.name) / f"stack-{rank}"
        with contextlib.suppress(AssertionError):  # it may not answer this signal either
            until(lambda: " in _work" in file.read_text(), patience=30)  # the main thread, which comes last
        *others, main = file.read_text().rstrip().split("\n\n")
        return "\n".join([main, *("\n".join(thread.splitlines()[:4]) for thread in others)])


def _share_one_device() -> None:
    """Makes all groups of a process share one gloo device, whose thread wakes up a hundred times a second.

    Otherwise each group has its own device: sixty idle groups take 6% of a core in every rank, with one device 0.3%.
    """
    from torch.distributed import ProcessGroupGloo

    from titanlite.ground.torch_private import one_thread_per_gloo_group

    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    one_thread_per_gloo_group(lambda: [device])


def _share_groups_between_meshes() -> None:
    """Makes mesh dimensions over the same ranks share a process group.

    A mesh has five dimensions, most of them of one rank, and tests use a dozen meshes: without this, threads and sockets of
    their groups would accumulate in ranks that live as long as the tests.
    """
    from torch.distributed import device_mesh

    new_group, known = device_mesh.new_group, {}

    def shared(ranks: list[int], backend: str | None, **words: Any) -> Any:
        key = tuple(ranks), backend
        if key not in known:
            known[key] = new_group(ranks=ranks, backend=backend, **words)
        return known[key]

    device_mesh.new_group = shared


def _end_groups(before: set[Any]) -> None:
    """Destroys the groups that a call has left, except those of meshes, whose names DTensor's caches keep."""
    import torch.distributed as dist

    for group in set(dist.distributed_c10d._world.pg_map) - before:
        # names other than counters may be reused, while the addresses of their old ranks stay in the store
        if group.group_name.isdigit() and not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)


def _work(rank: int, size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from titanlite.launch import children, process

    children.end_with_starter()
    stack = open(f"{folder}/stack-{rank}", "w")
    # blocked in a fork server that data workers have started, and so in all its forks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    # gathering full tensors for a comparison is expected to be slow
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    _share_one_device()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    _share_groups_between_meshes()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        module, name = function.split(":")
        groups = set(dist.distributed_c10d._world.pg_map)
        torch.manual_seed(0)  # the same on all ranks, as in processes that have just begun
        try:
            answer = True, getattr(importlib.import_module(module), name)(**arguments)
            _end_groups(groups)
            process.set_timeout(round(PATIENCE))  # a run has shortened it
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
