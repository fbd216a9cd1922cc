"""Starts the ranks of this node by torch's elastic agent, and ends as the run ends: with its exit code and one line.

It also forwards a request to stop to the ranks, makes ranks write their stacks before it ends them, and distinguishes a rank
that was stopped from one that has failed.
"""

import contextlib
import functools
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, RunProcsResult, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from titanlite.launch import stacks, stop
from titanlite.launch.fork_server import Child
from titanlite.launch.layout import STORE_OF_START, Layout
from titanlite.launch.rendezvous import Rendezvous

# The agent polls the ranks ten times a second and notes whole seconds. Failures that are this close are ordered by how they
# ended.
_TOGETHER = 1  # seconds

# A killed rank counts as running until its last thread has ended. A neighbor that loses its connection may exit before that. So
# the remaining ranks get this long to end by themselves.
_CLEARED = 0.5  # seconds

# How long the other ranks may run after one has ended with stop.EXIT_CODE; all have saved together by then.
_LEAVING = 60.0  # seconds

_FAULT = 2  # the exit code of a rank that has reported a fault that the user can correct
_FINAL = (_FAULT, stop.UNSAVED)  # no stacks, no restart: the next start would end the same way

_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that end the run at once


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) that most likely caused the others.

    Among the earliest failures, in this order: a rank that was ended by a signal, since its neighbors lose the connection to
    it and then end with an exit code; by SIGABRT, which gloo may do to such a neighbor; a rank that has reported a fault and
    ended with 2; any other exit code; one that has waited for the others in vain, or lost the connection to them; and last a
    rank that got SIGTERM, which somebody sent.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    candidates = [item for item in failures.items() if item[1].timestamp <= earliest + _TOGETHER]

    def order(item: tuple[int, ProcessFailure]) -> int:
        code = item[1].exitcode
        special = {-signal.SIGABRT: 1, _FAULT: 2, stacks.ECHO: 4, -signal.SIGTERM: 5}
        return special.get(code, 0 if code < 0 else 3)

    return min(candidates, key=order)  # of equals, the first


def describe(failures: dict[int, ProcessFailure]) -> str:
    """Which rank failed first, and how."""
    rank, failure = first_failure(failures)
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    how += ", as when memory runs out" if code == -signal.SIGKILL else ""
    return f"rank {rank} (process {failure.pid}) {how}"


class Launcher:
    """One run on this node, through all starts of its ranks."""

    def __init__(self, dump_folder: Path, start_rank: Callable[[dict[str, str]], Child], starter: int = 0):
        """start_rank: starts a rank with these variables added to its environment. starter: the process with which the run
        ends, such as that of `titanlite.run`; 0: none.

        The rank leads a process group of its own, and blocks all signals until it listens.
        """
        self.dump_folder, self.start_rank, self.starter = dump_folder, start_rank, starter
        self.starts = 0
        self.active = False  # its ranks are being started, are running, or are being ended
        self.over = False  # no more ranks will be started
        self.failure = ""  # of the latest start
        self.stop_requested = False  # by a signal
        self.starter_gone = False  # so that it stops without a signal
        self.end_now: signal.Signals | None = None  # the signal that ends the run at once
        self.stopped = False  # a rank has ended with stop.EXIT_CODE

    @property
    def stopping(self) -> bool:
        return self.stop_requested or self.starter_gone

    def on_request(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler for requests to stop. While there are ranks it only sets a flag, on which `Ranks._poll` acts."""
        request = signal.Signals(number)
        if self.end_now and not self.active:
            return  # the run is ending, and this signal would end it in the middle of that
        if not self.active and not self.over:
            _print(f"{request.name}: no rank is running, and there is nothing to save")
            sys.exit(stop.EXIT_CODE)
        if self.stop_requested:
            self.on_ending(number, _frame)
            return
        self.stop_requested = True
        what = "finish their step, save and stop" if self.active else "have ended; waiting for those of other nodes"
        _print(f"{request.name}: the ranks {what}; a second signal ends them at once")

    def on_ending(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler for what ends the run at once."""
        if self.end_now and not self.active:
            return
        self.end_now = signal.Signals(number)
        if not self.active:
            raise SignalException("the run is ended", self.end_now)

    def stacks(self) -> str:
        """Where the ranks' stacks are, for the end of the last line; empty if there are none."""
        folder = stacks.folder_of(self.dump_folder)
        return f"; stacks of all ranks: {folder}" if folder.exists() else ""


class Ranks(SubprocessContext):
    """The ranks of this node from one start to their end, as torch's agent sees them.

    The agent has no setting for how ranks are started, which signal ends them, which exit codes are no failures, or for
    forwarding a signal. All of that is in the object that it gets from `start_processes`, which looks up this class by the name
    of its parent. PyTorch 2.11 and 2.13 agree on the methods that are overridden here.
    """

    subprocess_handlers: dict[int, Any]  # each with a `proc`, which is a Child here

    def __init__(self, launcher: Launcher, **words: Any):
        super().__init__(**words)
        self.launcher = launcher
        self.restarts_left = int(self.envs[0]["TORCHELASTIC_MAX_RESTARTS"]) - int(self.envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self.numbers = {local: int(environment["RANK"]) for local, environment in self.envs.items()}
        self.forwarded = False
        self.ended_here: set[int] = set()  # local ranks that did not end by themselves
        self.deadline = math.inf  # on time.monotonic, for ranks that run on after others have stopped

    def running(self) -> dict[int, Child]:
        """local rank -> process"""
        return {local: handler.proc for local, handler in self.subprocess_handlers.items() if handler.proc.poll() is None}

    def start(self) -> None:
        """Starts the ranks. The agent's own version also replaces the launcher's signal handlers."""
        launcher = self.launcher
        launcher.active = True
        launcher.starts += 1
        if launcher.starts > 1:
            why = launcher.failure or "ranks on another node are restarted"
            of = f" of {launcher.starts + self.restarts_left}" if launcher.failure else ""
            _print(f"{why}; start {launcher.starts}{of}")
            launcher.failure = ""
        own_store = {STORE_OF_START: "1"}
        self.subprocess_handlers = {
            local: SimpleNamespace(proc=launcher.start_rank(environment | own_store))
            for local, environment in self.envs.items()
        }

    def _poll(self) -> RunProcsResult | None:
        """The agent calls this ten times a second: None while ranks are running, then how they ended.

        Raises SignalException at a signal that ends the run, and ChildFailedError for a failure after which the ranks must not
        be restarted: the run was to stop, or the user has to correct something first.
        """
        launcher = self.launcher
        if launcher.end_now:
            raise SignalException("the run is ended", launcher.end_now)
        # no signal of the kernel's, and no request of the user's: a scheduler's SIGTERM to all processes would be the second
        if launcher.starter and os.getppid() != launcher.starter and not launcher.stopping:
            launcher.starter_gone = True
            _print(f"process {launcher.starter}, which started the run, is gone: the ranks finish their step, save and stop")
        if launcher.stopping and not self.forwarded:
            self.forwarded = True
            for process in self.running().values():
                os.kill(process.pid, stop.FROM_LAUNCHER)
        if time.monotonic() > self.deadline:
            self._close(signal.SIGTERM)
        result = super()._poll()
        if result is None:
            return None
        if not result.is_failed():
            launcher.over = True
            return result
        failures = {self.numbers[local]: failure for local, failure in result.failures.items()}
        final = first_failure(failures)[1].exitcode in _FINAL
        if launcher.stopping or launcher.stopped or final:
            launcher.over = True
            raise ChildFailedError(self.name, failures)
        launcher.over = self.restarts_left == 0
        launcher.failure = describe(failures)
        return result

    def _capture_process_failures(self, done_local_ranks: set[int]) -> None:
        super()._capture_process_failures(done_local_ranks)
        for local, failure in list(self._failures.items()):
            stopped = failure.exitcode == stop.EXIT_CODE
            if stopped and not self.launcher.stopped:
                self.launcher.stopped = True
                self.deadline = time.monotonic() + _LEAVING
            if stopped or local in self.ended_here:
                del self._failures[local]

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Ends the remaining ranks. By SIGKILL: a rank would finish its step at SIGTERM, and no checkpoint is lost."""
        cleared = time.monotonic() + (_CLEARED if self._failures else 0)
        while (running := self.running()) and time.monotonic() < cleared:
            time.sleep(0.01)
        self.ended_here |= running.keys()
        # the agent passes SIGTERM for every reason but a signal to itself
        if running and death_sig == signal.SIGTERM and not self.launcher.end_now and (why := self._why_ended()):
            processes = {self.numbers[local]: process.pid for local, process in running.items()}
            stacks.request(self.launcher.dump_folder, processes, f"ended because {why}")
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout
        while (left := self.running()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in left.values():
            _print(f"process {process.pid} does not end by SIGKILL: it waits for a device that does not answer")
        stacks.remove_empty([stacks.file_of(self.launcher.dump_folder, rank) for rank in self.numbers.values()])
        self.launcher.active = False

    def _why_ended(self) -> str:
        """The reason to write the stacks of the remaining ranks; empty if there is none."""
        failures = {self.numbers[local]: failure for local, failure in self._failures.items()}
        if failures:
            return "" if first_failure(failures)[1].exitcode in _FINAL else describe(failures)
        if self.launcher.stopped:
            return f"the others stopped {_LEAVING:g} s ago"
        return "ranks on another node have failed"


def launch(layout: Layout, launcher: Launcher, unreachable: float) -> int:
    """Runs the ranks of this node to their end; returns the exit code of the run.

    unreachable: seconds without an answer of node 0 after which the run ends. Raises UserError for nodes that do not fit
    together.
    """
    logging.disable(logging.CRITICAL)  # ranks report their own errors, and this function adds one line
    for number in stop.SIGNALS:
        signal.signal(number, launcher.on_request)
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: the run outlives the terminal
            signal.signal(number, launcher.on_ending)
    multiprocessing.SubprocessContext = functools.partial(Ranks, launcher)  # type: ignore[misc,assignment]  # no hook
    rendezvous = Rendezvous(layout, unreachable)
    rendezvous_handler_registry.register(rendezvous.get_backend(), lambda _: rendezvous)
    config = LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.local_ranks,
        run_id="titanlite",
        rdzv_backend=rendezvous.get_backend(),
        max_restarts=layout.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # by default it leaves a temporary folder
    )
    try:
        launch_agent(config, "titanlite", [])
    except ChildFailedError as error:
        code = first_failure(error.failures)[1].exitcode
        _print(f"{describe(error.failures)}; the run is over{launcher.stacks() if code not in _FINAL else ''}")
        # 1 for an echo: of all nodes, srun returns the highest code, which is to be that of the cause
        return 128 - code if code < 0 else 1 if code == stacks.ECHO else code
    except SignalException as signalled:
        _print(f"stopped by {signalled.sigval.name}")
        return 128 + signalled.sigval
    except RendezvousError as error:
        _print(f"{error}; the run is over{launcher.stacks()}")
        return 1
    return stop.EXIT_CODE if launcher.stopped else 0


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, or the terminal is gone; the run continues
        os.write(sys.stderr.fileno(), f"{text}\n".encode())  # unlike print, safe in a signal handler
