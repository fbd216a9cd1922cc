"""Kills runs with SIGKILL, restarts them until they are done, and checks that nothing was lost: `make campaign PART=kills`.

A kill hits one rank, all ranks, everything that the run has started, or a data worker. Half of the kills wait until a
checkpoint is being written; the others come at any time of training. Checkpoints are written synchronously or asynchronously.
Two of three runs have MAX_RESTARTS, and their launcher is not killed: it restarts the ranks. The log must name what was killed.
Afterwards every run must be bit for bit the uninterrupted one: losses, gradient norms, and the tensors of the last checkpoint.
"""

import collections
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.campaigns import Mesh, Report, committed, run_folder, starts, tensor_sums, trajectory
from tests.end_to_end.launcher import Launch, finish, launch
from titanlite.checkpoint import load, manifest
from titanlite.ground.errors import UserError

STEPS = 60
KEPT = 3
KILLS_A_RUN = 10  # a start takes ten times as long as the training between kills
RESTARTS = KILLS_A_RUN
ALL_VICTIMS = 3 * KILLS_A_RUN  # so many kills need the run that its launcher does not start again
PATIENCE = 300.0  # seconds for a run to start, to finish, or to end after a kill, on a busy machine
VICTIMS = ("one rank", "all ranks", "everything")
A_WORKER = "a data worker"  # of runs that have some


class Kind(NamedTuple):
    """What is trained, beside the small model of the end-to-end tests."""

    mesh: Mesh
    options: tuple[str, ...] = ()

    @property
    def victims(self) -> tuple[str, ...]:
        return (A_WORKER, *VICTIMS) if "--dataloader.workers" in self.options else VICTIMS


KINDS = {
    "2 shards": Kind(Mesh(2)),
    "2 shards x tp 2": Kind(Mesh(2, tensor=2)),
    "context 2": Kind(Mesh(context=2)),
    "2 stages x 2 shards": Kind(Mesh(2, stages=2)),
    "experts on 2 ranks": Kind(
        Mesh(2),
        ("--model.name", "tests.tiny_moe", "--model.flavor", "large", "--parallelism.expert_parallel_degree", "2"),
    ),
    "Muon with averages, 2 shards": Kind(Mesh(2), ("--optimizer.name", "Muon", "--optimizer.ema_decay", "0.9")),
    "data workers, 2 shards": Kind(Mesh(2), ("--dataloader.workers", "2")),
    "LoRA, tp 2": Kind(Mesh(tensor=2), ("--lora.enable", "true", "--lora.rank", "4")),
}


class Plan(NamedTuple):
    """A run and its kills."""

    folder: Path
    kind: Kind
    async_mode: str
    restarts: int  # by the launcher
    kills: int
    seed: str


class Hit(NamedTuple):
    """One kill."""

    whom: str  # of VICTIMS, or A_WORKER
    aimed: bool  # at a checkpoint that is being written
    share: float  # of the remaining training after the resume
    more: float  # seconds
    die: float  # in [0, 1), selects the rank


class Tally:
    """Counts over all runs; thread-safe."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.broken: list[str] = []
        self.longest_end = 0.0
        self._lock = threading.Lock()

    def count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)


class Watch(threading.Thread):
    """Polls a run's checkpoints: one that existed at any instant must stay."""

    def __init__(self, run: Path):
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self._run, self._over = run, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.005):
            self.seen |= committed(self._run)

    def close(self) -> None:
        self._over.set()
        self.join()

    def lost(self) -> list[int]:
        """Checkpoints that are gone although there are fewer newer ones than are kept."""
        there = committed(self._run)
        return sorted(s for s in self.seen - there if sum(newer > s for newer in there) < KEPT)


# --------------------------------------------------------------------------------------------------------------- one kill


def begin(plan: Plan) -> Launch:
    mesh = plan.kind.mesh
    return launch(
        "run.toml", "--training.steps", str(STEPS), "--metrics.enable_tensorboard", "false",
        "--checkpoint.interval", "2", "--checkpoint.keep_latest_k", str(KEPT), "--checkpoint.async_mode", plan.async_mode,
        "--training.global_batch_size", str(2 * mesh.shards * mesh.stages), *mesh.words,  # a microbatch a stage
        *plan.kind.options, folder=plan.folder, NGPU=str(mesh.ranks), OMP_NUM_THREADS="1", MAX_RESTARTS=str(plan.restarts),
    )  # fmt: skip


def writing(run: Path) -> bool:
    return any((run / "checkpoint").glob(".step-*"))


def wait_for_the_moment(started: Launch, run: Path, hit: Hit) -> bool:
    """Waits, in a new start of the ranks, for the moment of a kill. False if the run has ended before."""
    deadline = time.monotonic() + PATIENCE
    before = len(starts(run))

    def until(condition: Callable[[], bool], every: float = 0.002) -> bool:
        while started.process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(every)
        return False

    if not until(lambda: len(starts(run)) > before, every=0.05):
        return False
    resumed = starts(run)[-1]
    target = resumed + 1 + hit.share * (STEPS - resumed - 1)
    if not until(lambda: max(trajectory(run), default=0) >= target) or (hit.aimed and not until(lambda: writing(run))):
        return False
    time.sleep(hit.more)
    return started.process.poll() is None


def kill(started: Launch, hit: Hit) -> list[int]:
    """Kills with SIGKILL; -> the processes that were killed, none if there were no ranks any more."""
    ranks = list(started.ranks().values())
    among = started.data_workers() if hit.whom == A_WORKER else ranks
    if not ranks or not among:
        return []
    victims = {"all ranks": ranks, "everything": started.pids()}.get(hit.whom, [among[int(hit.die * len(among))]])
    killed = []
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def damage(run: Path) -> list[str]:
    """What is wrong with the checkpoints that a run could resume from."""
    found = []
    for step in committed(run):
        folder = run / f"checkpoint/step-{step:08d}"
        try:
            found += load.faults(folder, manifest.read(folder))
        except UserError as error:
            found.append(str(error))
    return found


# ---------------------------------------------------------------------------------------------------------------- one run


def play(plan: Plan, whole: Path, tally: Tally) -> None:
    """Starts and kills a run until it has been killed `plan.kills` times and has ended by itself.

    whole: the folder of the uninterrupted run.
    """
    dice = random.Random(plan.seed)
    run = plan.folder / "out"
    hits = deal(plan, dice)
    watch = Watch(run)
    watch.start()
    code = None
    while code != 0:
        started = begin(plan)
        tally.count("starts")
        deaths = harm(started, plan, hits, tally)
        code = end(started, plan, tally, deaths)
        for step in watch.lost():
            tally.broken.append(f"{run}: the checkpoint of step {step} is gone")
        tally.broken += damage(run)
        if code is None:
            break
    watch.close()
    tally.count("runs", *["committed"] * len(watch.seen))
    if code == 0 and trajectory(run) != trajectory(whole):
        tally.broken.append(f"{run}: losses or gradient norms are not those of the uninterrupted run")
    elif code == 0 and tensor_sums(run, STEPS) != tensor_sums(whole, STEPS):
        tally.broken.append(f"{run}: tensors are not those of the uninterrupted run")


def deal(plan: Plan, dice: random.Random) -> list[Hit]:
    """The kills of a run: of every kind, and every other one while a checkpoint is written."""
    victims = [whom for whom in plan.kind.victims if whom != "everything" or not plan.restarts]
    dice.shuffle(victims)
    first = dice.randrange(2)
    hits = []
    for number in range(plan.kills):
        # Of the rest of the run, so that time remains for later kills.
        share = dice.uniform(0, min(1.0, 2 / (plan.kills - number + 1)))
        hits.append(Hit(victims[number % len(victims)], (first + number) % 2 == 0, share, dice.uniform(0, 0.15), dice.random()))
    return hits


def harm(started: Launch, plan: Plan, hits: list[Hit], tally: Tally) -> list[tuple[str, list[int]]]:
    """Kills, and removes kills from `hits`, as long as the launcher restarts the ranks.

    Returns whom each kill hit and its processes, one of which must be reported; a kill may hit all of them and the launcher.
    """
    run, deaths = plan.folder / "out", list[tuple[str, list[int]]]()
    for restarts in range(plan.restarts, -1, -1):
        if not hits or not wait_for_the_moment(started, run, hits[0]):
            break
        half_written = writing(run)
        killed = kill(started, hits[0])
        if not killed:
            break
        hit = hits.pop(0)
        tally.count("kills", hit.whom, *["while writing"] * half_written)
        deaths.append((hit.whom, killed))
        if restarts:
            tally.count("starts by the launcher")
    return deaths


def end(started: Launch, plan: Plan, tally: Tally, deaths: list[tuple[str, list[int]]]) -> int | None:
    """Waits for the end of a run; -> its exit code, or None if it did not end correctly."""
    begun, launcher = time.monotonic(), started.process.pid
    try:
        ended = finish(started, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        tally.broken.append(f"{plan.folder}: still there {PATIENCE:.0f} s after it was killed")
        return None
    if deaths:
        tally.longest_end = max(tally.longest_end, time.monotonic() - begun)
    for number, (whom, killed) in enumerate(deaths, 1):
        reports = [f"(process {pid}) was ended by SIGKILL" for pid in killed]
        if whom == A_WORKER:
            if number == len(deaths) and ended.code == 0:  # the last batches may have been read already
                continue
            reports = ["a data worker has ended"]
        if launcher not in killed and not any(report in ended.err for report in reports):
            tally.broken.append(f"{plan.folder}: none of the killed processes {killed} is named:\n{ended.err}")
    if ended.left:
        tally.broken.append(f"{plan.folder}: {len(ended.left)} processes outlived the run")
    if ended.code not in (0, 137, *[1 for whom, _ in deaths if whom == A_WORKER]):
        tally.broken.append(f"{plan.folder}: ended with {ended.code}:\n{ended.err}")
        return None
    return ended.code


# ----------------------------------------------------------------------------------------------------------- the campaign


def plans(folder: Path, kind: Kind, kills: int, seed: int) -> Iterator[Plan]:
    """Runs with this total number of kills."""
    number = 0
    while kills > 0:
        place = run_folder(folder / f"run-{number}")
        a_run = min(kills, KILLS_A_RUN)
        mode = ("disabled", "async")[(number + seed) % 2]
        yield Plan(place, kind, mode, RESTARTS * (number % 3 < 2), a_run, f"{seed}/{number}")
        kills -= a_run
        number += 1


def campaign(folder: Path, kind: Kind, kills: int, seed: int, at_once: int) -> Report:
    """Runs in `folder`, `at_once` of them at a time."""
    whole = Plan(run_folder(folder / "uninterrupted"), kind, "disabled", 0, 0, "")
    ended = finish(begin(whole), PATIENCE)
    expected = whole.folder / "out"
    assert ended.code == 0 and list(trajectory(expected)) == list(range(1, STEPS + 1)), ended.err

    tally = Tally()
    runs = list(plans(folder, kind, kills, seed))
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(play, plan, expected, tally) for plan in runs]:
            done.result()
    counts = tally.counts
    if counts["kills"] < kills // 2:
        tally.broken.append(f"only {counts['kills']} of {kills} kills came before the end of their run")
    if kills >= ALL_VICTIMS and not all(counts[whom] for whom in kind.victims):
        tally.broken.append(f"no kill of {', '.join(whom for whom in kind.victims if not counts[whom])}")
    figures = {
        "mesh": str(kind.mesh),
        "kills": counts["kills"],
        f"    of {', '.join(kind.victims)}": " ".join(str(counts[whom]) for whom in kind.victims),
        "    while a checkpoint was written": counts["while writing"],
        "starts, and by the launcher itself": f"{counts['starts']} {counts['starts by the launcher']}",
        "checkpoints committed": counts["committed"],
        "runs": counts["runs"],
        "seconds from a kill to the end, at most": f"{tally.longest_end:.1f}",
    }
    return Report(figures, tally.broken)
