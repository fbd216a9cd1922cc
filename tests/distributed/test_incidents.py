"""Steps that are not finite, or have no labels, on meshes: all ranks skip the same one, and a run continues.

test_cuda_shim.py finds host syncs.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests import tiny_poison
from tests.distributed import test_resume
from tests.distributed.pool import Pool, WorkerFailure
from tests.distributed.scenarios import CPU, GLOBAL_BATCH, config_of, learnable_data, learnable_ids, mesh_of
from tests.token_files import data_of
from titanlite.checkpoint import manifest
from titanlite.config.schema import Config
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.mixture import Data
from titanlite.data.order import sample_at
from titanlite.data.timeline import Timeline, stored
from titanlite.ground.run_files import INCIDENTS, read_entries
from titanlite.loop.divergence import Spikes, StepRecord, Steps, is_bad
from titanlite.loop.loss import StepLoss
from titanlite.loop.resume import Progress
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.state import run_tensors
from titanlite.parallel.mesh import LOSS_DIMENSIONS, data_degree, data_rank, ranks_of, sum_over
from titanlite.registry.family import family_of
from titanlite.train import train

HERE = "tests.distributed.test_incidents"
TWO_BY_TWO = {"dp_shard": 2, "tp": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
STAGES, STAGES_OF_SHARDS = {"pp": 2}, {"pp": 2, "dp_shard": 2}
Degrees = dict[str, int]


def poisoned(config: Config, steps: dict[int, int]) -> Data:
    """The learnable data, with a token of tiny_poison in one sample of some steps' batches, as first read."""
    ids, seq_len = learnable_ids(512), config.training.seq_len
    for step, token in steps.items():
        position = torch.tensor([(step - 1) * GLOBAL_BATCH + 5]).numpy()
        ids[sample_at(position, (len(ids) - 1) // seq_len, f"{config.training.seed}/0")[0] * seq_len + 3] = token
    data = data_of([ids], config, 512)
    # compared runs continue from each other's checkpoints, and must not notice that their data differ
    data.sources[0] = data.sources[0]._replace(fingerprint="learnable")
    return data


# ------------------------------------------------------------------------------------------- a step that changes nothing


def state_after(
    degrees: Degrees, config: Config, token: int | None, left_out: bool
) -> tuple[dict[str, Tensor], list[StepRecord]]:
    """This rank's parameters, buffers and moments after six steps; the steps.

    The third step is spoiled by a token of tiny_poison, or has no labels (None), or is left out.
    """
    mesh = mesh_of(degrees)
    model, optimizer, scale = begin_training(family_of(config.model), config, mesh, CPU)
    data = learnable_data(config) if token is None else poisoned(config, {3: token})
    source, steps = Batches(StepDataset(config, data, (data_rank(mesh), data_degree(mesh)))), Steps(mesh)
    for number in range(1, 7):
        batch = next(source)
        if number == 3 and left_out:
            continue
        if number == 3 and token is None:
            batch = batch._replace(counted=torch.zeros_like(batch.tokens, dtype=torch.bool))
        loss = forward_backward(model, batch, mesh, scale)
        norm = update(model, optimizer, 1e-2, config.training.max_norm, scale, loss.labels)
        steps.add(number, 0, loss, norm)
    tensors = run_tensors(model, optimizer, None)
    return {name: getattr(tensor, "_local_tensor", tensor).detach().clone() for name, tensor in tensors.items()}, steps.read()


def compare_states(degrees: Degrees, config: Config, token: int | None) -> tuple[list[StepRecord], list[str]]:
    """(the steps of the run with the bad batch, names of tensors that differ in any bit from a run without it)."""
    found, steps = state_after(degrees, config, token, left_out=False)
    expected, _ = state_after(degrees, config, token, left_out=True)
    return steps, [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(
    ("degrees", "name", "token"),
    [
        (TWO_BY_TWO, "AdamW", tiny_poison.OF_GRADIENT),
        pytest.param(HYBRID, "AdamW", tiny_poison.OF_LOSS, marks=pytest.mark.slow),
        pytest.param(STAGES_OF_SHARDS, "Adam", tiny_poison.OF_LOSS, marks=pytest.mark.slow),
    ],
)
def test_a_bad_microbatch_of_one_rank_is_skipped_by_all_and_leaves_no_trace(pools, degrees, token, name):
    model = {"name": "tests.tiny_poison"}
    config = config_of(degrees, accumulation=2, optimizer={"name": name}, model=model)
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:compare_states", degrees=degrees, config=config, token=token)
    for steps, different in ranks:
        norms = [step.norm for step in steps]
        assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True, True]
        assert norms[:2] + norms[3:] == [step.norm for step in ranks[0][0] if step.number != 3]
        assert different == []


BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "degrees", "sections"),
    [
        ("tests.tiny", {}, {}),
        ("tests.tiny", {"dp_shard": 2}, {"optimizer": {"implementation": "foreach"}}),
        ("tests.tiny", {"pp": 2}, {"optimizer": {"implementation": "for-loop", "name": "Adam"}}),
        ("tests.tiny", {}, {"optimizer": {"implementation": "for-loop", "name": "Muon"}}),
        ("tests.tiny", {}, {"optimizer": {"implementation": "for-loop"}, "training": BFLOAT16}),
        ("tests.tiny", {}, {"training": {"mixed_precision_param": "float16"}}),
        ("tests.tiny_moe", {"dp_shard": 2}, {"moe": {"balance_loss": 0.1, "bias_update_speed": 0.01}}),
    ],
    ids=["fused", "foreach, sharded", "for-loop, stages", "Muon", "bfloat16", "float16", "MoE with a balance loss"],
)
def test_a_step_without_labels_leaves_no_trace_and_has_no_loss(pools, model, degrees, sections):
    config = config_of(degrees, accumulation=2, model={"name": model}, **sections)
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:compare_states", degrees=degrees, config=config, token=None)
    for steps, different in ranks:
        assert different == []
        assert [step.loss is None for step in steps] == [False, False, True, False, False, False]
        assert all(math.isfinite(step.norm) for step in steps) and not any(is_bad(step, False) for step in steps)
    steps = ranks[0][0]
    mean = Progress(0, Timeline([])).with_losses(steps, 10).loss_mean
    assert mean == pytest.approx(sum(step.loss for step in steps if step.loss is not None) / 5)
    assert Spikes(4, 10.0).find(steps) == []


# ------------------------------------------------------------------------------------------------------ losses of all ranks


def readings(degrees: Degrees, at_once: tuple[int, ...]) -> list[list[tuple]]:
    """The same 30 steps, read in groups of different sizes; the losses by `sum_over` come last."""
    mesh, random = mesh_of(degrees), torch.Generator().manual_seed(1)
    every = torch.rand(30, data_degree(mesh), generator=random) * torch.logspace(-3, 3, 30)[:, None]
    shares, norms = every[:, data_rank(mesh)], torch.rand(30, generator=random)
    if mesh["pp"].get_local_rank() < mesh["pp"].size() - 1:  # without the head
        shares = torch.zeros(30)
    found = []
    for size in at_once:
        steps, read = Steps(mesh), []
        for number in range(30):
            steps.add(number, number * 8, StepLoss(shares[number], None, torch.zeros(())), norms[number])
            if (number + 1) % size == 0:
                with CommDebugMode() as collectives:
                    read += steps.read()
                assert collectives.get_total_counts() == 1
        found.append(read)
    return [*found, sum_over(LOSS_DIMENSIONS, shares.clone(), mesh).tolist()]


@pytest.mark.parametrize("degrees", [TWO_BY_TWO, HYBRID, STAGES_OF_SHARDS], ids=str)
def test_every_rank_reads_the_same_losses_for_any_number_of_steps_at_once(pools, degrees):
    ranks = pools[ranks_of(degrees)].run(f"{HERE}:readings", degrees=degrees, at_once=(1, 2, 5, 30))
    *groups, plain = ranks[0]
    for *found, _ in ranks:
        assert all(group == groups[0] for group in found)
    assert [step.loss for step in groups[0]] == pytest.approx(plain, rel=1e-6)
    assert [(step.number, step.first_sample) for step in groups[0]] == [(n, n * 8) for n in range(30)]


# -------------------------------------------------------------------------------------------------------- the whole loop


def run_poisoned(degrees: Degrees, config: Config, steps: dict[int, int], epochs: float | None) -> None:
    """A whole run of the training program on data that spoil some steps, and have this limit of epochs."""
    data = poisoned(config, steps)
    source = data.sources[0]
    data.sources[0] = source._replace(cfg=source.cfg.model_copy(update={"epochs": epochs}))
    train(config, data, None, mesh_of(degrees), CPU, 0.0)
    torch.distributed.barrier()


def run(
    pools: dict[int, Pool], degrees: Degrees, folder: Path, policy: str, bad: dict[int, int], steps: int = 12, **sections
) -> None:
    epochs = sections.pop("epochs", None)
    config = config_of(
        degrees,
        accumulation=2,
        model={"name": "tests.tiny_poison", **sections.pop("model", {})},
        job={"dump_folder": str(folder)},
        training={"steps": steps, "on_nonfinite": policy, **sections.pop("training", {})},
        lr_scheduler={"total_steps": 20},
        metrics={"log_freq": sections.pop("log_freq", 1), "enable_tensorboard": False},
        checkpoint={"enable": True, "interval": 5, **sections.pop("checkpoint", {})},
        **sections,
    )
    pools[ranks_of(degrees)].run(f"{HERE}:run_poisoned", degrees=degrees, config=config, steps=bad, epochs=epochs)


def reports(folder: Path) -> list[tuple[int, float, float]]:
    return [(report["step"], report["loss"], report["grad_norm"]) for report in test_resume.reports(folder)]


def means(folder: Path) -> dict[int, float]:
    """step -> the reported mean loss."""
    return {report["step"]: report["loss_mean"] for report in test_resume.reports(folder)}


def checksums(folder: Path, step: int) -> dict[str, str]:
    """Of the tensors of a checkpoint."""
    files = manifest.read(folder / f"checkpoint/step-{step:08d}").files
    return {name: contents.xxh3_128 for name, contents in files.items() if name.endswith(".distcp")}


def skip_to(folder: Path, step: int, samples: int) -> None:
    """Changes the position in the data of a checkpoint."""
    path = folder / f"checkpoint/step-{step:08d}"
    found = manifest.read(path)
    timeline = stored(found.numbers, "").rolled_back(step, samples)
    manifest.write(path, found._replace(numbers=found.numbers | {"samples": samples, "timeline": timeline.numbers()}))


BAD = {8: tiny_poison.OF_LOSS}


def test_stop_names_the_step_and_its_samples_and_saves_nothing(pools, tmp_path):
    with pytest.raises(WorkerFailure, match=r"UserError: step 8: loss nan, gradient norm nan, samples 56 to 63: .*--step 8\n"):
        run(pools, {}, tmp_path, "stop", BAD, log_freq=100)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-00000005"]
    assert [(entry["step"], entry["action"]) for entry in read_entries(tmp_path / INCIDENTS)] == [(8, "stop")]


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, STAGES], ids=str)
def test_skip_continues_without_the_batch_and_reports_it(pools, tmp_path, degrees):
    run(pools, degrees, tmp_path, "skip", {8: tiny_poison.OF_LOSS, 10: tiny_poison.OF_GRADIENT})
    found = reports(tmp_path)
    assert [step for step, *_ in found] == list(range(1, 13))
    assert [step for step, _, norm in found if norm is None] == [8, 10]
    assert [step for step, loss, _ in found if loss is None] == [8]
    entries = read_entries(tmp_path / INCIDENTS)
    assert [(e["step"], e["action"], e["samples"]) for e in entries] == [(8, "skipped", [56, 64]), (10, "skipped", [72, 80])]


@pytest.mark.parametrize(("degrees", "log_freq"), [({}, 100), ({"dp_shard": 2}, 3), (STAGES, 3)], ids=str)
def test_rollback_continues_from_the_checkpoint_with_the_batch_after_the_bad_one(pools, tmp_path, degrees, log_freq):
    run(pools, degrees, tmp_path / "run", "rollback", BAD, log_freq=log_freq)
    run(pools, degrees, tmp_path / "expected", "stop", {}, steps=5, log_freq=log_freq)
    skip_to(tmp_path / "expected", 5, 64)
    run(pools, degrees, tmp_path / "expected", "stop", BAD, log_freq=log_freq)
    assert checksums(tmp_path / "run", 12) == checksums(tmp_path / "expected", 12)
    assert means(tmp_path / "run")[12] == means(tmp_path / "expected")[12]
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    assert "rollback_seconds" in lines
    assert json.loads(lines.splitlines()[-1])["tokens_seen"] == 12 * 8 * 32  # not the position in the data
    assert manifest.read(tmp_path / "run/checkpoint/step-00000012").numbers["samples"] == 64 + 7 * 8
    last = read_entries(tmp_path / "run" / INCIDENTS)[-1]
    assert [last[key] for key in ("kind", "step", "to_step", "next_sample")] == ["rollback", 8, 5, 64]


def test_a_resumed_run_reports_the_mean_losses_of_the_uninterrupted_one(pools, tmp_path):
    run(pools, {}, tmp_path / "every", "stop", {})
    losses = {step: loss for step, loss, _ in reports(tmp_path / "every")}
    for name, lengths in {"whole": [12], "parts": [6, 7, 12]}.items():  # 6 and 7 are not multiples of the interval
        for steps in lengths:
            run(pools, {}, tmp_path / name, "stop", {}, steps=steps, log_freq=4)
    found, whole = means(tmp_path / "parts"), means(tmp_path / "whole")
    assert whole == {1: losses[1], **{last: sum(losses[last - n] for n in range(4)[::-1]) / 4 for last in (4, 8, 12)}}
    assert {step: found[step] for step in whole} == whole
    assert found[7] == (losses[5] + losses[6] + losses[7]) / 3


def test_samples_left_out_by_a_rollback_do_not_count_as_epochs(pools, tmp_path):
    """12 steps of 8 samples use up the epochs; a rollback leaves 24 samples out."""
    allowed = 96.5 / 625
    run(pools, {}, tmp_path, "rollback", BAD, epochs=allowed)
    found = manifest.read(tmp_path / "checkpoint/step-00000012").numbers
    assert (found["samples"], found["timeline"][-1]["skipped"]) == (120, 24)
    (tmp_path / "checkpoint/step-00000012").rename(tmp_path / "lost")
    run(pools, {}, tmp_path, "rollback", BAD, epochs=allowed)
    with pytest.raises(WorkerFailure, match=r"UserError: .*more epochs than allowed\n  tests: 0.17 epochs of 625 samples"):
        run(pools, {}, tmp_path, "rollback", BAD, steps=13, epochs=allowed)


def test_two_bad_batches_are_left_out_for_any_interval_of_reading_losses(pools, tmp_path):
    bad = {7: tiny_poison.OF_LOSS, 9: tiny_poison.OF_GRADIENT}  # both before the reading of step 10
    for log_freq in (1, 6, 100):
        # with this optimizer all steps after a bad one are bad too, but their batches must not be left out
        run(pools, {}, tmp_path / str(log_freq), "rollback", bad, log_freq=log_freq, optimizer={"implementation": "foreach"})
    last = [entry["next_sample"] for entry in read_entries(tmp_path / "1" / INCIDENTS) if entry["kind"] == "rollback"]
    assert last == [56, 72]
    for log_freq in (6, 100):
        assert checksums(tmp_path / str(log_freq), 12) == checksums(tmp_path / "1", 12)


FLOAT8 = {"float8": {"enable": True, "emulate": True, "enable_fsdp_float8_all_gather": True}}


def test_a_rollback_at_the_end_restores_the_float8_scales_of_gathered_weights(pools, tmp_path):
    """At this rate the largest weights grow past powers of two between checkpoint and rollback, and so do their scales."""
    pytest.importorskip("torchao", reason="needs torchao")
    degrees, sections = {"dp_shard": 2}, FLOAT8 | {"optimizer": {"lr": 0.05}}
    run(pools, degrees, tmp_path / "run", "rollback", BAD, log_freq=12, **sections)
    run(pools, degrees, tmp_path / "expected", "stop", {}, steps=5, **sections)
    skip_to(tmp_path / "expected", 5, 64)
    run(pools, degrees, tmp_path / "expected", "stop", BAD, **sections)
    assert checksums(tmp_path / "run", 12) == checksums(tmp_path / "expected", 12)


def test_a_rollback_to_a_checkpoint_without_the_runs_id_keeps_that_of_this_start(pools, tmp_path):
    """One of titanlite 0.2. Later checkpoints had none either, so that retention took them for another run's."""
    run(pools, {}, tmp_path, "rollback", {}, steps=5)
    path = tmp_path / "checkpoint/step-00000005"
    found = manifest.read(path)
    manifest.write(path, found._replace(numbers={key: each for key, each in found.numbers.items() if key != "run"}))
    run(pools, {}, tmp_path, "rollback", BAD, steps=9)
    assert read_entries(tmp_path / INCIDENTS)[-1]["to_step"] == 5
    assert manifest.read(tmp_path / "checkpoint/step-00000009").numbers["run"]


def test_a_rollback_before_any_checkpoint_stops_the_run_and_says_why(pools, tmp_path):
    with pytest.raises(WorkerFailure, match=r"UserError: step 3: .*there is no checkpoint yet to go back to"):
        run(pools, {}, tmp_path, "rollback", {3: tiny_poison.OF_LOSS})


def test_after_three_rollbacks_to_the_same_checkpoint_the_run_stops(pools, tmp_path):
    bad = dict.fromkeys((7, 9, 12, 14), tiny_poison.OF_LOSS)
    with pytest.raises(WorkerFailure, match=r"UserError: step 7: .*back to step 5 3 times"):
        run(pools, {}, tmp_path, "rollback", bad)


def test_a_run_that_ends_between_rollback_and_checkpoint_resumes_to_the_same_weights(pools, tmp_path):
    run(pools, {}, tmp_path / "whole", "rollback", BAD)
    run(pools, {}, tmp_path / "parts", "rollback", BAD, steps=9, checkpoint={"interval": 5, "keep_latest_k": 0})
    (tmp_path / "parts/checkpoint/step-00000009").rename(tmp_path / "parts/away")  # as if the run had been killed there
    run(pools, {}, tmp_path / "parts", "rollback", BAD)
    assert checksums(tmp_path / "parts", 12) == checksums(tmp_path / "whole", 12)
    assert reports(tmp_path / "parts") == reports(tmp_path / "whole")
    entries = [(e["kind"], e["step"], e["superseded"]) for e in read_entries(tmp_path / "parts" / INCIDENTS)]
    assert entries == [(kind, 8, superseded) for superseded in (True, False) for kind in ("nonfinite", "rollback")]


def test_in_float16_a_nan_loss_is_an_incident_and_an_overflow_is_not(pools, tmp_path):
    half = {"mixed_precision_param": "float16"}
    run(pools, {"tp": 2}, tmp_path, "skip", {8: tiny_poison.OF_LOSS, 10: tiny_poison.OF_GRADIENT}, training=half)
    assert [step for step, _, norm in reports(tmp_path) if norm is None][-2:] == [8, 10]
    assert [(e["step"], e["action"]) for e in read_entries(tmp_path / INCIDENTS)] == [(8, "skipped")]


def test_in_float16_a_run_ends_if_its_gradients_are_never_finite(pools, tmp_path):
    bad, half = dict.fromkeys(range(1, 31), tiny_poison.OF_GRADIENT), {"mixed_precision_param": "float16"}
    with pytest.raises(
        WorkerFailure, match=r"UserError: step 21: loss \d\.\d+, gradient norm nan.* 21 steps in a row were not"
    ):
        run(pools, {}, tmp_path, "stop", bad, steps=30, log_freq=10, training=half)
    assert [(e["step"], e["action"]) for e in read_entries(tmp_path / INCIDENTS)] == [(21, "stop")]
