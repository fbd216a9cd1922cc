"""Two hosts on one machine: two network namespaces, a cable between them, one rank in each; then the cable is cut: `make
campaign PART=two-hosts`.

plain         a run must equal that of two ranks on one host bit for bit
blink         the cable is cut for a moment shorter than comm.train_timeout_seconds: the run must survive it
cut           it is cut for longer, then restored: both hosts must end, with an exit code other than 0, in bounded time
cut-restarts  the same with MAX_RESTARTS=2: the hosts may also reconnect and finish
gone          it is cut and never restored, as if the other host had lost power: both must end as in "cut"

After each, a run that has ended is restarted and must have the same losses. Needs Linux, root and iproute2.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.campaigns import Report, run_folder, starts, trajectory
from tests.end_to_end.launcher import ROOT, Ended, Launch, finish, launch
from tests.waiting import until

STEPS = 40
INIT_TIMEOUT, TRAIN_TIMEOUT = 60, 8
# Added to the timeout of the collectives: a rank that has lost its connection waits for the failed one to report, and the
# launchers poll ten times a second.
TO_END = TRAIN_TIMEOUT + 60.0
PATIENCE = 300.0
PORT = 29_500

# Added to the model: without it a tiny model finishes before the cable is cut.
SLOW = """

class Model(Model):
    def forward(self, *args, **more):
        import time

        time.sleep(float(__import__("os").environ.get("SLOW", 0)))
        return super().forward(*args, **more)
"""


def obstacle() -> str:
    """Why two hosts cannot be simulated here; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "the command ip is missing: install iproute2"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


class Host(NamedTuple):
    namespace: str
    interface: str
    address: str

    def up(self, yes: bool) -> None:
        _ip("-n", self.namespace, "link", "set", self.interface, "up" if yes else "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces connected by a cable, each with its end and a loopback interface; removed afterwards."""
    own = os.getpid()
    hosts = (Host(f"tl{own}a", "cable", "10.213.7.1"), Host(f"tl{own}b", "cable", "10.213.7.2"))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        first, second = hosts
        ends = ["link", "add", first.interface, "netns", first.namespace, "type", "veth"]
        _ip(*ends, "peer", "name", second.interface, "netns", second.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.up(True)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------------------------ runs


def options(**variables: str) -> tuple[list[str], dict[str, str]]:
    words = [
        "run.toml", "--training.steps", str(STEPS), "--checkpoint.interval", "5", "--metrics.enable_tensorboard", "false",
        "--comm.init_timeout_seconds", str(INIT_TIMEOUT), "--comm.train_timeout_seconds", str(TRAIN_TIMEOUT),
    ]  # fmt: skip
    return words, {"OMP_NUM_THREADS": "1", **variables}


def start(hosts: tuple[Host, Host], folder: Path, **more: str) -> list[Launch]:
    """The same command on both hosts, as a user gives it; the folder is on a disk that they share."""
    words, variables = options(NGPU="1", NNODES="2", RDZV_ENDPOINT=f"{hosts[0].address}:{PORT}", **more)
    return [
        launch(
            "netns", "exec", host.namespace, str(ROOT / "run_train.sh"), *words,
            folder=folder, script=Path("ip"), NODE_RANK=str(number), GLOO_SOCKET_IFNAME=host.interface,
            PET_LOCAL_ADDR=host.address, **variables,
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip


def finish_both(started: list[Launch], timeout: float) -> tuple[list[Ended | None], float]:
    """The outcomes of both hosts, None for one that did not end in time, and the seconds that it took."""
    begun = time.monotonic()
    ended: list[Ended | None] = []
    for one in started:
        try:
            ended.append(finish(one, max(1.0, begun + timeout - time.monotonic())))
        except subprocess.TimeoutExpired:
            ended.append(None)
    return ended, time.monotonic() - begun


def on_one_host(folder: Path) -> Path:
    """A run of two ranks as any user starts it, to compare with."""
    words, variables = options(NGPU="2")
    ended = finish(launch(*words, folder=run_folder(folder), **variables), PATIENCE)
    assert ended.code == 0, ended.err
    return folder


# ------------------------------------------------------------------------------------------------------------------ cases


def play(case: str, folder: Path, expected: dict) -> tuple[str, list[str]]:
    """-> (what happened, broken promises)."""
    broken: list[str] = []
    run = folder / "out"
    with two_hosts() as hosts:
        more = {"SLOW": "0.1"} if case != "plain" else {}
        more |= {"MAX_RESTARTS": "2"} if case == "cut-restarts" else {}
        started = start(hosts, run_folder(folder, SLOW), **more)
        text = ""
        if case != "plain":
            until(lambda: max(trajectory(run), default=0) >= 12 or any(one.process.poll() is not None for one in started))
            hosts[1].up(False)
            if case != "gone":
                time.sleep(TRAIN_TIMEOUT / 4 if case == "blink" else TRAIN_TIMEOUT + 4)
                hosts[1].up(True)
        ended, seconds = finish_both(started, TO_END + (0 if case in ("cut", "gone") else PATIENCE))
        hosts[1].up(True)
        codes = [one.code if one else "no end" for one in ended]
        text += f"exit codes {codes[0]} and {codes[1]} after {seconds:.0f} s"
        if None in ended:
            broken.append(f"{case}: a host did not end: {codes}")
        if any(one and one.left for one in ended):
            broken.append(f"{case}: processes were left behind")
        if case in ("cut", "gone") and 0 in codes:
            broken.append(f"{case}: a host that lost the other one ended with success")
        if case in ("plain", "blink") and codes != [0, 0]:
            broken.append(f"{case}: {codes}\n" + "\n--\n".join(one.err for one in ended if one))
        if codes != [0, 0]:
            ended, seconds = finish_both(start(hosts, folder), PATIENCE)
            text += f"; started again: {[one.code if one else 'no end' for one in ended]} after {seconds:.0f} s"
    text += f"; began from steps {starts(run)}"
    if trajectory(run) != expected:
        broken.append(f"{case}: losses are not bit for bit those of two ranks on one host")
    return text, broken


CASES = ("plain", "blink", "cut", "cut-restarts", "gone")


def campaign(folder: Path, cases: list[str]) -> Report:
    expected = trajectory(on_one_host(folder / "one-host") / "out")
    figures, broken = {}, []
    for case in cases:
        figures[case], more = play(case, folder / case, expected)
        broken += more
    return Report(figures, broken)
