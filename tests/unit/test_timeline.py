"""The samples of a step: after resumes with another batch or mixture, after rollbacks, and from checkpoints of 0.2."""

import hashlib
import itertools
import json
from typing import Any

import numpy as np
import pytest

from tests.token_files import mix_of, opened, write_file
from titanlite.config.schema import Config, Source
from titanlite.data.batches import StepDataset
from titanlite.data.mixture import Data
from titanlite.data.order import sample_at
from titanlite.data.sources import TokenSource
from titanlite.data.timeline import Rollback, SourceState, Timeline, attempts_at, begin, stored
from titanlite.ground.errors import UserError

SEQ_LEN, BATCH = 8, 12
CONFIG = Config.model_validate({"training": {"seq_len": SEQ_LEN, "local_batch_size": 1}})


def numbers_of(data: Data, timeline: Timeline, step: int) -> dict[str, Any]:
    """The data entries in a checkpoint's manifest, written and read back."""
    segment, samples = timeline.at(step + 1)
    numbers = {"step": step, "samples": samples, "global_batch": segment.global_batch, "data": data.describe()}
    return json.loads(json.dumps(numbers | {"timeline": timeline.numbers()}))


def located(data: Data, timeline: Timeline, steps: range, ranks: int = 1) -> list[list[tuple[str, int]]]:
    """(fingerprint of the source, sample of it) of each sample of some steps."""
    plans = [StepDataset(CONFIG, data, (rank, ranks), timeline, steps[0]) for rank in range(ranks)]
    found = [[zip(*plan.located(step - steps[0]), strict=True) for plan in plans] for step in steps]
    names = [mixed.fingerprint for mixed in data.sources]
    return [[(names[source], int(sample)) for source, sample in itertools.chain(*parts)] for parts in found]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, TokenSource]:
    """Three sources of 500, 300 and 200 samples, and two with the text of the first one."""
    folder = tmp_path_factory.mktemp("parts")
    found = {
        name: opened(write_file(folder / name, [np.arange(n * SEQ_LEN + 1)]), name)._replace(fingerprint=name)
        for name, n in {"a": 500, "b": 300, "c": 200}.items()
    }
    return found | {name: found["a"]._replace(name=name) for name in ("again", "renamed")}


def weighted(parts: dict[str, TokenSource], weights: dict[str, float]) -> Data:
    return mix_of([parts[n]._replace(cfg=Source(path=n, weight=w)) for n, w in weights.items()], CONFIG)


# ------------------------------------------------------------------------------------------------------------- resumes


def test_after_changes_of_weights_and_sources_each_source_continues_with_its_next_sample_on_any_number_of_ranks(parts):
    phases: list[tuple[dict[str, float], int, int]] = [  # weights, steps, ranks
        ({"a": 1, "b": 1}, 10, 1),
        ({"a": 1, "b": 1}, 3, 4),
        ({"a": 9, "b": 1}, 7, 2),
        ({"b": 1, "a": 9}, 4, 1),
        ({"b": 2, "c": 1}, 10, 3),
        ({"b": 2, "c": 1}, 2, 2),
        ({"c": 1, "renamed": 3, "b": 1}, 20, 4),
        ({"renamed": 1}, 5, 2),
    ]
    seen: dict[str, list[int]] = {name: [] for name in "abc"}
    step, numbers, orders, whole = 0, None, [], []
    for weights, steps, ranks in phases:
        data = weighted(parts, weights)
        timeline = data.timeline(BATCH) if numbers is None else stored(numbers, "run").resumed(step, BATCH, data.mixture)
        whole.append((data, timeline, range(step + 1, step + steps + 1)))
        for source, sample in itertools.chain(*located(*whole[-1], ranks)):
            seen[source].append(sample)
        step += steps
        numbers = numbers_of(data, timeline, step)
        segment, samples = timeline.at(step + 1)
        orders.append([source.order for source in segment.sources])
        assert segment.drawn(samples)[: len(weights)] == [len(seen[mixed.fingerprint]) for mixed in data.sources]
    assert orders == [[0, 1], [0, 1], [0, 1], [1, 0], [1, 2, 0], [1, 2, 0], [2, 0, 1], [0, 2, 1]]
    assert sum(len(samples) for samples in seen.values()) == step * BATCH
    for number, (name, count) in enumerate({"a": 500, "b": 300, "c": 200}.items()):
        assert seen[name] == sample_at(np.arange(len(seen[name])), count, f"0/{number}").tolist()  # none skipped
        assert len(set(seen[name])) == len(seen[name]) > 50  # none repeated
    for data, before, steps in whole:  # the last checkpoint still has the samples of each step
        assert located(data, timeline, steps) == located(data, before, steps)


# ----------------------------------------------------------------------------------------------------------- rollbacks


def test_a_rollback_leaves_samples_out_and_another_one_to_an_earlier_step_undoes_it():
    timeline = begin(8, [("a", 2), ("b", 1)]).rolled_back(5, 64).resumed(20, 16, [("a", 2), ("b", 1)]).rolled_back(30, 400)
    assert [timeline.at(step)[1] for step in (5, 6, 20, 21, 30, 31, 32)] == [32, 64, 176, 184, 328, 400, 416]
    assert [segment.skipped for segment in timeline.segments] == [0, 24, 24, 80]
    assert timeline.segments[-1].read(480) == timeline.segments[0].drawn(400)
    assert [timeline.seen(step) for step in (30, 31)] == [20 * 8 + 10 * 16, 20 * 8 + 11 * 16]
    undone = timeline.rolled_back(3, 32)
    assert [(each.first_step, each.first_sample, each.skipped) for each in undone.segments] == [(1, 0, 0), (4, 32, 8)]


def test_samples_that_rollbacks_left_out_of_an_earlier_mixture_do_not_count_as_read():
    timeline = begin(8, [("a", 1)]).rolled_back(5, 64).resumed(10, 8, [("b", 1), ("a", 1)])
    assert timeline.segments[-1].sources == [SourceState("b", 1, 0, 0, 1), SourceState("a", 0, 104, 24, 1)]
    assert timeline.segments[-1].read(124) == [10, 90]


def test_a_checkpoint_continues_with_the_rollbacks_to_it_and_to_later_ones():
    timeline, rollbacks = begin(8, [("a", 1)]), [Rollback(14, 10, 96), Rollback(13, 10, 104), Rollback(25, 20, 200)]
    assert timeline.after(11, rollbacks).at(21)[1] == 200
    assert [timeline.after(10, rollbacks).at(step)[1] for step in (10, 11, 20, 21)] == [72, 104, 176, 200]
    assert timeline.after(21, rollbacks) == timeline


def test_rollbacks_say_which_attempts_a_step_has_had():
    rollbacks = [Rollback(14, 10, 96), Rollback(13, 10, 104), Rollback(25, 20, 200)]
    expected = {10: [0], 11: [0, 1, 2], 14: [0, 2], 20: [2], 21: [2, 3], 25: [2, 3], 26: [3]}
    assert {step: attempts_at(step, rollbacks) for step in expected} == expected


# --------------------------------------------------------------------------------------------------- what is stored


# What titanlite 0.2 stored after four mixtures and three rollbacks; data without what is not read here.
OF_0_2: dict[str, Any] = {
    "step": 46,
    "samples": 332,
    "global_batch": 4,
    "data": {
        "sources": [
            {"name": "b", "fingerprint": "b", "share": 0.09999971389688653},
            {"name": "a", "fingerprint": "a", "share": 0.6999999046322956},
            {"name": "again", "fingerprint": "a", "share": 0.20000038147081797},
        ]
    },
    "mixture": {
        "position": 200,
        "sources": [
            {"fingerprint": "b", "order": 1, "drawn": 76, "replaced": 20},
            {"fingerprint": "a", "order": 0, "drawn": 110, "replaced": 26},
            {"fingerprint": "a", "order": 3, "drawn": 0, "replaced": 2},
            {"fingerprint": "c", "order": 2, "drawn": 14, "replaced": 0},
        ],
    },
}


def test_a_checkpoint_of_titanlite_0_2_is_continued_with_the_samples_that_it_would_have_read(parts):
    timeline, same = stored(OF_0_2, "run"), weighted(parts, {"b": 1, "a": 7, "again": 2})
    assert timeline.resumed(46, 4, same.mixture) == timeline
    assert timeline.segments[0].read(332) == [89 - 20, 202 - 26, 27 - 2, 14]
    expected = [[231, 218, 199, 414], [279, 59, 486, 230]]
    assert [[sample for _, sample in step] for step in located(same, timeline, range(47, 49))] == expected
    other = weighted(parts, {"again": 1, "c": 0.1})
    found = located(other, timeline.resumed(46, 24, other.mixture), range(47, 67))
    assert hashlib.blake2b(json.dumps(found).encode(), digest_size=8).hexdigest() == "7fac365c8cc70252"
    assert timeline.at(14)[1] == 200
    with pytest.raises(UserError, match=r"step 13: which samples it had is not known; titanlite 0\.2"):
        timeline.at(13)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        *[({"samples": 845}, {}), ({"step": 41}, {}), ({"data": {"sources": [{"fingerprint": "9a"}]}}, {})],
        *[({}, {"first_step": 0}), ({}, {"began": 1}), ({}, {"skipped": 1}), ({}, {"sources": []})],
    ],
    ids=str,
)
def test_inconsistent_numbers_are_refused_with_their_position(entry, change):
    numbers = {"step": 10, "samples": 80, "data": {"sources": [{"fingerprint": "8f"}]}}
    (segment,) = begin(8, [("8f", 1)]).numbers()
    assert stored(numbers | {"timeline": [segment]}, "run").at(11)[1] == 80
    with pytest.raises(UserError, match=r"^run: (its )?timeline"):
        stored(numbers | entry | {"timeline": [segment | change]}, "run")
