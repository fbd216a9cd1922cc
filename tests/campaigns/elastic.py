"""Repeatedly stops a run and continues it on another number of ranks, or on another mesh, in one folder: `make campaign
PART=elastic`.

Every other segment is stopped by SIGTERM, the others by training.steps. Afterwards the samples of every step must be those of
an uninterrupted run on one process, token for token, and the losses equal within rounding.
"""

import signal
import time
from pathlib import Path

from tests.campaigns import Mesh, Report, committed, run_folder, starts, trajectory
from tests.end_to_end.launcher import Ended, finish, launch

GLOBAL_BATCH = 12  # sequences; 1, 2, 3 and 4 shards divide it
ROUNDING = 1e-5
PATIENCE = 300.0
PREEMPTED = 75

# Added to the model, which gets four blocks: each rank with the embedding records its sequences, one per line, in the order of
# its microbatches.
NOTING = """

FLAVORS = {"tiny": Config(64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=4096)}


class Model(Model):
    def forward(self, tokens, *args, **more):
        import hashlib
        import os

        if tokens.is_meta or self.embed.weight.is_meta:  # a trace; a rank without the embedding
            return super().forward(tokens, *args, **more)
        lines = [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=8).hexdigest() for row in tokens]
        with open(os.environ["NOTES"] + "-" + os.environ["RANK"], "a") as file:
            file.write("".join(line + "\\n" for line in lines))
        return super().forward(tokens, *args, **more)
"""


def segment(folder: Path, number: int, mesh: Mesh, steps: int, planned: int, stop_after: int | None = None) -> Ended:
    """One start of the run, to step `steps` of `planned`, or stopped by SIGTERM once step `stop_after` is reported."""
    started = launch(
        "run.toml", "--training.steps", str(steps), "--lr_scheduler.total_steps", str(planned),
        "--training.local_batch_size", "1", "--training.global_batch_size", str(GLOBAL_BATCH), *mesh.words,
        folder=folder, NGPU=str(mesh.ranks), OMP_NUM_THREADS="1", NOTES=f"notes-{number}",
    )  # fmt: skip
    if stop_after is not None:
        while started.process.poll() is None and max(trajectory(folder / "out"), default=0) < stop_after:
            time.sleep(0.005)
        started.process.send_signal(signal.SIGTERM)
    return finish(started, PATIENCE)


def samples(folder: Path, number: int, mesh: Mesh, first: int) -> dict[int, list[str]]:
    """step -> digests of the sequences on which all shards of a segment have trained, in no order.

    Not with context parallelism, where each rank has a part of every sequence.
    """
    part = GLOBAL_BATCH // mesh.shards
    found: dict[int, list[str]] = {}
    for shard in range(mesh.shards):
        rank = shard * mesh.context * mesh.tensor  # the first rank of the first stage
        lines = (folder / f"notes-{number}-{rank}").read_text().split()
        for begin in range(0, len(lines), part):
            found.setdefault(first + begin // part, []).extend(lines[begin : begin + part])
    return {step: sorted(digests) for step, digests in found.items()}


def campaign(folder: Path, meshes: list[Mesh], steps: int) -> Report:
    """Segments of about `steps` steps each on these meshes, in `folder`."""
    broken: list[str] = []
    run = run_folder(folder / "run", NOTING)
    stopped, seen = [], {}
    far = 1000  # a segment that SIGTERM stops must not end before
    for number, mesh in enumerate(meshes):
        done = max(committed(run / "out"), default=0)
        by_signal = number % 2 == 1 and number < len(meshes) - 1
        ended = segment(run, number, mesh, far if by_signal else done + steps, far, done + steps if by_signal else None)
        reached, wanted = max(trajectory(run / "out"), default=0), PREEMPTED if by_signal else 0
        stopped.append(f"{mesh} to step {reached}" + " (SIGTERM)" * by_signal)
        if ended.code != wanted or ended.left:
            broken.append(f"segment {number}: exit code {ended.code}, not {wanted}; {len(ended.left)} left:\n{ended.err}")
        if reached <= done:
            return Report({"segments": ", ".join(stopped)}, broken)
        if reached not in committed(run / "out"):
            broken.append(f"segment {number}: ended at step {reached} without a checkpoint of it")
        if starts(run / "out")[-1] != done:
            broken.append(f"segment {number}: went on from step {starts(run / 'out')[-1]}, not {done}")
        seen |= samples(run, number, mesh, done + 1)

    last = max(trajectory(run / "out"))
    alone = run_folder(folder / "alone", NOTING)
    ended = segment(alone, 0, Mesh(), last, far)
    assert ended.code == 0, ended.err
    one, many = trajectory(alone / "out"), trajectory(run / "out")
    other = [step for step, digests in samples(alone, 0, Mesh(), 1).items() if seen.get(step) != digests]
    if other or len(seen) != last:
        broken.append(f"steps {other} of {last} were trained on other samples than on one process; {len(seen)} were trained")
    if list(many) != list(one):
        broken.append(f"reported steps are {list(many)}")
    far_off = max((abs(many[step].loss / one[step].loss - 1) for step in one if step in many), default=0.0)
    if far_off > ROUNDING:
        broken.append(f"a loss differs by {far_off:.1e} from that of one process")
    figures = {
        "segments": ", ".join(stopped),
        "steps": last,
        "    with other samples than on one process": len(other),
        "largest relative difference of a loss": f"{far_off:.1e}",
    }
    return Report(figures, broken)
