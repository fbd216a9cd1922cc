"""What may change between a checkpoint and the run that resumes from it: every key has a verdict, and a working remedy."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.distributed.scenarios import learnable_data
from tests.token_files import data_of
from titanlite.checkpoint import load
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.effects import Hardware
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.resume import (
    Progress,
    RunIdentity,
    changeable,
    changes,
    check_changes,
    load_run,
    numbers_of,
)  # fmt: skip
from titanlite.optim.lr_schedule import Schedule, build_schedule, faults
from titanlite.registry.family import Family, family_of, load_family
from titanlite.tools.import_hf import imported_numbers

TINY = {"model": {"name": "tests.tiny", "flavor": "plain"}, "training": {"seq_len": 32}}
DATA = learnable_data(Config.model_validate(TINY))
SOURCE = Path("run/checkpoint/step-00000010")

# Keys of each kind, with a value other than the run's.
MUST_BE_ALLOWED = {"optimizer.lr": 1.0, "float8.enable": True}
CANNOT_CHANGE = {"training.seq_len": 64, "training.document_policy": "truncate", "lora.rank": 4}
MAY_CHANGE = {"model.flavor": "tied", "training.steps": 30, "parallelism.tensor_parallel_degree": 2, "comm.trace_buf_size": 5}


def configuration(keys: dict[str, Any] | None = None) -> Config:
    values: dict[str, dict[str, Any]] = {"model": {"name": "tests.tiny", "flavor": "plain"}}
    values |= {"training": {"seq_len": 32, "steps": 20}, "lr_scheduler": {"warmup_steps": 4}}
    for key, value in (keys or {}).items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def stored(keys: dict[str, Any] | None = None, global_batch: int = 8, schedule: Schedule | None = None) -> Manifest:
    """The checkpoint of a run with these keys at step 10."""
    config, family = configuration(keys), load_family("tests.tiny", "plain")
    run = RunIdentity(config, family, DATA, global_batch)
    numbers = numbers_of(run, schedule or build_schedule(config), Progress(10, DATA.timeline(8)))
    return Manifest(json.loads(json.dumps(numbers)), {})


def setting(config: Config) -> RunIdentity:
    return RunIdentity(config, load_family("tests.tiny", "plain"), DATA, 8)


def resume(keys: dict[str, Any] | None = None, found: Manifest | None = None, global_batch: int = 8) -> Schedule:
    """The schedule of a run with these keys that resumes from a checkpoint."""
    config = configuration(keys)
    family = family_of(config.model)
    return check_changes(RunIdentity(config, family, DATA, global_batch), SOURCE, found or stored())


# ------------------------------------------------------------------------------------------------------- every key's verdict


def test_only_changes_of_mathematics_data_and_code_can_be_allowed():
    assert {*MUST_BE_ALLOWED, "data", "model.source"} <= {*changeable()}
    assert not {*changeable()} & {*CANNOT_CHANGE, *MAY_CHANGE}


@pytest.mark.parametrize(("key", "value"), [*(MUST_BE_ALLOWED | CANNOT_CHANGE | MAY_CHANGE).items()])
def test_a_changed_key_is_noticed_only_where_it_matters(key, value):
    found = [str(change.key) for change in changes(setting(configuration().with_keys({key: value})), stored().numbers)]
    assert found == ([] if key in MAY_CHANGE else [key])


def test_an_infinite_number_written_to_a_file_and_read_back_is_unchanged():
    keys = {"training.max_norm": float("inf")}
    assert list(changes(setting(configuration(keys)), stored(keys).numbers)) == []


def test_a_key_that_a_newer_version_has_added_was_at_its_default_before():
    found, key = stored(), "optimizer.eps"
    del found.numbers["config"]["optimizer"]["eps"]
    del found.numbers["config"]["comm"]
    found.numbers["config"]["optimizer"]["gone since"] = 5
    assert resume(found=found) == build_schedule(configuration())
    with pytest.raises(UserError, match=re.escape(key)):
        resume({key: 1e-6}, found)
    assert resume({key: 1e-6, "checkpoint.allow_changes": [key]}, found) == build_schedule(configuration())


# ------------------------------------------------------------------------------------------------------------- allowing changes


TWO = {"optimizer.lr": 1e-4, "training.seed": 3}


def test_changes_not_allowed_are_listed_with_both_values_and_a_working_remedy(tmp_path):
    with pytest.raises(UserError) as raised:
        resume(TWO)
    first, *listed, remedy = str(raised.value).splitlines()
    assert first == f"{SOURCE}: later steps would be computed differently from the earlier ones:"
    assert sorted(listed) == ["  optimizer.lr = 0.0001, was 0.0008", "  training.seed = 3, was 0"]
    words = shlex.split(remedy[remedy.index("--") :])
    path = tmp_path / "run.toml"
    path.write_text("")
    allowed = read_config(path, words).checkpoint.allow_changes  # as typed
    assert resume(TWO | {"checkpoint.allow_changes": allowed}).lr == 1e-4


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [(["optimizer.*"], ["training.seed"]), (["*.seed"], ["optimizer.lr"]), (["optimizer"], ["optimizer.lr", "training.seed"])],
)
def test_patterns_allow_the_keys_that_they_match(allowed, refused):
    with pytest.raises(UserError) as raised:
        resume(TWO | {"checkpoint.allow_changes": allowed})
    listed = [line.split()[0] for line in str(raised.value).splitlines()[1:-1]]
    assert sorted(listed) == refused


def test_impossible_changes_cannot_be_allowed():
    with pytest.raises(UserError, match=r"training\.seq_len"):
        resume({"training.seq_len": 16, "checkpoint.allow_changes": ["*", "training.seq_len"]})


def test_other_data_must_be_allowed_explicitly():
    """Text and tokenizer are compared by their effect, not by their paths."""
    other = data_of([np.arange(500)], configuration(), 512)
    other._tokenizer = "another"  # a second change of "data", which is allowed once

    def go_on(*allowed: str) -> None:
        config = configuration({"checkpoint.allow_changes": list(allowed), "training.dataset": "elsewhere"})
        check_changes(setting(config)._replace(data=other), SOURCE, stored())

    with pytest.raises(UserError, match=r"checkpoint\.allow_changes 'training\.\*,data'$"):
        go_on("training.*")
    go_on("data")
    resume({"training.dataset": "elsewhere"})


@pytest.mark.parametrize("foreign", [{"config": {}}, {"data": {}}, {"model_source": None}], ids=str)
def test_a_valid_manifest_of_something_else_is_refused_in_one_sentence(foreign):
    """Correct checksums do not prove that a run wrote it: a tool or an attacker may have."""
    numbers = stored().numbers | foreign
    with pytest.raises(UserError, match=f"{SOURCE}: its (manifest is sound|timeline)"):
        load_run(SOURCE, Manifest(numbers, {}), setting(configuration()), {})


def test_a_checkpoint_of_version_0_2_keeps_its_schedule():
    """Version 0.2 stored every value of the schedule; only the length is not in the configuration."""
    keys = STABLE | {STEPS: 40}
    found = stored(keys)
    found.numbers["schedule"] = build_schedule(configuration(keys), 20)._asdict()
    assert resume(keys, found) == build_schedule(configuration(keys), 20)


def test_no_run_continues_from_imported_weights():
    numbers = imported_numbers(load_family("tests.tiny", "plain"), model={"name": "tests.tiny"})
    with pytest.raises(UserError, match="holds weights alone"):
        load_run(SOURCE, Manifest(numbers, {}), setting(configuration()), {})


def test_other_overrides_are_another_architecture_and_those_of_an_equal_flavor_are_not():
    title = r"another architecture than tests.tiny plain with n_layers = 4:\n  n_layers = 4, was 2\nA changed model"
    with pytest.raises(UserError, match=title):
        resume({"model.overrides": {"n_layers": 4}, "checkpoint.allow_changes": ["*"]})
    assert resume({"model.flavor": "deep", "model.overrides": {"n_layers": 2}}) == build_schedule(configuration())


def test_dimensions_that_json_writes_differently_are_no_change():
    """A dimension may be a tuple, which JSON returns as a list."""

    @dataclasses.dataclass(frozen=True)
    class Own:
        windows: tuple[int, ...] = (1, 2)
        scale: float = 0.1
        kind: type = int

    run = setting(configuration())._replace(family=Family(tiny, Own()))
    numbers = numbers_of(run, build_schedule(run.config), Progress(10, DATA.timeline(8)))
    found = Manifest(json.loads(json.dumps(numbers)), {})
    check_changes(run, SOURCE, found)
    with pytest.raises(UserError, match=r"windows = \[1, 3\], was \[1, 2\]"):
        check_changes(run._replace(family=Family(tiny, Own((1, 3)))), SOURCE, found)


# ------------------------------------------------------------------------------------------------------------------ the batch


@pytest.mark.parametrize(("before", "now", "local"), [(-1, -1, 2), (-1, 8, 2), (8, -1, 8)])
def test_an_equal_global_batch_is_no_change(before, now, local):
    """-1 on 1 rank of 8 samples and -1 on 4 ranks of 2 are one batch."""
    keys = {"training.global_batch_size": now, "training.local_batch_size": local}
    resume(keys, stored({"training.global_batch_size": before}), global_batch=configuration(keys).global_batch(8 // local))


def test_a_mesh_that_changes_the_derived_batch_is_refused_with_both_numbers():
    keys = {"training.global_batch_size": -1, "training.local_batch_size": 8}
    two_ranks = configuration(keys).global_batch(2)
    with pytest.raises(UserError, match=r"training\.global_batch_size"):
        resume(keys, stored(keys), global_batch=two_ranks)
    resume(keys | {"checkpoint.allow_changes": ["training.global_batch_size"]}, stored(keys), global_batch=two_ranks)
    resume(keys | {"training.global_batch_size": 8}, stored(keys), global_batch=8)


# --------------------------------------------------------------------------------------------------------------- the schedule

TOTAL, STEPS, ALLOW = "lr_scheduler.total_steps", "training.steps", "checkpoint.allow_changes"
STABLE = {"lr_scheduler.decay_ratio": 0.5, "lr_scheduler.min_lr_factor": 0.1}


@pytest.mark.parametrize("steps", [11, 1000])
def test_runs_of_other_lengths_keep_the_schedule_that_the_first_one_began_with(steps):
    began = build_schedule(configuration(STABLE))
    schedule = resume(STABLE | {STEPS: steps}, stored(STABLE))
    assert schedule == began and schedule.total_steps == 20 and schedule.decay_start == 10
    assert schedule.at(1000) == pytest.approx(0.1 * schedule.lr)
    # the schedule that was followed counts, not the one that the keys of its run would give now
    assert resume(STABLE | {STEPS: 60}, stored(STABLE | {STEPS: steps}, schedule=schedule)) == began


def test_another_planned_length_moves_the_decay_and_must_be_allowed():
    keys = STABLE | {STEPS: 40, TOTAL: 40}
    with pytest.raises(UserError, match=r"lr_scheduler\.total_steps"):
        resume(keys, stored(STABLE))
    schedule = resume(keys | {ALLOW: [TOTAL]}, stored(STABLE))
    assert (schedule.total_steps, schedule.decay_start) == (40, 20)


def test_the_planned_length_may_be_set_explicitly():
    assert resume({TOTAL: 20, STEPS: 20}).total_steps == 20
    assert resume({STEPS: 15}, stored({TOTAL: 20, STEPS: 10})).total_steps == 20


@pytest.mark.parametrize(("own", "last"), [(True, 12), (False, 12), (True, 15)], ids=["own folder", "branch", "at its end"])
def test_a_resumed_run_may_end_during_the_warm_up(tmp_path, own, last):
    """training.steps was taken for the length of the schedule, and keys of its decay for ones without effect."""
    lr = {"lr_scheduler.warmup_steps": 15, "lr_scheduler.decay_type": "cosine", "lr_scheduler.min_lr_factor": 0.1}
    keys = lr | {STEPS: last, "job.dump_folder": str(tmp_path), "checkpoint.enable": True}
    assert [fault.split(" = ")[0] for fault in faults(configuration(keys))] == ["lr_scheduler.warmup_steps"] * (last < 15)
    if own:
        (tmp_path / "checkpoint/step-00000010").mkdir(parents=True)
    else:
        keys |= {"checkpoint.initial_load_path": "run/checkpoint/step-00000010", "checkpoint.initial_load_model_only": False}
    config = configuration(keys).settled(Hardware())
    assert list(faults(config)) == []
    assert list(faults(configuration(keys | {TOTAL: 12}))) != []
    assert check_changes(setting(config), SOURCE, stored(lr)) == build_schedule(configuration(lr))


def test_phases_that_do_not_fit_in_the_schedule_of_the_checkpoint_are_refused_and_the_remedy_works():
    keys = {"lr_scheduler.warmup_steps": 30, STEPS: 40}
    with pytest.raises(
        UserError, match=r"lr_scheduler\.warmup_steps = 30: .*total_steps = 20\nTo set another length"
    ) as raised:
        resume(keys | {ALLOW: ["lr_scheduler.warmup_steps"]})
    allowed = shlex.split(str(raised.value).rpartition("--checkpoint.allow_changes ")[2])[0].split(",")
    assert resume(keys | {TOTAL: 40, ALLOW: allowed}).total_steps == 40


def test_no_step_follows_a_schedule_that_ended_at_rate_zero_and_the_remedy_works():
    with pytest.raises(UserError, match=r"training\.steps") as raised:
        resume({STEPS: 40})
    remedy = str(raised.value).partition("To stretch it: ")[2].split()
    assert remedy == [f"--{TOTAL}", "40", f"--{ALLOW}", TOTAL]
    assert resume({STEPS: 40, TOTAL: 40, ALLOW: [TOTAL]}).total_steps == 40
    assert resume({STEPS: 20}).total_steps == 20


# ------------------------------------------------------------------------------------------------------------ excluded tensors


@pytest.mark.parametrize(
    ("before", "now", "branch", "applied"),
    [
        ([], ["model.*"], False, ["model.*"]),
        (["a.*", "b.*"], ["b.*", "a.*"], False, []),
        (["a.*", "b.*"], ["c.*", "b.*"], False, ["c.*"]),
        (["a.*", "b.*"], ["c.*", "b.*"], True, ["c.*", "b.*"]),
    ],
)
def test_only_patterns_with_which_the_run_has_not_written_the_checkpoint_are_applied(
    monkeypatch, caplog, before, now, branch, applied
):
    """A list in another order, or with another pattern, reset all tensors, which were trained meanwhile; a branch of a run
    with the same pattern trained on with all of them."""
    key, found = "checkpoint.exclude_from_loading", []
    monkeypatch.setattr(load, "load_tensors", lambda source, manifest, tensors, exclude, **_: found.extend(exclude))
    with caplog.at_level("INFO"):
        load_run(SOURCE, stored({key: before}), setting(configuration({key: now})), {}, branch=branch)
    assert found == applied
    said = {message.split('"')[1]: "keep their initial values" in message for message in caplog.messages if key in message}
    assert said == {pattern: pattern in applied for pattern in now}


def test_an_excluded_weight_has_its_own_average_and_no_remainder_of_the_weight_in_the_checkpoint(monkeypatch):
    """The head of a branch was new and its average old; a remainder made initial zeros NaN, which is stored as 0 again."""
    names = ["model.a", "model.b", "ema.a", "ema.b", "ema.updates", "optimizer.a.remainder", "optimizer.b.remainder"]
    tensors = {name: torch.zeros(2) for name in names}
    monkeypatch.setattr(load, "load_tensors", lambda _, __, given, *___, **____: [
        tensor.fill_(7) for name, tensor in given.items() if name != "model.a"])  # fmt: skip
    keys = {"optimizer.ema_decay": 0.9}
    run = setting(configuration({**keys, "checkpoint.exclude_from_loading": ["model.a"]}))
    load_run(SOURCE, stored(keys), run, tensors)
    assert {name for name, tensor in tensors.items() if not tensor.any()} == {"model.a", "ema.a", "optimizer.a.remainder"}


def test_patterns_in_a_manifest_are_a_list_of_texts():
    found = stored()
    found.numbers["config"]["checkpoint"]["exclude_from_loading"] = "optimizer.*"
    with pytest.raises(UserError, match=r"checkpoint\.exclude_from_loading"):
        load_run(SOURCE, found, setting(configuration()), {})


# ---------------------------------------------------------------------------------------------- sums of losses, the run's id


def test_a_resumed_run_keeps_its_id_and_the_losses_of_an_unfinished_mean(monkeypatch):
    """A checkpoint of an earlier version has no id."""
    monkeypatch.setattr(load, "load_tensors", lambda *_, **__: None)
    found = stored()
    assert load_run(SOURCE, found, setting(configuration()), {})[0].run == ""
    found.numbers.update(run="8f0e", loss_sum=7.5, loss_count=3)
    progress, schedule = load_run(SOURCE, found, setting(configuration()), {})
    assert (progress.loss_sum, progress.loss_count) == (7.5, 3)
    assert numbers_of(setting(configuration()), schedule, progress)["run"] == "8f0e"
