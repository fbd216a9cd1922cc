"""Loading: every kind of damage is found, and what a run starts from. test_variants.py loads onto other meshes."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.checkpoint_runs import SHARD, assert_same, flip, losses, names, resumed, saved, train
from tests.distributed.test_resume import stored
from tests.repetitions import slow_but
from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import step_folder
from titanlite.registry.family import load_family

# ------------------------------------------------------------------------------------------------------------------- damage


def cut(path: Path, other: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def exchange(path: Path, other: Path) -> None:
    assert path.read_bytes() != other.read_bytes()
    shutil.copy(other, path)


SUM = "is damaged: its checksum is "
# each file with one damage: what does it, from the same file of another step, and what the message says
DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    ".metadata": (lambda path, other: flip(path), SUM),
    "__0_0.distcp": (cut, "is damaged: it has "),
    "__1_0.distcp": (exchange, SUM),
    manifest.FILE: (lambda path, other: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("name", slow_but(["__1_0.distcp", manifest.FILE], DAMAGES))
def test_a_damaged_checkpoint_is_named_and_the_run_ends_as_without_it(pools, whole, half, tmp_path, name):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    before, newest = (step_folder(run / "checkpoint", step) for step in (2, 4))
    damage, message = DAMAGES[name]
    damage(newest / name, before / name)
    ranks = train(pools, SHARD, run, 6)
    assert [rank.error for rank in ranks] == ["", ""]
    said = [line for rank in ranks for line in rank.log if line.startswith("not used: ")]
    assert len(said) == 1 and f"{newest / name}: {message}" in said[0]
    assert [rank.read for rank in ranks] == [[str(before)], [str(before)]]
    assert resumed(run) == [0, 2]
    assert saved(run) == [*names(2, 4), "step-00000004.aside-1", *names(6)]
    assert_same(run, whole, 6)


def test_all_damaged_files_of_a_checkpoint_are_named_whichever_rank_has_read_them(pools, whole, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    newest = step_folder(run / "checkpoint", 4)
    flip(newest / "__0_0.distcp")
    (newest / "__1_0.distcp").unlink()
    (said,) = [line for line in train(pools, SHARD, run, 6)[0].log if line.startswith("not used: ")]
    assert f"{newest / '__0_0.distcp'}: {SUM}" in said and f"{newest / '__1_0.distcp'}: is missing" in said
    assert_same(run, whole, 6)


def test_if_every_checkpoint_is_damaged_all_are_named_and_nothing_is_changed(pools, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    for step in (2, 4):
        flip(step_folder(run / "checkpoint", step) / "__1_0.distcp")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ranks = train(pools, SHARD, run, 6)
    for rank in ranks:
        assert "all 2 checkpoints are damaged" in rank.error and "step-00000004/__1_0.distcp" in rank.error
        assert "rename the folder to start from scratch" in rank.error
    assert len([line for line in ranks[0].log if line.startswith("not used: ")]) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_that_load_step_names_ends_the_run(pools, half, tmp_path):
    run = Path(shutil.copytree(half, tmp_path / "run"))
    flip(run / "checkpoint/step-00000002/__0_0.distcp")
    for rank in train(pools, SHARD, run, 6, checkpoint={"load_step": 2}):
        assert f"{run / 'checkpoint/step-00000002/__0_0.distcp'}: {SUM}" in rank.error
        assert rank.read == []
    assert saved(run) == names(2, 4)


def test_load_step_goes_back_once_and_a_restarted_run_continues(pools, half, tmp_path):
    run, back = Path(shutil.copytree(half, tmp_path / "run")), {"load_step": 2}
    for steps, source in ((5, 2), (6, 5), (7, 6)):
        ranks = train(pools, SHARD, run, steps, checkpoint=back)
        assert [rank.read for rank in ranks] == [[str(step_folder(run / "checkpoint", source))]] * 2
    assert saved(run) == [*names(2, 4), "step-00000004.aside-1", *names(5, 6, 7)]
    train(pools, SHARD, run, 7, checkpoint={"load_step": 5})  # another step to go back to
    assert resumed(run) == [0, 2, 5, 6, 5]


# ---------------------------------------------------------------------------------------------------------- into another run


def shapes(flavor: str) -> dict[str, tuple[int, ...]]:
    model = load_family("tests.tiny", flavor).on_meta()
    return {f"model.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("before", "now"), [("deep", "uneven"), ("tied", "deep")])
def test_every_tensor_that_does_not_fit_is_listed_with_the_reason(pools, tmp_path, before, now):
    assert train(pools, SHARD, tmp_path / "before", 2, flavor=before)[0].error == ""
    source, had, has = tmp_path / "before/checkpoint/step-00000002", shapes(before), shapes(now)
    expected = {f"  {name}: not in the checkpoint" for name in has.keys() - had.keys()}
    expected |= {f"  {name}: in the checkpoint, not here" for name in had.keys() - has.keys()}
    expected |= {
        f"  {name}: {had[name]} in the checkpoint, {has[name]} here"
        for name in had.keys() & has.keys()
        if had[name] != has[name]
    }
    for rank in train(pools, SHARD, tmp_path / "now", 2, flavor=now, checkpoint={"initial_load_path": str(source)}):
        first, *listed, last = rank.error.splitlines()
        assert first == f"{source}: does not fit this run:" and "checkpoint.exclude_from_loading" in last
        assert set(listed) == expected and len(listed) == len(expected) > 0


def test_excluded_tensors_keep_their_initial_values_and_all_others_are_loaded(pools, half, tmp_path):
    """Excludes a layer, and tensors that do not fit another vocabulary."""
    still = {"optimizer": {"lr": 1e-20}, "flavor": "uneven"}  # a run that learns nothing
    start = {"initial_load_path": str(half / "checkpoint/step-00000004")}
    start |= {"exclude_from_loading": ["model.layers.1.*", "model.embed.*", "model.head.output.*"]}
    assert train(pools, SHARD, tmp_path / "fresh", 2, **still)[0].error == ""
    assert train(pools, SHARD, tmp_path / "some", 2, checkpoint=start, **still)[0].error == ""
    fresh, learned, found = stored(tmp_path / "fresh", 2), stored(half, 4), stored(tmp_path / "some", 2)
    for name in shapes("plain"):
        assert not torch.equal(learned[name], fresh[name]), name
        expected = fresh if name.startswith(("model.layers.1.", "model.embed.", "model.head.output.")) else learned
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-12), name


def test_a_run_can_start_from_a_renamed_checkpoint(pools, half, tmp_path):
    source = str(shutil.copytree(half / "checkpoint/step-00000004", tmp_path / "step-00000004.aside-1"))
    ranks = train(pools, SHARD, tmp_path / "run", 2, checkpoint={"initial_load_path": source})
    assert [rank.error for rank in ranks] == ["", ""]
    assert ranks[0].read == [source]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(pools, half, tmp_path):
    source = str(shutil.copytree(half / "checkpoint/step-00000004", tmp_path / "step-00000005"))
    for rank in train(pools, SHARD, tmp_path / "run", 6, checkpoint={"initial_load_path": source}):
        assert rank.error == f"{source}/manifest.json: is damaged: it belongs to step 4"


@pytest.mark.parametrize(("pattern", "only"), [("layers.*", True), ("", False)], ids=["weights alone", "a branch"])
def test_a_pattern_that_matches_no_tensor_is_refused(pools, half, tmp_path, pattern, only):
    start = {"initial_load_path": str(half / "checkpoint/step-00000004"), "initial_load_model_only": only}
    for rank in train(pools, SHARD, tmp_path, 6, checkpoint=start | {"exclude_from_loading": ["model.head.*", pattern]}):
        assert f'checkpoint.exclude_from_loading: "{pattern}" matches no tensor of ' in rank.error


def branch(source: Path, **keys: Any) -> dict[str, Any]:
    return {"initial_load_path": str(source), "initial_load_model_only": False, **keys}


def test_a_branch_continues_like_its_original_run_and_resumes_on_its_own(pools, whole, half, tmp_path):
    original = Path(shutil.copytree(half, tmp_path / "original"))
    keys = branch(original / "checkpoint/step-00000004")
    assert train(pools, SHARD, tmp_path / "branch", 5, checkpoint=keys)[0].error == ""
    assert saved(tmp_path / "branch") == names(5)
    shutil.rmtree(original)  # the branch has a checkpoint of its own now
    ranks = train(pools, SHARD, tmp_path / "branch", 6, checkpoint=keys)
    assert [rank.error for rank in ranks] == ["", ""]
    assert [rank.read for rank in ranks] == [[str(tmp_path / "branch/checkpoint/step-00000005")]] * 2
    assert resumed(tmp_path / "branch") == [4, 5]
    assert losses(tmp_path / "branch") == losses(whole)[4:]
    ours, theirs = stored(tmp_path / "branch", 6), stored(whole, 6)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    here, there = (manifest.read(run / "checkpoint/step-00000006").numbers for run in (tmp_path / "branch", whole))
    assert [name for name in there if name != "config" and here[name] != there[name]] == ["run"]  # another run


def test_a_branch_that_begins_at_its_last_step_is_refused_and_not_called_finished(pools, half, tmp_path):
    for rank in train(pools, SHARD, tmp_path / "branch", 4, checkpoint=branch(half / "checkpoint/step-00000004")):
        assert re.match(r"training\.steps = 4: .*step-00000004 is at step 4 already", rank.error)
    assert saved(tmp_path / "branch") == names()


def test_a_run_from_weights_alone_starts_at_step_zero_and_restarts_do_not_load_them_again(pools, half, tmp_path):
    keys = {"initial_load_path": str(half / "checkpoint/step-00000004")}
    for steps in (2, 4):
        ranks = train(pools, SHARD, tmp_path / "parts", steps, checkpoint=keys)
    assert ranks[0].read == [str(tmp_path / "parts/checkpoint/step-00000002")]
    assert resumed(tmp_path / "parts") == [0, 2]
    train(pools, SHARD, tmp_path / "once", 4, checkpoint=keys)
    assert_same(tmp_path / "parts", tmp_path / "once", 4)


def test_exclusion_is_applied_once_and_the_run_resumes_with_all_tensors(pools, whole, half, tmp_path):
    keys = branch(half / "checkpoint/step-00000004", exclude_from_loading=["optimizer.*"])
    for folder, *stops in (("once", 8), ("parts", 6, 8)):
        for steps in stops:
            assert train(pools, SHARD, tmp_path / folder, steps, checkpoint=keys)[0].error == ""
    assert resumed(tmp_path / "parts") == [4, 6]
    assert_same(tmp_path / "parts", tmp_path / "once", 8)
    again = branch(tmp_path / "once/checkpoint/step-00000008", exclude_from_loading=["optimizer.*"])
    (line,) = (line for line in train(pools, SHARD, tmp_path / "again", 9, checkpoint=again)[0].log if "optimizer.*" in line)
    assert "keep their initial values" in line  # in a branch of a run with the same pattern
    assert losses(tmp_path / "once")[1] != losses(whole)[5]  # the moments were left out at first


def test_another_exclusion_than_that_of_the_checkpoint_is_applied(pools, half, tmp_path):
    for exclude in ([], ["optimizer.*"]):
        run = Path(shutil.copytree(half, tmp_path / f"run {len(exclude)}"))
        assert train(pools, SHARD, run, 6, checkpoint={"exclude_from_loading": exclude})[0].error == ""
    assert losses(tmp_path / "run 0")[4] == losses(tmp_path / "run 1")[4]
    assert losses(tmp_path / "run 0")[5] != losses(tmp_path / "run 1")[5]
