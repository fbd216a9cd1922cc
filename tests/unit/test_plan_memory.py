"""A lower bound of a rank's memory, by arithmetic, before a run starts: equal to the measurement, and a refusal names what
fits.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.repetitions import slow_but
from tests.traffic_cases import ADAPTERS, BOTH, HALF, HYBRID, LATE, MUON, SHARD, Case
from tests.unit.test_plan_experts import case as experts
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.plan import memory
from titanlite.plan.memory import faults, kept_bytes
from titanlite.plan.predict import predict
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

GIB = 2**30
AVERAGED = {"optimizer": {"ema_decay": 0.9}, "checkpoint": {"enable": True}}
NARROW = {"dtype": "bfloat16", **HALF}
STAGES = {"pp": 2}
FROZEN = {"optimizer": {"groups": [{"pattern": "embed.*", "frozen": True}, {"pattern": "layers.0.*", "frozen": True}]}}
CASES = {
    "one process": Case({}),
    "adapters": Case(SHARD, others=ADAPTERS),
    "Muon, tp 2, split experts": experts({"dp_shard": 2, "tp": 2, "ep": 4})._replace(others=MUON),
    "bfloat16": Case(BOTH, training=NARROW),
    "bfloat16 with remainders": Case(SHARD, training=NARROW, others={"optimizer": {"rounding": "compensated"}}),
    "whole gradients": Case(BOTH, accumulation=2, parallelism=LATE),
    "an EMA, one microbatch, reduced at once": Case(BOTH, parallelism=LATE, others=AVERAGED),
    "tp 2, whole experts and gradients": experts({"dp_shard": 2, "tp": 2}, reduce_every_microbatch=False),
    "8 experts on 3 ranks": experts({"dp_shard": 3}),
    "a pipeline, frozen at its beginning": Case(STAGES, "deep", 4, others=FROZEN),
    "a pipeline with Muon": Case(STAGES, "deep", 4, others=MUON),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["whole gradients", "a pipeline, frozen at its beginning", "Muon, tp 2, split experts", "8 experts on 3 ranks"], CASES
    ),
)
def test_arithmetic_agrees_with_the_prediction_that_is_measured(name):
    config, ranks = CASES[name].config(), CASES[name].ranks
    measured = max(sum(each.memory[:3]) for each in predict(config, ranks, "cpu").moments)
    # tensor parallelism replicates norms, and shards may be padded; both matter in a model as small as this
    assert kept_bytes(config, on_meta(family_of(config.model), config), ranks) == pytest.approx(measured, rel=0.03)


def llama_8b(**sections) -> Config:
    return Config.model_validate({"model": {"flavor": "8b"}, **sections})


def refused(config: Config, ranks: int, local_ranks: int) -> list[str]:
    return list(faults(config, on_meta(family_of(config.model), config), ranks, local_ranks))


@pytest.fixture
def gpus(monkeypatch):
    """Eight GPUs of 80 GiB in a machine of 2,000 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(memory, "machine_memory", lambda: 2000 * GIB)


def test_a_model_that_a_gpu_cannot_hold_is_refused_with_its_size_and_every_option_that_fits(gpus):
    (fault,) = refused(llama_8b(), 1, 1)
    assert "take 119.7 GiB on each rank, and a GPU of this machine has 80.0 GiB" in fault
    remedies = ('training.dtype = "bfloat16" (59.8 GiB)', "2 ranks with", "parallelism.cpu_offload = true, which is slower")
    assert all(remedy in fault for remedy in remedies)
    assert refused(llama_8b(training={"dtype": "bfloat16"}), 1, 1) == refused(llama_8b(), 2, 2) == []
    assert refused(llama_8b(parallelism={"cpu_offload": True}), 1, 1) == []


@pytest.mark.parametrize(
    ("degrees", "keys", "waiting"),
    [({}, {}, 0), ({}, LATE, 1), (SHARD, LATE, 1), (HYBRID, {}, 1 / 2)],
    ids=["reduced at once", "reduced once, one rank", "reduced once", "replicas"],
)
def test_of_what_the_host_keeps_only_gradients_that_wait_for_their_reduction_are_on_a_gpu(degrees, keys, waiting):
    """FSDP2 accumulates them there, and copies what the last reduction gives to the host."""
    case = Case(degrees, accumulation=2, parallelism={"cpu_offload": True, **keys})
    config, moments = case.config(), predict(case.config(), case.ranks, "cuda").moments
    values = sum(p.numel() for p in on_meta(family_of(config.model), config).parameters())
    assert {each.memory[0] + each.memory[2] for each in moments} == {0} and moments[-1].memory.total == 0
    assert max(each.memory.gradients for each in moments) == pytest.approx(waiting * 4 * values, rel=0.01)


def test_gradients_that_wait_for_their_reduction_over_replicas_are_replaced_by_its_result():
    case = Case(HYBRID, accumulation=2)
    values = sum(p.numel() for p in on_meta(family_of(case.config().model), case.config()).parameters())
    most = max(each.memory.gradients for each in predict(case.config(), case.ranks, "cpu").moments)
    assert most == pytest.approx(4 * values / 2, rel=0.01)


def test_a_rank_alone_that_offloads_keeps_what_it_gathers_as_two_ranks_do():
    keys = {"data_parallel_shard_degree": -1, "cpu_offload": True, "fsdp_reshard_after_forward": "never"}
    config = Case({}, "deep", accumulation=2, parallelism=keys, training=HALF).config()
    alone, two = (predict(config, ranks, "cuda").during("loss") for ranks in (1, 2))
    assert alone.activations == two.activations and alone.total == pytest.approx(two.total, rel=0.2)


def test_the_memory_of_a_machine_is_shared_by_its_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "machine_memory", lambda: 120 * GIB)
    assert refused(llama_8b(), 1, 1) == refused(llama_8b(), 2, 2) == []
    replicas = llama_8b(parallelism={"data_parallel_replicate_degree": 2})
    (fault,) = refused(replicas, 2, 2)
    assert "and this machine, for each of 2 ranks, has 60.0 GiB" in fault and "cpu_offload" not in fault


def test_memory_is_not_measured_on_a_mesh_that_does_not_fit_the_ranks(gpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not divide the number of") as caught:
        check(llama_8b(parallelism={"tensor_parallel_degree": 3}), "run.toml", 8, 8, more=[memory.CHECK])
    assert "memory:" not in str(caught.value)


def test_a_key_without_effect_has_none_on_a_prediction():
    """A run sets it to its default; the prediction split the feed-forward layers of blocks that recompute nothing."""
    plain = Case(SHARD).config()
    idle = plain.with_keys({"activation_checkpoint.sequence_chunks": 4, "optimizer.ema_decay": 0.9})
    assert predict(idle, 2, "cpu").moments == predict(plain, 2, "cpu").moments
