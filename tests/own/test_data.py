"""Data of the user's own: a map and a stream on meshes, mixed, resumed, rolled back; each fault is one message."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny_poison
from tests.distributed.as_one import as_one_process
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import config_of
from tests.distributed.test_resume import ONE, STEPS, TWO_BY_TWO, assert_same_end, losses, reports, run_config
from tests.own import parts
from tests.own.data_runs import full_run, opened_data
from tests.waiting import until
from titanlite.config.read import read_config, to_toml
from titanlite.config.schema import Config
from titanlite.data import batches
from titanlite.data.batches import Batches, StepDataset, steps_of
from titanlite.data.own import ENDLESS, faults
from titanlite.ground.errors import UserError
from titanlite.ground.run_files import INCIDENTS, read_entries
from titanlite.parallel.mesh import build_mesh, ranks_of, resolve_degrees
from titanlite.registry.own import source_of_parts
from titanlite.tools import data as tool

RUNS = "tests.own.data_runs"
SUMS, WALKS = "tests.own.parts:Sums", "tests.own.parts:Walks"
WRONG, WRONG_STREAM = "tests.own.data_parts:Wrong", "tests.own.data_parts:WrongStream"
MIXED = {"sources": [{"path": "files", "weight": 1.0}, {"path": SUMS, "weight": 3.0, "options": {"digits": 1}}]}


def configured(
    dataset: str = SUMS, mesh: dict[str, int] = ONE, options: dict[str, Any] | None = None, **training: Any
) -> Config:
    return config_of(mesh, training={"dataset": dataset, "dataset_options": options or {}, **training})


def batches_of(config: Config, rank: int = 0, degree: int = 1) -> Batches:
    data = opened_data(config, 512)
    return Batches(steps_of(config, data, (rank, degree), data.timeline(8), 1))


# ------------------------------------------------------------------------------------------------------------- the rows


def test_a_row_has_the_ids_the_labels_and_the_documents_that_the_map_returns():
    config = configured(options={"count": 5}, document_mask=True)
    (tokens, counted, documents) = (each.flatten(0, 1) for each in next(batches_of(config)))
    answers = [parts.Sums(32, count=5).read(i) for i in range(5)]
    for row in range(8):
        (i,) = [i for i, (ids, _, _) in enumerate(answers) if ids == tokens[row].tolist()]
        _, loss, ends = answers[i]
        starts = [0, *ends]
        assert counted[row].tolist() == [wanted and at not in starts for at, wanted in enumerate(loss)]
        assert documents[row].tolist() == [1 + sum(end <= at for end in ends) for at in range(32)]


def test_every_sample_comes_once_an_epoch_in_another_order_each_time():
    source = opened_data(configured(options={"count": 24}), 512)
    segment, _ = source.timeline(8).at(1)
    orders = [source.locate(np.arange(24) + epoch * 24, 0, segment)[1].tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_an_endless_map_is_drawn_in_the_order_of_its_samples_and_its_short_rows_are_padded():
    config = configured("tests.own.data_parts:Endless", local_batch_size=4)
    (batch, other) = (next(batches_of(config, rank, 2)) for rank in (0, 1))
    assert torch.cat([batch.tokens, other.tokens], 1)[0, :, 0].tolist() == [i // 4 for i in range(8)]
    assert batch.counted is not None and batch.counted[0].sum(-1).tolist() == [2] * 4
    assert opened_data(config, 512).sources[0].samples == ENDLESS


def test_a_part_in_a_configuration_file_reads_back_and_its_code_belongs_to_the_run(tmp_path):
    keys = {"training.dataset": SUMS, "training.dataset_options.digits": 1, "validation.enable": "true"}
    config = read_config(None, [f"--{key}={value}" for key, value in {**keys, "validation.dataset": WALKS}.items()])
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert read_config(tmp_path / "config.toml", []) == config
    assert "class Sums" in source_of_parts(config)["tests.own.parts"]["text"]
    assert "class Sums" in source_of_parts(config_of(ONE, training=MIXED))["tests.own.parts"]["text"]


# ---------------------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "raises": (WRONG, {"way": "raises"}, r"read\(0\) fails \(.*data_parts.py, line \d+\): ZeroDivisionError"),
    "cannot be made": (WRONG, {"way": "assertion"}, r"cannot be made \(.*data_parts.py, line \d+\): AssertionError"),
    "empty": (WRONG, {"way": "empty"}, "has 0 samples"),
    "id": (WRONG, {"way": "id"}, r"read\(0\) gives the id 1000000 at token 32, and the model's vocabulary is 512"),
    "negative": (WRONG, {"way": "negative"}, r"read\(0\) gives the id -1 at token 0"),
    "long": (WRONG, {"way": "long"}, r"list of shape \(34,\) .* must be 1 to seq_len \+ 1 = 33 integers"),
    "empty row": (WRONG, {"way": "empty row"}, r"of shape \(0,\)"),
    "floats": (WRONG, {"way": "floats"}, "dtype float64; must be 1 to"),
    "text": (WRONG, {"way": "text"}, "ids as str"),
    "short mask": (WRONG, {"way": "short mask"}, r"a loss mask of shape \(1,\) and dtype bool"),
    "mask of numbers": (WRONG, {"way": "mask of numbers"}, "dtype int64; must be bool"),
    "falling ends": (WRONG, {"way": "falling ends"}, r"ends of documents \[5, 3\]"),
    "broken ends": (WRONG, {"way": "broken ends"}, "gives no valid row.*float"),
    "not pure": (WRONG, {"way": "not pure"}, "differs from object to object; must be a function of i"),
    "misspelt option": (SUMS, {"digit": 3}, r"training\.dataset_options\.digit: .*did you mean"),
    "no option": (WRONG, {}, r"must take training\.dataset_options by keyword: missing a required argument: 'way'"),
    "no read": ("tests.own.data_parts:Unready", {}, r"has no read; it is a map; a stream takes rank and degree \(.*, line"),
    "no class": ("tests.own.data_parts:number", {}, "must be a class or a function"),
    "no state": ("tests.own.data_parts:Stateless", {}, "has no state_dict, load_state_dict or reset; it is a stream"),
    "stream ends": (WRONG_STREAM, {"way": "ends"}, "ends after 2 rows of this start; must last until training.steps"),
    "stream raises": (WRONG_STREAM, {"way": "raises"}, r"item 2 fails \(.*data_parts.py, line \d+\): RuntimeError"),
    "late state": (WRONG_STREAM, {"way": "late"}, "continues from its state with other rows"),
    "cannot load": (WRONG_STREAM, {"way": "cannot load"}, r"cannot continue from its state \(.*: KeyError\('place'\)"),
    "numpy": (WRONG_STREAM, {"way": "numpy"}, r"state_dict\(\)\['more'\]\[0\]\['value'\] is .*3.*; a checkpoint"),
    "keys": (WRONG_STREAM, {"way": "keys"}, r"\['value'\]\[1\] is 1; a checkpoint"),
    "nan": (WRONG_STREAM, {"way": "nan"}, "Out of range float values are not JSON"),
    "digits": (WRONG_STREAM, {"way": "digits"}, r"state_dict\(\): an integer of more than 40 digits"),
    "large": (WRONG_STREAM, {"way": "large"}, "a checkpoint holds 33,554,432"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_data_is_one_message_with_its_key_and_line(case):
    dataset, options, words = REFUSED[case]
    (fault,) = faults(configured(dataset, options=options), 512)
    assert fault.startswith("training.dataset")
    assert fault.startswith("training.dataset_options") or "parts.py" in fault  # the user's file, not titanlite's
    with pytest.raises(UserError, match=words):
        raise UserError(fault)


PAIRS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "stream in a mixture": ({"training": {"sources": [{"path": "files"}, {"path": WALKS}]}}, "entry 2: path.*is a stream"),
    "stream with epochs": ({"training": {"sources": [{"path": WALKS, "epochs": 2}]}}, "has no epochs"),
    "endless without weight": (
        {"training": {"sources": [{"path": "files"}, {"path": "tests.own.data_parts:Endless"}]}},
        "give every source a",
    ),
    "policy": ({"training": {"dataset": SUMS, "document_policy": "best_fit"}}, 'document_policy = "best_fit": has no effect'),
    "stream in validation": (
        {"training": {"dataset": SUMS}, "validation": {"dataset": WALKS, "enable": True}},
        r"validation\.dataset = .*is a stream.*validation reads the same samples",
    ),
}


BOTH_WAYS = {"name": "tests.forks.right.bidirectional", "flavor": "plain"}  # each token would attend to the padding


@pytest.mark.parametrize("section", ["training", "validation"])
@pytest.mark.parametrize(("way", "mask", "refused"), [("short", False, 1), ("inputs", False, 0), ("short", True, 0)])
def test_a_model_that_is_not_causal_takes_no_padding_without_a_document_mask(section, way, mask, refused):
    sections: dict[str, dict[str, Any]] = {"training": {"dataset": SUMS}, "validation": {"dataset": SUMS, "enable": True}}
    sections[section] |= {"dataset": WRONG, "dataset_options": {"way": way}}
    sections["training"]["document_mask"] = mask
    found = faults(config_of(ONE, model=BOTH_WAYS, **sections), 512)
    assert [fault.startswith(f"{section}.dataset") and "document_mask = true" in fault for fault in found] == [True] * refused


@pytest.mark.parametrize("case", PAIRS)
def test_incompatible_keys_are_refused(case):
    sections, words = PAIRS[case]
    with pytest.raises(UserError, match=words):
        raise UserError("\n".join(faults(config_of(ONE, **sections), 512)))


def test_options_of_files_and_a_part_as_a_path_are_refused():
    for training, words in (
        ({"sources": [{"path": "files", "options": {"digits": 1}}]}, 'the options of "files" have no effect'),
        ({"dataset_path": SUMS}, "as training.dataset"),
    ):
        with pytest.raises(UserError, match=words):
            opened_data(config_of(ONE, training=training), 512)


def test_a_map_without_labels_is_named_after_some_of_its_samples():
    from titanlite.data.mixture import check_labels

    with pytest.raises(UserError, match="Wrong: 10 documents"):
        check_labels(opened_data(configured(WRONG, options={"way": "no labels"}), 512))


def test_a_map_that_differs_between_ranks_is_refused_at_the_start(pools):
    config = configured("tests.own.data_parts:OfTheRank", {"tp": 2}, steps=1)
    with pytest.raises(WorkerFailure, match=r"training\.dataset = .*differs between ranks; .*data_parts.py, line"):
        pools[2].run(f"{RUNS}:trajectory", degrees={"tp": 2}, config=config)


def test_the_row_of_a_stream_that_is_read_is_named_if_it_stalls():
    """tests/unit/test_batches.py has the warning."""
    data = opened_data(configured(WALKS), 512)
    steps = steps_of(configured(WALKS), data, (0, 1), data.timeline(8), 1)
    source = Batches(steps)
    next(source)
    source.close()
    assert re.fullmatch(rf'source "{WALKS}", {WALKS} \(.*parts.py, line \d+\), item 8', steps.last_read(2))


def test_show_and_stats_print_what_is_known_of_a_map(tmp_path, assets):
    (tmp_path / "run.toml").write_text(f"""
[job]
dump_folder = "{tmp_path}/out"
[model]
name = "tests.tiny"
flavor = "plain"
hf_assets_path = "{assets}"
[training]
seq_len = 16
local_batch_size = 2
dataset = "{SUMS}"
""")
    shown = list(tool._ACTIONS["show"]([str(tmp_path / "run.toml"), "--step", "1"]))
    assert re.fullmatch(rf"=== sample 0 \(data rank 0\): {SUMS} \(.*parts.py, line \d+\), read\(\d+\)", shown[0])
    assert len(shown) == 4
    stats = "\n".join(tool._ACTIONS["stats"]([str(tmp_path / "run.toml")]))
    assert "samples     100,000 an epoch" in stats and "waste" not in stats


def test_samples_of_a_stream_have_no_numbers():
    with pytest.raises(UserError, match="is a stream, whose samples have no numbers; only a run reads it"):
        StepDataset(configured(WALKS), opened_data(configured(WALKS), 512), (0, 1))


def test_a_worker_killed_in_the_middle_of_a_message_is_reported(monkeypatch):
    monkeypatch.setattr(batches, "_UNNOTICED", 0.2)
    heavy = {"dataset": "tests.own.data_parts:Heavy"}
    source = batches_of(config_of(ONE, training=heavy, dataloader={"workers": 1}))
    until(source._source._worker_result_queue._reader.poll)  # the worker waits for the pipe to be read
    worker = source._source._workers[0]
    worker.kill()
    worker.join()
    with pytest.raises(RuntimeError, match="a data worker has ended"):
        next(source)
    source.close()


# -------------------------------------------------------------------------------------------------------------- meshes

# test_together.py has a map without a mask
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp 2": ({"cp": 2}, {"document_mask": True, "dataset": SUMS}),
    "2 x 2, a mixture": (TWO_BY_TWO, {"document_mask": True, **MIXED}),
}


@pytest.mark.parametrize("name", MESHES)
def test_batches_losses_and_gradients_of_a_map_are_those_of_one_process(pools, name):
    mesh, training = MESHES[name]
    as_one_process(pools, mesh, lambda each: config_of(each, training={"steps": 3, **training}), f"{RUNS}:trajectory")


def test_a_map_is_validated_on_with_the_same_loss_on_every_mesh(pools, tmp_path):
    validation = {"enable": True, "dataset": SUMS, "dataset_options": {"count": 11}, "freq": 2, "steps": -1}
    found = []
    for name, mesh in (("one", ONE), ("four", TWO_BY_TWO)):
        run(pools, mesh, tmp_path / name, 2, "tests.own.data_parts:Endless", validation=validation)
        found.append(reports(tmp_path / name)[-1]["validation_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- resumes


@pytest.mark.parametrize(
    ("dataset", "workers"), [(SUMS, 2), pytest.param(WALKS, 2, marks=pytest.mark.slow), ("tests.own.data_parts:Node", 0)]
)
def test_a_resumed_run_is_the_uninterrupted_one(dataset, workers, tmp_path, group_of_one):
    mesh = build_mesh(resolve_degrees(Config().parallelism, 1), "cpu")
    for folder, lengths in (("whole", (STEPS,)), ("parts", (4, 8, STEPS))):
        for steps in lengths:
            dataloader = {"workers": workers if folder == "parts" else 0}
            full_run(ONE, run_config(ONE, tmp_path / folder, steps, training={"dataset": dataset}, dataloader=dataloader), mesh)
            if (folder, steps) == ("parts", 8):  # resumes from a checkpoint saved while the next batch was read
                shutil.rmtree(tmp_path / "parts/checkpoint/step-00000008")
    assert_same_end(tmp_path)
    manifest = json.loads((tmp_path / f"parts/checkpoint/step-{STEPS:08d}/manifest.json").read_text())
    assert manifest["samples"] == 8 * STEPS
    assert manifest["stream"] == ([] if dataset == SUMS else [{"rows": 8 * STEPS}])


def run(pools: dict[int, Pool], mesh: dict[str, int], folder: Path, steps: int, dataset: str, **sections: Any) -> None:
    config = run_config(mesh, folder, steps, training={"dataset": dataset, **sections.pop("training", {})}, **sections)
    pools[ranks_of(mesh)].run(f"{RUNS}:full_run", degrees=mesh, config=config)


def test_a_stream_with_reshard_continues_on_another_number_of_data_ranks(pools, tmp_path):
    run(pools, ONE, tmp_path / "whole", STEPS, WALKS)
    for mesh, steps in ((ONE, 4), ({"dp_shard": 2}, 8), (ONE, STEPS)):
        run(pools, mesh, tmp_path / "moved", steps, WALKS)
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_a_stream_without_reshard_is_refused_on_another_number_of_data_ranks(pools, tmp_path):
    run(pools, {"dp_shard": 2}, tmp_path, 4, "tests.own.data_parts:Fixed")
    with pytest.raises(WorkerFailure, match=r"has the states of 2 data ranks, and this run has 1: .*reshard"):
        run(pools, ONE, tmp_path, 8, "tests.own.data_parts:Fixed")


def test_a_stream_is_replayed_from_its_beginning_on_as_many_data_ranks_or_with_reshard(pools, tmp_path):
    two = {"dp_shard": 2}
    for name in ("Fixed", "Walks"):
        part, folder = f"tests.own.data_parts:{name}", tmp_path / name
        run(pools, two, folder, 4, part)
        keys, expected = {"folder": folder, "step": 3, "part": part}, reports(folder)[2]["loss"]
        for saved in (True, False):  # a run that stops before its first save has no states
            if not saved:
                shutil.rmtree(folder / "checkpoint")
            assert pools[2].run(f"{RUNS}:replayed", degrees=two, **keys)[0] == expected
            if name == "Walks":
                assert pools[1].run(f"{RUNS}:replayed", degrees={}, **keys)[0] == pytest.approx(expected, rel=1e-5)
            else:
                with pytest.raises(WorkerFailure, match=r"the run had 2 data ranks, and the replay has 1: .*--ranks.*reshard"):
                    pools[1].run(f"{RUNS}:replayed", degrees={}, **keys)


def test_a_stream_whose_states_are_gone_since_other_data_came_is_refused(pools, tmp_path):
    """It would begin again, and its rows would be read twice."""
    allowed = {"checkpoint": {"allow_changes": ["data", "model.source"]}}
    for dataset, steps in ((WALKS, 4), (SUMS, 6)):
        run(pools, ONE, tmp_path, steps, dataset, **allowed)
    with pytest.raises(WorkerFailure, match=r"has read 32 samples of .*Walks.* before other data.*initial_load_path"):
        run(pools, ONE, tmp_path, 8, WALKS, **allowed)


def test_a_resume_with_other_options_is_refused_like_one_with_other_files(pools, tmp_path):
    run(pools, ONE, tmp_path, 4, SUMS)
    with pytest.raises(WorkerFailure, match=r"(?s)data = 'tests.own.parts:Sums: .*--checkpoint\.allow_changes data"):
        run(pools, ONE, tmp_path, 8, SUMS, training={"dataset_options": {"digits": 1}})


def test_a_rollback_rewinds_the_stream_and_skips_the_bad_batch(pools, tmp_path):
    keys = {"training": {"on_nonfinite": "rollback"}, "model": {"name": "tests.tiny_poison"}}
    run(pools, ONE, tmp_path / "run", STEPS, "tests.own.data_parts:Poisoned", **keys)
    (entry,) = [each for each in read_entries(tmp_path / "run" / INCIDENTS) if each["kind"] == "rollback"]
    assert (entry["to_step"], entry["next_sample"]) == (5, 56)
    manifest = json.loads((tmp_path / f"run/checkpoint/step-{STEPS:08d}/manifest.json").read_text())
    assert (manifest["samples"], manifest["stream"]) == (8 * STEPS + 16, [{"rows": 8 * STEPS + 16}])
    assert all(np.isfinite(losses(tmp_path / "run")))
    assert tiny_poison.OF_LOSS == 7
