"""Saves: a failed one loses only itself, and an asynchronous one stores the state at its call, not a later one."""

import os
import platform
import sys

import pytest
import torch

from tests.distributed.checkpoint_runs import HERE, SHARD, assert_same, assert_sound, names, ranks_of, resumed, saved, train
from tests.distributed.test_resume import ONE, stored
from tests.limited import disk
from titanlite.checkpoint.folder import list_steps, step_folder

root_on_linux = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="only root on Linux can mount a disk of its own"
)


# ------------------------------------------------------------------------------------------------- writing beside training


@pytest.mark.parametrize("degrees", [ONE, SHARD], ids=["1 rank", "2 ranks"])
def test_beside_training_the_same_is_stored_and_trained_although_the_tensors_change_at_once(pools, tmp_path, degrees):
    for mode in ("disabled", "async"):
        ranks = train(pools, degrees, tmp_path / mode, 6, ("slow",), checkpoint={"async_mode": mode})
        assert {rank.error for rank in ranks} == {""}
    for step in (2, 4, 6):
        assert_same(tmp_path / "async", tmp_path / "disabled", step)
    assert saved(tmp_path / "async") == names(2, 4, 6)


@pytest.mark.parametrize("degrees", [ONE, SHARD], ids=["1 rank", "2 ranks"])
def test_a_save_waits_for_the_previous_one_and_stores_the_state_at_its_call(pools, tmp_path, degrees):
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:save_twice", degrees=degrees, folder=tmp_path / "checkpoint")
    assert ranks == [(["begin", "end", "begin", "end"], False)] * ranks_of(degrees)
    for step in (1, 2):
        for name, tensor in stored(tmp_path, step).items():
            assert torch.equal(tensor, torch.full_like(tensor, step)), name


def test_a_save_in_the_training_thread_is_reported_before_the_next_step(pools, tmp_path):
    assert pools[1].run(f"{HERE}:save_at_once", folder=tmp_path / "checkpoint") == [True]


def test_a_rank_may_have_nothing_to_write(pools, tmp_path):
    pools[4].run(f"{HERE}:save_a_number", folder=tmp_path)
    assert list_steps(tmp_path) == [2]
    assert_sound(tmp_path / "step-00000002")


# ----------------------------------------------------------------------------------------------------------- saves that fail


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (("no_write", 0), "the cable is out"),
        (("no_commit",), "the cable is out"),
        (("wrong_on_disk", 1), "__1_0.distcp: is damaged: its checksum"),
        (("wrong_metadata_on_disk",), ".metadata: is damaged: its checksum"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_failed_save_is_reported_once_and_loses_only_that_checkpoint(pools, whole, tmp_path, trouble, cause):
    ranks = train(pools, SHARD, tmp_path, 6, (*trouble, 4), checkpoint={"async_mode": "async"})
    assert [rank.error for rank in ranks] == ["", ""]
    warnings = [line for rank in ranks for line in rank.log if "could not be saved" in line]
    assert len(warnings) == 1 and "step-00000004: could not be saved: " in warnings[0] and cause in warnings[0]
    assert "\n" not in warnings[0]  # no traceback of DCP's
    assert saved(tmp_path) == names(2, 6)
    for step in (2, 6):
        assert_sound(step_folder(tmp_path / "checkpoint", step))
    assert_same(tmp_path, whole, 6)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_last_save_ends_the_run_with_an_error_on_every_rank(pools, tmp_path, mode):
    ranks = train(pools, SHARD, tmp_path, 6, ("no_write", 1, 6), checkpoint={"async_mode": mode})
    for rank in ranks:
        assert "step-00000006: could not be saved: " in rank.error and "the cable is out" in rank.error
    assert saved(tmp_path) == names(2, 4)
    assert_sound(tmp_path / "checkpoint/step-00000004")


def test_hooks_get_no_checkpoint_that_could_not_be_saved(pools, tmp_path):
    ranks = train(pools, SHARD, tmp_path, 6, ("no_write", 1, 4), hooks={"modules": ["tests.own.listing"]})
    assert [rank.error for rank in ranks] == ["", ""] and saved(tmp_path) == names(2, 6)


def test_a_run_resumes_from_the_checkpoint_before_a_failed_one(pools, whole, tmp_path):
    train(pools, SHARD, tmp_path, 4, ("no_write", 1, 4))
    assert train(pools, SHARD, tmp_path, 6)[0].error == ""
    assert resumed(tmp_path) == [0, 2]
    assert_same(tmp_path, whole, 6)


@root_on_linux
def test_a_full_disk_damages_no_checkpoint_and_the_next_save_succeeds_when_there_is_room(pools, whole, tmp_path):
    """A checkpoint takes 1.8 MB: after the first one there is room for a half."""
    with disk(tmp_path / "disk", "size=12m") as place:
        ballast = place / "ballast"
        ballast.write_bytes(bytes(9_500_000))
        ranks = train(pools, SHARD, place, 6, ("full_disk_until_it_is_said", ballast), checkpoint={"async_mode": "async"})
        assert [rank.error for rank in ranks] == ["", ""]
        (warning,) = [line for line in ranks[0].log if "could not be saved" in line]
        assert "step-00000004: could not be saved: " in warning and "No space left on device" in warning
        assert saved(place) == names(2, 6)
        for step in (2, 6):
            assert_sound(step_folder(place / "checkpoint", step))
        assert_same(place, whole, 6)


# -------------------------------------------------------------------------------------------------------- trying a folder out


def test_a_folder_that_not_all_ranks_share_is_refused_by_all_ranks(pools, tmp_path):
    """As if job.dump_folder were on a local disk of each node."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    assert pools[2].run(f"{HERE}:try_folder", folders=[shared, shared]) == ["", ""]
    assert list(shared.iterdir()) == []
    for fault in pools[2].run(f"{HERE}:try_folder", folders=[shared, own]):
        assert f"{own}: {platform.node()} does not see what rank 0 writes" in fault
    own.mkdir()
    (own / ".probe").write_text("left by another run")
    for fault in pools[2].run(f"{HERE}:try_folder", folders=[shared, own]):
        assert f"{own}: {platform.node()} does not see" in fault
    assert list(shared.iterdir()) == []
