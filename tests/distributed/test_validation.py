"""Validation: the same loss in every round and on every mesh, without effect on training."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from models.attention import SeqInfo
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, config_of, first_microbatch, full_run, learnable_data, learnable_ids, mesh_of
from tests.distributed.test_resume import reports
from tests.token_files import data_of, mix_of
from titanlite.loop.loss import to_microbatch
from titanlite.loop.step import begin_training, build_model
from titanlite.loop.validation import pass_length, validate
from titanlite.parallel.fsdp import evaluating
from titanlite.registry.family import family_of, load_family
from titanlite.verify.compare import replaced

HERE = "tests.distributed.test_validation"


def run(pools: dict[int, Pool], degrees: dict[str, int], folder: Path, **sections) -> list[dict]:
    config = config_of(
        degrees,
        accumulation=2,
        job={"dump_folder": str(folder)},
        training={"steps": 4, "seq_len": 128},
        metrics={"log_freq": 1, "enable_tensorboard": False},
        **sections,
    )
    pools[math.prod(degrees.values())].run("tests.distributed.scenarios:full_run", degrees=degrees, config=config)
    return reports(folder)


# The data has 156 samples of this length: 19 batches of 8, and 4 samples in the last, in which not all ranks have a part.
ALL = {"enable": True, "freq": 2, "steps": -1}


@pytest.fixture(scope="module")
def reference(pools, tmp_path_factory) -> list[dict]:
    return run(pools, {}, tmp_path_factory.mktemp("one"), validation=ALL)


@pytest.mark.parametrize("degrees", [{"dp_shard": 4}, pytest.param({"dp_shard": 2, "cp": 2}, marks=pytest.mark.slow)], ids=str)
def test_every_mesh_measures_the_same_though_ranks_have_unequal_counts(pools, tmp_path, reference, degrees):
    found = run(pools, degrees, tmp_path, validation=ALL)
    for key in ("validation_loss", "validation_bits_per_byte"):
        pairs = [(a[key], b[key]) for a, b in zip(found, reference, strict=True) if key in b]
        assert len(pairs) == 2
        assert all(abs(a / b - 1) < 1e-5 for a, b in pairs)


def patience_of_run(folder: Path) -> list[int | str]:
    """The timeouts that a run of 4 steps sets, in order, with "validation" for each pass."""
    config = config_of({}, job={"dump_folder": str(folder)}, training={"steps": 4, "seq_len": 128}, validation=ALL)
    config = replaced(config, comm={"init_timeout_seconds": 99, "train_timeout_seconds": 9})
    events: list[int | str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titanlite.launch.process.set_timeout", lambda seconds, but: events.append(seconds))
        patch.setattr("titanlite.train.validate", lambda *_: events.append("validation") or {})
        full_run({}, config)
    return events


def test_the_first_pass_which_compiles_has_the_timeout_of_the_start(pools, tmp_path):
    [events] = pools[1].run(f"{HERE}:patience_of_run", folder=tmp_path)
    assert events == [99, 9, 99, "validation", 9, "validation"]


def parameters_that_the_optimizer_lacks(degrees: dict[str, int], flavor: str) -> list[str]:
    config = config_of(degrees, accumulation=2, model={"flavor": flavor}, training={"steps": 4, "seq_len": 128})
    mesh, data = mesh_of(degrees), learnable_data(config)
    model, optimizer, _ = begin_training(family_of(config.model), config, mesh, CPU)
    validate(model, data, config, mesh, CPU)
    return [name for name, parameter in model.named_parameters() if parameter not in optimizer.state]


@pytest.mark.parametrize("degrees, flavor", [({"dp_shard": 2}, "tied"), ({"dp_shard": 2, "tp": 2}, "uneven")], ids=str)
def test_afterwards_a_checkpoint_has_the_moments_of_every_parameter(pools, degrees, flavor):
    name = parameters_that_the_optimizer_lacks.__name__
    answers = pools[math.prod(degrees.values())].run(f"{HERE}:{name}", degrees=degrees, flavor=flavor)
    assert answers == [[]] * len(answers)


def left_by_a_pass(flavor: str) -> list[str]:
    """The units in which FSDP2 has not ended a pass without gradients."""
    config, mesh = config_of({"dp_shard": 2}, flavor), mesh_of({"dp_shard": 2})
    model = build_model(family_of(config.model), config, mesh, CPU)
    part = to_microbatch(model, first_microbatch(config, mesh))
    with evaluating(model):
        model.head(model(part.inputs, part.seq), part.labels)
    units = {name: module._get_fsdp_state() for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert len(units) > 3
    open_pass = TrainingState.FORWARD, TrainingState.PRE_BACKWARD
    return [
        name
        for name, state in units.items()
        if state._training_state in open_pass or state._modules_to_run_forward or state._state_ctx.iter_forward_root
    ]


@pytest.mark.parametrize("flavor", ["plain", "tied"])
def test_a_pass_without_gradients_is_ended_in_every_unit(pools, flavor):
    """Of embedding and head tied, the head's pass stayed open: the next one had no root, whose streams wait on a GPU."""
    assert pools[2].run(f"{HERE}:{left_by_a_pass.__name__}", flavor=flavor) == [[], []]


def test_validation_does_not_change_training(pools, tmp_path):
    degrees = {"tp": 2}
    looked_at = run(pools, degrees, tmp_path / "with", validation={**ALL, "steps": 3})
    alone = run(pools, degrees, tmp_path / "without")
    assert [(r["loss"], r["grad_norm"]) for r in looked_at] == [(r["loss"], r["grad_norm"]) for r in alone]


def test_every_round_reads_the_same_samples(pools, tmp_path):
    reports = run(pools, {}, tmp_path, optimizer={"lr": 1e-20, "weight_decay": 0.0}, validation={**ALL, "steps": 3})
    measured = [report["validation_loss"] for report in reports if "validation_loss" in report]
    assert len(measured) == 2
    assert len(set(measured)) == 1


def measured_and_expected(steps: int) -> tuple[dict[str, float], float]:
    """(validation loss, mean cross entropy of the same samples by PyTorch's own function)."""
    config = config_of({}, validation={"enable": True, "steps": steps})
    data, length, ids = learnable_data(config), config.training.seq_len, learnable_ids(512)
    model = build_model(load_family("tests.tiny", "plain"), config, mesh_of({}), CPU)
    found = validate(model, data, config, mesh_of({}), CPU)
    count = min(steps * 8, (len(ids) - 1) // length) if steps > 0 else (len(ids) - 1) // length
    tokens = torch.stack([torch.from_numpy(ids[i * length : (i + 1) * length + 1].astype(int)) for i in range(count)])
    inputs = tokens[:, :-1]
    with torch.no_grad():
        logits = model.head(model(inputs, SeqInfo(torch.arange(length).expand_as(inputs))))
    return found, F.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize("steps", [7, -1])
def test_the_loss_is_the_mean_cross_entropy_of_the_first_samples(pools, steps):
    found, expected = pools[1].run(f"{HERE}:measured_and_expected", steps=steps)[0]
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-6)
    # each token of this data stands for 3 bytes
    assert found["validation_bits_per_byte"] == pytest.approx(expected / math.log(2) / 3, rel=1e-6)


def test_validation_ends_with_the_data():
    config = config_of({}, validation={"steps": 1000})
    assert pass_length(learnable_data(config), 0, config, 1) == math.ceil(625 / 8)


def of_sources(degrees: dict[str, int], steps: int) -> list[dict[str, float]]:
    """The validation losses of two sources together, and of each alone."""
    config = config_of(degrees, validation={"enable": True, "steps": steps})
    ids = learnable_ids(512)
    files = [data_of([part], config, 512, bytes_a_token=size).sources[0] for part, size in ((ids[:7000], 3), (ids[7000:], 3))]
    opened = [mixed._replace(name=name) for mixed, name in zip(files, ("web", "code"), strict=True)]
    model = build_model(load_family("tests.tiny", "plain"), config, mesh_of(degrees), CPU)
    mixtures = [mix_of(sources, config, 512, bytes_a_token=3) for sources in (opened, opened[:1], opened[1:])]
    return [validate(model, data, config, mesh_of(degrees), CPU) for data in mixtures]


def test_each_of_several_sources_is_validated_as_if_alone(pools):
    both, web, code = pools[4].run(f"{HERE}:of_sources", degrees={"dp_shard": 2, "tp": 2}, steps=10)[0]
    for name, alone in (("web", web), ("code", code)):
        assert {key: both[f"{key}/{name}"] for key in alone} == alone
    assert len(both) == 6
    # 80 samples of each, as many labels: the mean of both
    assert both["validation_loss"] == pytest.approx((web["validation_loss"] + code["validation_loss"]) / 2, rel=1e-6)
    assert web["validation_loss"] != code["validation_loss"]
