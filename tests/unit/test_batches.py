"""Global batches: the same for any number of ranks and workers, from any position; stalls and failures are named."""

import itertools
import logging
import multiprocessing.forkserver as forkserver
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.guard import marked
from tests.token_files import mix_of, opened, write_file
from tests.waiting import until
from titanlite.config.schema import Config
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.mixture import Data
from titanlite.data.samples import Arrays
from titanlite.ground.errors import UserError
from titanlite.launch import children

pytestmark = pytest.mark.usefixtures("no_fork_server")  # it receives signals that ours must not get, and so would its forks
SEQ_LEN, GLOBAL = 8, 12
POLICIES = {
    "pack": {},
    "pack, apart": {"document_mask": True},
    "best fit": {"document_policy": "best_fit", "document_mask": True},
    "truncate": {"document_policy": "truncate"},
}


def config_of(local: int = 1, seed: int = 0, workers: int = 0, stall: float = 20.0, **training) -> Config:
    sizes = {"seq_len": SEQ_LEN, "local_batch_size": local, "global_batch_size": GLOBAL, "seed": seed}
    dataloader = {"workers": workers, "stall_seconds": stall}
    return Config.model_validate({"training": {**sizes, **training}, "dataloader": dataloader})


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list:
    """Two sources of some documents each, the second with a weight of three and with positions that are not labels."""
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    first = [random.integers(1, 300, random.integers(1, 40)) for _ in range(60)]
    second = [random.integers(300, 600, random.integers(1, 40)) for _ in range(50)]
    losses = [random.random(len(document)) < 0.7 for document in second]
    return [
        opened(write_file(folder / "first", first), "first", weight=1.0),
        opened(write_file(folder / "second", second, losses=losses), "second", weight=3.0),
    ]


def global_batches(data: Data, config: Config, ranks: int, steps: int, first: int = 1) -> list[list[torch.Tensor]]:
    """The steps that all ranks read together: the tensors of a Batch, (sequences, ...) each."""
    parts = [Batches(StepDataset(config, data, (rank, ranks), first_step=first)) for rank in range(ranks)]
    found = [zip(*(next(part) for part in parts), strict=True) for _ in range(steps)]
    for part in parts:
        part.close()
    return [[torch.cat([t.flatten(0, 1) for t in tensors]) for tensors in step if tensors[0] is not None] for step in found]


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for steps in zip(found, expected, strict=True) for pair in zip(*steps, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("policy", POLICIES)
def test_global_batches_are_the_same_on_any_number_of_ranks_with_accumulation_and_after_resuming(sources, policy, monkeypatch):
    monkeypatch.setattr("titanlite.data.batches._LOCATED_AT_ONCE", 64)  # or this many iterators would locate too much
    keys, steps = POLICIES[policy], 9  # more than an epoch of the second source
    data = mix_of(sources, config_of(**keys))
    reference = global_batches(data, config_of(local=GLOBAL, **keys), 1, steps)
    assert len({tokens.numpy().tobytes() for tokens, *_ in reference}) == steps
    for ranks in (1, 2, 3, 4):
        for local in (1, GLOBAL // ranks):
            assert same(global_batches(data, config_of(local=local, **keys), ranks, steps), reference)
        for resumed in range(steps):
            later = global_batches(data, config_of(**keys), ranks, steps - resumed, first=resumed + 1)
            assert same(later, reference[resumed:])


def test_two_workers_read_the_same_as_none_on_any_number_of_ranks_and_after_resuming(sources):
    keys = POLICIES["pack, apart"]
    data = mix_of(sources, config_of(**keys))
    reference = global_batches(data, config_of(**keys), 1, 6)
    assert same(global_batches(data, config_of(workers=2, **keys), 2, 6), reference)
    assert same(global_batches(data, config_of(workers=2, **keys), 1, 3, first=4), reference[3:])


def test_the_structure_of_batches_does_not_change_from_step_to_step(sources):
    """One source has a loss mask, the other does not: a step may have samples of only one."""
    data = mix_of(sources, config_of())
    shapes = {tuple((t.shape, t.dtype) for t in batch) for batch in global_batches(data, config_of(), 4, 30)}
    assert len(shapes) == 1


# -------------------------------------------------------------------------------------------------- stalls and failures


class Slow(Data):
    """Data whose reading stalls until a file exists, in any process."""

    go: Path

    def read(self, sources, samples, note=None) -> Arrays:
        if note is not None:
            note[0] = 1
        until(self.go.exists)
        return super().read(sources, samples, note)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_that_stalls_is_named_repeatedly_with_file_and_sample(sources, caplog, monkeypatch, tmp_path, workers):
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    data = mix_of(sources, config_of())
    data.__class__, data.go = Slow, tmp_path / "go"

    def after_the_third(record: logging.LogRecord) -> bool:
        if sum('source "' in each.message for each in caplog.records) == 3:  # without this one; a worker may start late
            data.go.touch()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [after_the_third])
    source = Batches(StepDataset(config_of(workers=workers, stall=0.4), data, (0, 1)))
    next(source)
    if workers:
        next(source)
    source.close()
    named = [record.message for record in caplog.records if "waiting for data" in record.message]
    sources_of, samples = StepDataset(config_of(), data, (0, 1)).located(0)
    mixed = data.sources[sources_of[1]]
    assert any(f'source "{mixed.name}", ' in text and f"{mixed.name}.bin, sample {samples[1]}" in text for text in named)
    assert len(named) >= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_of_the_data_is_the_same_message_from_a_worker(tmp_path, workers):
    file = write_file(tmp_path / "other", [np.arange(200)])
    config = config_of(workers=workers)
    source = Batches(StepDataset(config, mix_of([opened(file)], config, vocabulary=100), (0, 1)))
    with pytest.raises(UserError) as error:
        for _ in range(3):
            next(source)
    source.close()
    assert str(error.value).startswith(f"{file.prefix}.bin, sample ")
    assert "Traceback" not in str(error.value)


READ = [("pack", "part.bin"), ("truncate", "part.idx"), ("best fit", "part.loss"), ("best fit", "rows.npy")]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("policy", "name"), READ)
def test_a_file_that_is_truncated_while_it_is_read_is_named(tmp_path, policy, name):
    """Reading a mapped page beyond the end of its file would end the process with SIGBUS."""
    config, documents = config_of(**POLICIES[policy]), [np.arange(20)] * 5000
    file = write_file(tmp_path / "part", documents, losses=[np.ones(20, bool)] * 5000)
    data = pickle.loads(pickle.dumps(mix_of([opened(file)], config)))  # nothing is mapped yet
    source = Batches(StepDataset(config, data, (0, 1)))
    next(source)
    (mapped,) = (stored for stored in data.sources[0].rows[0].stored if stored._mapping and stored.path.name == name)
    os.truncate(mapped.path, 5000)
    with pytest.raises(UserError, match=rf"{name}: truncated since it was opened: it has 5,000 of {mapped.size:,} bytes"):
        next(source)
    source.close()


def test_prefetched_batches_are_the_same(sources):
    plain, ahead = (Batches(StepDataset(config_of(), mix_of(sources, config_of()), (0, 1))) for _ in range(2))
    for step in range(6):
        if step in (1, 3, 4):
            ahead.prepare()
        for found, wanted in zip(next(ahead), next(plain), strict=True):
            assert torch.equal(found, wanted) if wanted is not None else found is None


def test_on_a_cpu_all_reading_counts_as_waiting(sources, monkeypatch):
    source = Batches(StepDataset(config_of(), mix_of(sources, config_of()), (0, 1)))
    read = source._read
    monkeypatch.setattr(source, "_read", lambda: time.sleep(0.05) or read())
    begin = time.perf_counter()
    next(source)
    source.prepare()
    next(source)
    assert 0.1 <= source.waited() <= time.perf_counter() - begin
    assert source.waited() == 0
    source.close()


def workers() -> set[int]:
    """The current worker processes, which the fork server has started."""
    server = forkserver._forkserver._forkserver_pid
    found = [Path(f"/proc/{server}/task/{server}/children").read_text().split()] if server else [[]]
    return {int(pid) for pid in found[0]}


def take_locks(source: Batches) -> None:
    """Takes the locks that the first worker may have died with, as if it had."""
    loader = source._source
    event = getattr(loader._workers_done_event, "_cond", None)  # of multiprocessing, if it is
    for lock in [loader._worker_result_queue._wlock, loader._index_queues[0]._rlock, *filter(None, [event])]:
        lock.acquire(timeout=1)  # it may have died with it


@pytest.mark.parametrize("noticed", [True, False])
def test_a_killed_worker_is_reported_and_the_others_end_whatever_locks_it_had(sources, noticed):
    before = workers()
    source = Batches(StepDataset(config_of(workers=2), mix_of(sources, config_of()), (0, 1)))
    next(source)
    ours = workers() - before
    first = source._source._workers[0]
    first.kill()
    first.join()
    take_locks(source)
    if noticed:
        with pytest.raises(RuntimeError, match="a data worker has ended"):
            for _ in range(10):
                next(source)
    closing = threading.Thread(target=source.close, daemon=True)
    closing.start()
    until(lambda: not closing.is_alive() and not ours & workers())


class Unsendable:
    def __reduce__(self) -> str:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")


class Unsent(StepDataset):
    """Batches that pickle cannot take, as where /dev/shm has no space."""

    def __getitem__(self, step: int) -> Unsendable:
        return Unsendable()


def test_a_batch_that_a_worker_cannot_send_ends_the_run(sources):
    """Python only prints that and drops the batch, for which the loader waited forever."""
    source = Batches(Unsent(config_of(workers=1), mix_of(sources, config_of()), (0, 1)))
    with pytest.raises(RuntimeError, match="a data worker has ended, perhaps because its memory or that of /dev/shm ran out"):
        next(source)
    source.close()


def test_workers_ignore_a_stop_signal_to_all_processes_and_end_with_close(sources):
    before = workers()
    source = Batches(StepDataset(config_of(workers=1), mix_of(sources, config_of()), (0, 1)))
    (worker,) = workers() - before
    for number in children.TO_ALL:  # during its start
        os.kill(worker, number)
    next(source)
    for number in children.TO_ALL:
        os.kill(worker, number)
    for _ in range(10):
        next(source)
    source.close()
    until(lambda: worker not in workers())


READING = """
import sys, time
from pathlib import Path

from tests.token_files import mix_of, opened
from tests.unit.test_batches import config_of
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.indexed import TokenFile

if __name__ == "__main__":
    config = config_of(workers=1)
    source = Batches(StepDataset(config, mix_of([opened(TokenFile(Path(sys.argv[1])))], config), (0, 1)))
    next(source)
    print("reading", flush=True)
    time.sleep(100)
"""


def test_all_processes_outlive_a_stop_signal_to_them_and_end_with_a_rank_that_is_killed(sources, tmp_path):
    (tmp_path / "reading.py").write_text(READING)
    mark = str(sources[0].files[0].prefix)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "THIS_RUN": str(tmp_path)}
    rank = subprocess.Popen(
        [sys.executable, tmp_path / "reading.py", mark], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert rank.stdout.readline() == b"reading\n"
    processes = marked(str(tmp_path), "THIS_RUN")
    assert len(processes) >= 4  # rank, server, worker, and the resource tracker, which prints tracebacks if it must start again
    for pid, number in itertools.product({*processes} - {rank.pid}, children.TO_ALL):
        os.kill(pid, number)
    time.sleep(0.1)
    assert {*marked(str(tmp_path), "THIS_RUN")} == {*processes}
    rank.kill()
    rank.wait()
    until(lambda: not marked(str(tmp_path), "THIS_RUN"))


def test_unread_batches_leave_nothing_behind(sources):
    before = set(threading.enumerate())
    source: Batches | None = Batches(StepDataset(config_of(), mix_of(sources, config_of()), (0, 1)))
    next(source)
    (own,) = set(threading.enumerate()) - before
    source = None
    until(lambda: not own.is_alive())
