"""torchrun with the run's exit code and one line in place of its traceback; run_train.sh starts it. Takes torchrun's words.

It also passes a request to stop on to the ranks, has ranks that are to be ended write their stacks, and knows a rank that was
stopped from one that has failed.
"""

import argparse
import functools
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from titanlite.config.read import read_config
from titanlite.errors import UserError
from titanlite.launch import stacks, stop

# torchrun looks at the ranks ten times a second and notes whole seconds. What is so close in time is told apart by how it
# ended.
_TOGETHER = 1  # seconds

# How long the other ranks may take once one has ended with stop.EXIT_CODE; all have saved together by then.
_LEAVING = 60.0  # seconds

_FAULT = 2  # the exit code of a rank that has told of a fault that the user can mend
_FINAL = (_FAULT, stop.UNSAVED)  # no stack says more, and starting anew would be no help


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """(rank, failure) that most likely brought the others down.

    Of those that failed first, as far as the clock can tell: one that was ended by a signal, since its neighbours then lose
    their connection to it and end with an exit code; then one that said what is wrong and ended with 2; then any other
    exit code; last a rank that got SIGTERM, which was asked to end.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    candidates = [item for item in failures.items() if item[1].timestamp <= earliest + _TOGETHER]

    def order(item: tuple[int, ProcessFailure]) -> int:
        code = item[1].exitcode
        return 3 if code == -signal.SIGTERM else 0 if code < 0 else 1 if code == 2 else 2

    return min(candidates, key=order)  # of equals, the one that was noted first


def describe(failures: dict[int, ProcessFailure]) -> str:
    """Which rank failed first, and how."""
    rank, failure = first_failure(failures)
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} (process {failure.pid}) {how}"


class Rendezvous(DynamicRendezvousHandler):
    """The meeting of the machines before every start of the ranks, with a new store for each.

    PyTorch 2.11 and 2.13 mean to make a new one (pull request 135957) but keep the first: ranks that are started anew find in
    it at which addresses those before them listened, and wait for them in vain.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        self._bootstrap_store_info = self._shared_tcp_store_server = None
        return super().next_rendezvous()


class Launcher:
    """One run on this machine, through all starts of its ranks."""

    def __init__(self, dump_folder: Path):
        self.dump_folder = dump_folder
        self.ranks: Ranks | None = None  # of the latest start
        self.starts = 0
        self.active = False  # its ranks are being started, run, or are being ended
        self.over = False  # no more ranks will be started
        self.failure = ""  # what the latest start has ended with
        self.told = False  # to stop, by a signal
        self.at_once: signal.Signals | None = None  # the second signal
        self.stopped = False  # a rank has ended with stop.EXIT_CODE

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """The handler of a request to stop. While there are ranks it only takes note, and `Ranks._poll` does the rest."""
        heard = signal.Signals(number)
        if not self.active and not self.over:
            _say(f"{heard.name}: no rank is running, and there is nothing to save")
            sys.exit(stop.EXIT_CODE)
        if not self.told:
            self.told = True
            task = "finish their step, save and stop" if self.active else "have ended; those of other machines are waited for"
            _say(f"{heard.name}: the ranks {task}; once more ends them at once")
        else:
            self.at_once = heard
            if not self.active:
                raise SignalException("a second signal", heard)

    def stacks(self) -> str:
        """Where the ranks' stacks are, to be added to the last line; empty where there are none."""
        folder = stacks.folder_of(self.dump_folder)
        return f"; stacks of all ranks: {folder}" if folder.exists() else ""


class Ranks(SubprocessContext):
    """The ranks of this machine from one start to their end, as torchrun's agent sees them.

    torchrun has no setting for what signal ends the ranks, for exit codes that are no failures, or for passing a signal on.
    All of that is in the object that its agent gets from `start_processes`, which looks up this class by the name of its
    parent: the one place where it can be put in. PyTorch 2.11 and 2.13 agree on the methods overridden here.
    """

    def __init__(self, launcher: Launcher, **words: Any):
        super().__init__(**words)
        self.launcher = launcher
        self.restarts_left = int(self.envs[0]["TORCHELASTIC_MAX_RESTARTS"]) - int(self.envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self.numbers = {local: int(environment["RANK"]) for local, environment in self.envs.items()}
        self.passed_on = False
        self.ended_here: set[int] = set()  # local ranks that did not end by themselves
        self.deadline = math.inf  # on time.monotonic, for ranks that stay when others have stopped

    def running(self) -> dict[int, subprocess.Popen]:
        """local rank -> process"""
        return {local: handler.proc for local, handler in self.subprocess_handlers.items() if handler.proc.poll() is None}

    def _start(self) -> None:
        launcher = self.launcher
        launcher.ranks, launcher.active = self, True
        launcher.starts += 1
        if launcher.starts > 1:
            why = launcher.failure or "ranks on another machine are started anew"
            of = f" of {launcher.starts + self.restarts_left}" if launcher.failure else ""
            _say(f"{why}; start {launcher.starts}{of}")
            launcher.failure = ""
        # A process inherits which signals are held back: a rank gets them once it listens, however early they were sent.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (*stop.REQUESTS, stop.FROM_LAUNCHER, signal.SIGQUIT))
        try:
            super()._start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _poll(self) -> RunProcsResult | None:
        """What the agent asks for ten times a second: None while ranks are running, then how they ended.

        Raises SignalException at a second signal, and ChildFailedError for a failure after which the ranks are not to be
        started again: the run was to stop, or the user has to mend something first.
        """
        if self.launcher.at_once:
            raise SignalException("a second signal", self.launcher.at_once)
        if self.launcher.told and not self.passed_on:
            self.passed_on = True
            for process in self.running().values():
                process.send_signal(stop.FROM_LAUNCHER)
        if time.monotonic() > self.deadline:
            self._close(signal.SIGTERM)
        result = super()._poll()
        if result is None:
            return None
        if not result.is_failed():
            self.launcher.over = True
            return result
        failures = {self.numbers[local]: failure for local, failure in result.failures.items()}
        final = first_failure(failures)[1].exitcode in _FINAL
        if self.launcher.told or self.launcher.stopped or final:
            self.launcher.over = True
            raise ChildFailedError(self.name, failures)
        self.launcher.over = self.restarts_left == 0
        self.launcher.failure = describe(failures)
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
        """Ends the ranks that are left. None gets SIGTERM, which asks for a step more; no checkpoint is lost by SIGKILL."""
        running = self.running()
        self.ended_here |= running.keys()
        # SIGTERM is what torchrun gives for any reason but a signal to itself.
        if running and death_sig == signal.SIGTERM and not self.launcher.at_once and (why := self._why_ended()):
            processes = {self.numbers[local]: process.pid for local, process in running.items()}
            stacks.ask(self.launcher.dump_folder, processes, f"ended because {why}")
        for local in running:
            self.subprocess_handlers[local].close(signal.SIGKILL)
        deadline = time.monotonic() + timeout
        for process in running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(f"process {process.pid} does not end, not even by SIGKILL: it waits for a device that does not answer")
        self.launcher.active = False

    def _why_ended(self) -> str:
        """A reason to look at the stacks of the ranks that are left; empty where there is none."""
        failures = {self.numbers[local]: failure for local, failure in self._failures.items()}
        if failures:
            return "" if first_failure(failures)[1].exitcode in _FINAL else describe(failures)
        if self.launcher.stopped:
            return f"the others have stopped {_LEAVING:g} s ago"
        return "ranks on another machine have failed"


def _say(text: str) -> None:
    os.write(sys.stderr.fileno(), f"{text}\n".encode())  # unlike print, also from a signal handler


def main() -> None:
    # The ranks say themselves what went wrong; what torchrun adds is said below, once.
    logging.disable(logging.CRITICAL)
    # SIGTERM is not among the signals at which torchrun ends the ranks.
    arguments = run.parse_args(["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
    os.environ.setdefault(stop.STARTED, str(time.time()))  # run_train.sh has set it; ranks that are started anew keep it
    try:
        _, path, *options = arguments.training_script_args
        launcher = Launcher(Path(read_config(path, options).job.dump_folder))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for request in stop.REQUESTS:
        signal.signal(request, launcher.hear)
    multiprocessing.SubprocessContext = functools.partial(Ranks, launcher)  # type: ignore[misc,assignment]  # no hook
    dynamic_rendezvous.DynamicRendezvousHandler = Rendezvous  # type: ignore[misc]  # nor for its rendezvous
    try:
        _run(arguments, launcher)
    except ChildFailedError as error:
        code = first_failure(error.failures)[1].exitcode
        _say(f"{describe(error.failures)}; the run is over{launcher.stacks() if code not in _FINAL else ''}")
        sys.exit(128 - code if code < 0 else code)
    except SignalException as signalled:
        _say(f"stopped by {signalled.sigval.name}")
        sys.exit(128 + signalled.sigval)
    except RendezvousError as error:
        _say(f"the launchers of the other machines are gone ({type(error).__name__}); the run is over{launcher.stacks()}")
        sys.exit(1)
    if launcher.stopped:
        sys.exit(stop.EXIT_CODE)


def _run(arguments: argparse.Namespace, launcher: Launcher) -> None:
    try:
        run.run(arguments)
    finally:
        if launcher.ranks:
            stacks.remove_empty(launcher.dump_folder, launcher.ranks.numbers.values())
