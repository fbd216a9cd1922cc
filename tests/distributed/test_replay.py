"""Replayed steps: bit for bit on the same mesh, within rounding on one process, and by the right route after rollbacks."""

import contextlib
import json
import logging
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests import tiny_poison
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, mesh_of
from tests.distributed.test_incidents import BAD, TWO_BY_TWO, Degrees, poisoned, reports, run
from tests.distributed.test_resume import stored
from titanlite.checkpoint import manifest
from titanlite.checkpoint.whole import Stored
from titanlite.ground.errors import UserError
from titanlite.ground.run_files import INCIDENTS, PROVENANCE, read_entries
from titanlite.hf.export import Exported
from titanlite.parallel.mesh import ranks_of
from titanlite.tools.open_model import open_model
from titanlite.tools.replay import (
    Replayed,
    check_between,
    describe,
    furthest,
    layer_of,
    replay,
    replay_config,
    route_to,
    setting_of,
)

HERE = "tests.distributed.test_replay"
MODEL = "tests.tiny_poison"


def again(
    degrees: Degrees, folder: Path, bad: dict[int, int], steps: list[tuple[int, int | None]], model: str = MODEL
) -> list[tuple]:
    """Replays (step, attempt) pairs on a mesh; -> (result, printed text) of each."""
    found = []
    for step, attempt in steps:
        config, global_batch = setting_of(folder, step, model)
        route = route_to(step, attempt, read_entries(folder / INCIDENTS))
        config = replay_config(config, global_batch, ranks_of(degrees) if degrees else None)
        replayed = replay(config, folder, route, step, poisoned(config, bad), mesh_of(degrees), CPU)
        found.append((replayed, describe(replayed, folder, route, config, mesh_of(degrees))))
        dist.barrier()
    return found


def replays(pools: dict[int, Pool], degrees: Degrees, folder: Path, bad: dict[int, int], *steps: int | tuple[int, int]):
    pairs = [step if isinstance(step, tuple) else (step, None) for step in steps]
    answers = pools[ranks_of(degrees)].run(f"{HERE}:again", degrees=degrees, folder=folder, bad=bad, steps=pairs)
    assert len({repr([found for found, _ in answer]) for answer in answers}) == 1  # as text: NaN is not equal to itself
    return answers[0]


@pytest.fixture(scope="module")
def finished(pools, tmp_path_factory) -> Path:
    """An undisturbed run on one process; tests change a copy."""
    folder = tmp_path_factory.mktemp("finished")
    run(pools, {}, folder, "stop", {})
    return folder


def numbers(found: Replayed) -> tuple[int, float, float]:
    return found.step.number, found.step.loss, found.step.norm


@pytest.mark.parametrize(
    ("degrees", "flavor"),
    [
        ({}, "tied"),
        ({"dp_shard": 2}, "uneven"),
        ({"pp": 2}, "tied"),
        pytest.param(TWO_BY_TWO, "uneven", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_on_the_same_mesh_is_the_run_bit_for_bit_and_on_one_process_within_rounding(pools, tmp_path, degrees, flavor):
    run(pools, degrees, tmp_path, "stop", {}, flavor=flavor)
    expected = {report[0]: report for report in reports(tmp_path)}
    for found, text in replays(pools, degrees, tmp_path, {}, 1, 5, 6, 12):
        assert numbers(found) == expected[found.step.number]
        assert "metrics.jsonl  loss equal, gradient norm equal" in text
        after = {1: "the initial weights", 5: "the initial weights", 6: "the checkpoint of step 5"}
        assert found.start == after.get(found.step.number, "the checkpoint of step 10")
        total = math.sqrt(sum(layer.gradient**2 for layer in found.layers.values()))
        assert total == pytest.approx(found.step.norm, rel=1e-5)
    assert list(found.layers) == ["embed", "layers.0", "layers.1", "head"]
    ((alone, _),) = replays(pools, {}, tmp_path, {}, 7)
    assert numbers(alone) == pytest.approx(expected[7], rel=1e-4)
    ((found, _),) = replays(pools, degrees, tmp_path, {}, 7)
    for name, layer in found.layers.items():
        assert alone.layers[name] == pytest.approx(layer, rel=1e-3), name


def test_weights_and_updates_are_those_of_the_checkpoints_around_a_step(pools, tmp_path):
    run(pools, {"tp": 2}, tmp_path, "stop", {}, steps=7, checkpoint={"interval": 1})
    ((found, _),) = replays(pools, {"tp": 2}, tmp_path, {}, 7)
    weights, updates = Counter[str](), Counter[str]()
    before, after = stored(tmp_path, 6), stored(tmp_path, 7)
    for name in (name for name in before if name.startswith("model.")):
        layer = layer_of(name.removeprefix("model."))
        weights[layer] += before[name].double().square().sum().item()
        updates[layer] += (after[name].double() - before[name].double()).square().sum().item()
    for name, squares in weights.items():
        assert found.layers[name].weights == pytest.approx(math.sqrt(squares), rel=1e-6)
        assert found.layers[name].update == pytest.approx(math.sqrt(updates[name]), rel=1e-6)


def test_after_a_rollback_metrics_show_the_last_attempt_and_the_first_can_be_replayed(pools, tmp_path):
    degrees = {"dp_shard": 2}
    run(pools, degrees, tmp_path / "run", "rollback", BAD)
    run(pools, degrees, tmp_path / "first", "skip", BAD)
    expected = {report[0]: report for report in reports(tmp_path / "run")}
    first = {report[0]: report for report in reports(tmp_path / "first")}
    last, early, bad, late, same = replays(pools, degrees, tmp_path / "run", BAD, 8, (7, 1), (8, 1), (8, 2), 12)
    assert numbers(last[0]) == expected[8] == numbers(late[0])
    assert "attempt 2 of 2" in last[1] and "loss equal, gradient norm equal" in last[1]
    assert last[0].step.first_sample == 64 + 2 * 8
    assert numbers(early[0]) == first[7] != expected[7]
    assert math.isnan(bad[0].step.loss) and bad[0].step.first_sample == 56 and "metrics.jsonl" not in bad[1]
    assert all(math.isnan(layer.gradient) and layer.update == 0 for layer in bad[0].layers.values())
    assert numbers(same[0]) == expected[12]


def test_a_replay_repeats_several_rollbacks_without_a_checkpoint_between_them(pools, tmp_path):
    bad = {7: tiny_poison.OF_LOSS, 13: tiny_poison.OF_GRADIENT}  # the second: at step 11, after the checkpoint of step 10
    run(pools, {}, tmp_path, "rollback", bad, steps=14)
    expected = {report[0]: report for report in reports(tmp_path)}
    for step in (5, 10):
        (tmp_path / f"checkpoint/step-{step:08d}").rename(tmp_path / f"away-{step}")
    for found, text in replays(pools, {}, tmp_path, bad, 6, 11, 14):
        assert numbers(found) == expected[found.step.number]
        assert found.start == "the initial weights" and "loss equal, gradient norm equal" in text


def test_an_attempt_does_not_start_from_a_checkpoint_of_a_later_one(pools, tmp_path):
    run(pools, {}, tmp_path / "run", "rollback", BAD)
    run(pools, {}, tmp_path / "first", "skip", BAD)
    path = tmp_path / "run" / INCIDENTS
    path.write_text(path.read_text().replace('"found_at": 8', '"found_at": 11'))  # as if the losses had not been read before
    ((found, _),) = replays(pools, {}, tmp_path / "run", BAD, (11, 1))
    assert found.start == "the checkpoint of step 5"
    assert numbers(found) == reports(tmp_path / "first")[10]


def test_a_skipped_step_and_those_after_it_are_replayed(pools, tmp_path):
    run(pools, {"tp": 2}, tmp_path, "skip", BAD)
    expected = {report[0]: report for report in reports(tmp_path)}
    skipped, after = replays(pools, {"tp": 2}, tmp_path, BAD, 8, 9)
    assert "metrics.jsonl  loss is not finite there either, gradient norm is not finite there either" in skipped[1]
    assert numbers(after[0]) == expected[9]


def test_in_float16_norms_are_without_the_loss_scale(pools, tmp_path):
    run(pools, {}, tmp_path, "stop", {}, training={"mixed_precision_param": "float16"})
    ((found, _),) = replays(pools, {}, tmp_path, {}, 12)
    assert numbers(found) == reports(tmp_path)[-1]
    total = math.sqrt(sum(layer.gradient**2 for layer in found.layers.values()))
    assert total == pytest.approx(found.step.norm, rel=1e-4)


def test_a_step_is_replayed_with_its_own_rate_and_not_that_of_a_later_start(pools, tmp_path):
    run(pools, {}, tmp_path, "stop", {}, steps=8)
    later = {"optimizer": {"lr": 1e-3}, "checkpoint": {"allow_changes": ["optimizer.lr"]}}
    run(pools, {}, tmp_path, "stop", {}, **later)
    expected = {report[0]: report for report in reports(tmp_path)}
    for found, _ in replays(pools, {}, tmp_path, {}, 3, 8, 9, 12):
        assert numbers(found) == expected[found.step.number]
    for number in (8, 5):  # as retention does; from an earlier checkpoint, or the start, steps up to 8 would get the later rate
        shutil.rmtree(tmp_path / f"checkpoint/step-{number:08d}")
        for step in (7, 9):
            with pytest.raises(WorkerFailure, match=rf"--step {step}: the steps up to . were .*\n.*optimizer.lr"):
                replays(pools, {}, tmp_path, {}, step)


@pytest.mark.parametrize(
    ("starts", "before", "step", "refused"),
    [  # starts: the step from which each went on, and its rate
        ([(0, 1), (8, 2)], 5, 9, True),
        ([(0, 1), (8, 2)], 5, 7, True),  # a step before the resume, of which the next checkpoint is behind it
        ([(0, 1), (8, 2), (12, 2)], 0, 14, True),
        ([(0, 1), (8, 2)], 8, 9, False),
        ([(0, 1), (5, 2), (8, 2)], 5, 9, False),
        ([(100, 2)], 100, 120, False),  # a branch of another run
        ([(0, 2), (1234, 1), (1000, 2)], 1000, 1300, False),  # load_step went back behind a start that was abandoned
    ],
)
def test_steps_are_replayed_only_with_the_values_with_which_the_starts_computed_them(starts, before, step, refused):
    written = [{"resumed_step": begun, "compared": {"optimizer.lr": rate}} for begun, rate in starts]
    with pytest.raises(UserError, match=r"optimizer\.lr = 2, was 1") if refused else contextlib.nullcontext():
        check_between(before, step, written, {"optimizer.lr": 2}, {}, {})


INITIAL, EXCLUDE = "checkpoint.initial_load_path", "checkpoint.exclude_from_loading"
NONE, MOMENTS = {EXCLUDE: []}, {EXCLUDE: ["optimizer.*"]}


@pytest.mark.parametrize(
    ("starts", "before", "step", "now", "refused"),
    [  # starts: the step from which each went on, and what it recorded
        ([(0, NONE), (8, MOMENTS)], 5, 9, MOMENTS, EXCLUDE),  # reset at step 8
        ([(0, NONE), (8, MOMENTS)], 5, 7, MOMENTS, EXCLUDE),  # the replay would reset them at step 5
        ([(0, NONE), (8, MOMENTS), (10, NONE)], 5, 11, NONE, EXCLUDE),
        ([(0, NONE), (8, MOMENTS)], 8, 9, MOMENTS, ""),  # both load step 8
        ([(0, NONE), (8, MOMENTS), (10, MOMENTS)], 8, 11, MOMENTS, ""),  # at step 10, these patterns had taken effect
        ([(0, MOMENTS | {INITIAL: "a"}), (8, NONE)], 5, 9, NONE, ""),
        ([(0, MOMENTS | {INITIAL: "a"}), (8, MOMENTS), (10, NONE)], 8, 11, NONE, ""),  # at step 8, they had taken effect
        ([(0, NONE | {INITIAL: ""}), (8, MOMENTS)], 0, 7, MOMENTS | {INITIAL: ""}, ""),  # nothing was loaded
        ([(0, MOMENTS | {INITIAL: "a"}), (8, NONE)], 0, 7, NONE | {INITIAL: "a"}, EXCLUDE),
        ([(0, NONE | {INITIAL: "a"}), (8, NONE)], 0, 7, NONE | {INITIAL: "b"}, INITIAL),
        ([(0, NONE | {INITIAL: "a"}), (8, NONE)], 5, 9, NONE | {INITIAL: "b"}, ""),
        ([(0, {}), (8, {})], 0, 9, NONE | {INITIAL: "b"}, ""),  # of an earlier version
    ],
)
def test_steps_are_not_replayed_past_a_start_that_loaded_otherwise(starts, before, step, now, refused):
    written = [{"resumed_step": begun, "compared": {}, "loading": loading} for begun, loading in starts]
    with pytest.raises(UserError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        check_between(before, step, written, now, {}, {})


def test_steps_with_another_teacher_are_not_replayed():
    starts = [{"compared": {}, "teacher": "1"}, {"resumed_step": 8, "compared": {}, "teacher": "2"}]
    with pytest.raises(UserError, match="teacher = '2', was '1'"):
        check_between(0, 9, starts, {"teacher": "2"}, {}, {})
    check_between(8, 9, starts, {"teacher": "2"}, {}, {})


def test_what_a_resume_excluded_and_what_the_first_start_began_from_are_compared(pools, finished, tmp_path):
    begin = {"initial_load_path": str(finished / "checkpoint/step-00000012")}
    run(pools, {}, tmp_path, "stop", {}, steps=8, checkpoint=begin)
    other = {"initial_load_path": str(finished / "checkpoint/step-00000005")}  # not read any more
    run(pools, {}, tmp_path, "stop", {}, checkpoint={**other, "exclude_from_loading": ["*.head.*"]})
    expected = {report[0]: report for report in reports(tmp_path)}
    for found, _ in replays(pools, {}, tmp_path, {}, 3, 7, 9, 12):
        assert numbers(found) == expected[found.step.number]
    shutil.rmtree(tmp_path / "checkpoint/step-00000008")
    for step in (7, 9):
        with pytest.raises(WorkerFailure, match=rf"--step {step}: the steps up to . were .*\n.*{EXCLUDE}"):
            replays(pools, {}, tmp_path, {}, step)
    shutil.rmtree(tmp_path / "checkpoint/step-00000005")
    with pytest.raises(WorkerFailure, match=rf"--step 3: the steps up to 3 were .*\n(.*\n)*.*{INITIAL}"):
        replays(pools, {}, tmp_path, {}, 3)


def test_starts_of_an_earlier_version_which_recorded_no_values_are_not_compared():
    now, source = {"optimizer.lr": 2}, {"own": {"hash": "", "text": ""}}
    check_between(0, 5, [{"time": "", "command": [], "global_batch": 8}], now, source, {})


def test_a_step_is_not_replayed_where_other_code_computed_steps_before_it():
    then, now = ({"own": {"hash": text, "text": text}} for text in ("1", "2"))
    with pytest.raises(UserError, match="the code of own"):
        check_between(0, 9, [{"compared": {}, "own_source": then}, {"resumed_step": 8, "compared": {}}], {}, now, {})


def test_after_load_step_the_steps_since_then_are_replayed(pools, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    later = {"optimizer": {"lr": 1e-3}, "checkpoint": {"load_step": 5, "allow_changes": ["optimizer.lr"]}}
    run(pools, {}, tmp_path, "stop", {}, **later)
    expected = {report[0]: report for report in reports(tmp_path)}
    starts = ["the initial weights", "the checkpoint of step 5", "the checkpoint of step 10"]
    for (found, _), start in zip(replays(pools, {}, tmp_path, {}, 4, 8, 12), starts, strict=True):
        assert numbers(found) == expected[found.step.number]
        assert found.start == start


def test_replay_says_that_dropout_drew_other_numbers_on_the_mesh_of_the_run(pools, tmp_path):
    name, degrees = "tests.tiny_dropout", {"dp_shard": 2}
    run(pools, degrees, tmp_path, "stop", {}, steps=2, model={"name": name})
    keys = {"folder": tmp_path, "bad": {}, "steps": [(2, None)], "model": name}
    ((same, _),) = pools[2].run(f"{HERE}:again", degrees=degrees, **keys)[0]
    assert numbers(same) == reports(tmp_path)[1] and not same.other_mesh
    ((other, text),) = pools[1].run(f"{HERE}:again", degrees={}, **keys)[0]
    assert abs(other.step.loss / same.step.loss - 1) > 1e-4
    assert "the run's mesh was dp_shard 2, where the model's dropout drew other numbers" in text and "--ranks" in text


def test_a_damaged_checkpoint_is_not_used(pools, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint/step-00000010/manifest.json").unlink()
    ((found, _),) = replays(pools, {}, tmp_path, {}, 11)
    assert found.start == "the checkpoint of step 5"
    assert numbers(found) == reports(tmp_path)[10]


def test_the_last_step_and_the_mesh_of_a_run_are_found(pools, tmp_path):
    with pytest.raises(WorkerFailure):
        run(pools, {}, tmp_path, "stop", BAD, log_freq=4)
    file = tmp_path / "config.toml"  # with a value of 0.3 that is gone
    file.write_text(re.sub("(# )?(fsdp_reshard_after_forward) = .*", r"\2 = 8", file.read_text()))
    config, global_batch = setting_of(tmp_path, 8, MODEL)
    assert global_batch == 8
    assert furthest(tmp_path, config, read_entries(tmp_path / INCIDENTS)) == 12
    split = replay_config(config.model_copy(update={"parallelism": config.parallelism.model_copy(
        update={"tensor_parallel_degree": 2, "reduce_every_microbatch": False})}), 8, 8)  # fmt: skip
    assert (split.training.local_batch_size, split.parallelism.reduce_every_microbatch) == (2, True)
    experts = split.parallelism.model_copy(update={"tensor_parallel_degree": 1, "expert_parallel_degree": 2})
    assert replay_config(split.model_copy(update={"parallelism": experts}), 8, 4).parallelism.expert_parallel_degree == 2
    alone = replay_config(split, 8, None)
    assert (alone.parallelism.tensor_parallel_degree, alone.training.local_batch_size) == (1, 2)


def rewrite(folder: Path, step: int, **numbers) -> None:
    """Changes numbers of a checkpoint's manifest."""
    path = folder / f"checkpoint/step-{step:08d}"
    found = manifest.read(path)
    manifest.write(path, found._replace(numbers=found.numbers | numbers))


def other_code(folder: Path, step: int) -> dict[str, dict[str, str]]:
    """Changes the code in a checkpoint as if one file had been edited since."""
    code = manifest.read(folder / f"checkpoint/step-{step:08d}").numbers["model_source"]
    return code | {"tests.tiny_poison": {"hash": "of then", "text": "SCALE = 1\n"}}


def warnings_of(source: Path) -> list[str]:
    """The warnings when the weights of a checkpoint are opened for generation and for an export."""
    logger, handler, messages = logging.getLogger("titanlite"), logging.Handler(), []
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with patch("titanlite.data.sources.tokenizer_digest", lambda _: "no tokenizer"):
            open_model(source, CPU, name=MODEL)
        Exported(Stored(source), named=MODEL)
    finally:
        logger.removeHandler(handler)
    return messages


def test_with_changed_code_no_step_is_replayed_and_generation_and_export_warn(pools, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoint/step-00000012"
    assert pools[1].run(f"{HERE}:warnings_of", source=newest) == [[]]
    rewrite(tmp_path, 12, model_source=other_code(tmp_path, 12))
    replays(pools, {}, tmp_path, {}, 8)
    with pytest.raises(WorkerFailure, match=r"--step 11: the code of the model has changed since .*\n.*tests.tiny_poison then"):
        replays(pools, {}, tmp_path, {}, 11)
    (messages,) = pools[1].run(f"{HERE}:warnings_of", source=newest)
    assert len(messages) == 2 and all("has changed since: tests.tiny_poison" in message for message in messages)
    rewrite(tmp_path, 10, model_source=other_code(tmp_path, 12))
    newest.rename(tmp_path / "lost")
    with pytest.raises(WorkerFailure, match=r"\n  model.source = 'tests.tiny_poison \w+', was 'tests.tiny_poison of then'"):
        run(pools, {}, tmp_path, "stop", {})


def test_a_step_after_a_mixture_change_is_not_replayed_from_before_it(pools, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    timeline = manifest.read(tmp_path / "checkpoint/step-00000012").numbers["timeline"]
    rewrite(tmp_path, 12, timeline=[*timeline, timeline[0] | {"first_step": 11, "first_sample": 80, "began": 80}])
    with pytest.raises(WorkerFailure, match=r"--step 12: sources, weights or the global batch changed after step 10, and"):
        replays(pools, {}, tmp_path, {}, 12)


@pytest.mark.parametrize(
    ("then", "fault"),
    [
        ({"learnable": "edited"}, "data = 'tests: .*fingerprint learnable,.*', was 'tests: .*fingerprint edited,"),
        ({"no tokenizer": "older"}, "data = 'tokenizer no tokenizer', was 'tokenizer older'"),
    ],
)
def test_a_step_is_not_replayed_with_data_that_changed_since(pools, finished, tmp_path, then, fault):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    ((old, new),) = then.items()
    for number in (5, 10):
        shutil.rmtree(tmp_path / f"checkpoint/step-{number:08d}")
    found = manifest.read(tmp_path / "checkpoint/step-00000012").numbers
    rewrite(tmp_path, 12, **{key: json.loads(json.dumps(found[key]).replace(old, new)) for key in ("data", "timeline")})
    for saved in (True, False):  # without a later checkpoint, the start says which data the run had
        if not saved:
            shutil.rmtree(tmp_path / "checkpoint/step-00000012")
            (start,) = json.loads((tmp_path / PROVENANCE).read_text())
            start["data"] = json.loads(json.dumps(start["data"]).replace(old, new))
            (tmp_path / PROVENANCE).write_text(json.dumps([start]))
        with pytest.raises(WorkerFailure, match=rf"--step 7: the data has changed since the run did this step:\n +{fault}"):
            replays(pools, {}, tmp_path, {}, 7)


def test_steps_are_not_replayed_with_the_data_of_a_later_start():
    sources = [{"name": "text", "documents": 1, "tokens": 9, "fingerprint": name, "share": 1.0} for name in "ab"]
    first, later = ({"tokenizer": "", "beginning": "", "sources": [source]} for source in sources)
    starts = [{"compared": {}, "data": first}, {"resumed_step": 8, "compared": {}, "data": later}]
    with pytest.raises(UserError, match=r"(?s)a checkpoint between is gone.*fingerprint b,.*was .*fingerprint a,"):
        check_between(0, 9, starts, {}, {}, later)
    check_between(8, 9, starts, {}, {}, later)
