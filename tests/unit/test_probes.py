"""Every key has a probe: another value changes what the probe sees where the key's condition holds, and only there."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._functorch import config as partitioner

from tests.hostile.keys import OF_THE_PLACE, other, toml
from tests.hostile.keys import setting as without
from tests.unit.probes import PROBES, Probe
from titanlite.config import effects
from titanlite.config.effects import Place
from titanlite.config.read import KEYS, SECTIONS, read_config
from titanlite.config.schema import Config


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    partitioner.activation_memory_budget = 1.0


# A run that is small enough, and in which each key can show its effect.
SMALL = {
    "model.name": '"tests.tiny"',
    "model.flavor": '"plain"',
    "training.seq_len": "16",
    "training.steps": "6",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.mixed_precision_param": '"float32"',
    "lr_scheduler.warmup_steps": "2",
    "checkpoint.interval": "2",
    "checkpoint.keep_latest_k": "3",
    "metrics.log_freq": "2",
    "validation.freq": "4",
    "validation.steps": "1",
    "profiling.profile_freq": "3",
    "training.gc_freq": "4",
    "optimizer.implementation": '"for-loop"',
}
NO_BATCH = {"training.global_batch_size": "-1"}
# What else a key needs to show its effect, or the value that shows it.
MORE: dict[str, dict[str, str]] = {
    "lr_scheduler.total_steps": {"lr_scheduler.total_steps": "9"},
    "lr_scheduler.warmup_steps": {"lr_scheduler.warmup_steps": "4"},
    "training.steps": {"training.steps": "8"},
    "model.name": {"model.name": '"tests.tiny_qwen3"'},
    "model.flavor": {"model.flavor": '"tied"'},
    "model.overrides": {"model.overrides": "{ n_layers = 3 }"},
    "lora.rank": {"lora.rank": "4"},
    "lora.modules": {"lora.modules": '["*.wq"]'},
    "float8.enable": {"float8.emulate": "true"},
    "float8.filter_fqns": {"float8.filter_fqns": '["layers.0.*"]'},
    "model.attention": {"model.attention": '"math"'},
    "training.mixed_precision_param": {"training.mixed_precision_param": '"bfloat16"'},
    "parallelism.data_parallel_shard_degree": {"parallelism.data_parallel_shard_degree": "1"},
    "parallelism.data_parallel_replicate_degree": {"parallelism.data_parallel_replicate_degree": "2"},
    "parallelism.tensor_parallel_degree": {"parallelism.tensor_parallel_degree": "2"},
    "parallelism.context_parallel_degree": {"parallelism.context_parallel_degree": "2"},
    "parallelism.expert_parallel_degree": {"parallelism.expert_parallel_degree": "2", "model.name": '"tests.tiny_moe"'},
    "parallelism.pipeline_parallel_degree": {"parallelism.pipeline_parallel_degree": "2"},
    "parallelism.pipeline_parallel_schedule": {"parallelism.pipeline_parallel_schedule": '"GPipe"'},
    "parallelism.pipeline_parallel_layers_per_stage": {
        "parallelism.pipeline_parallel_layers_per_stage": "2",
        "model.overrides": "{ n_layers = 4 }",
    },
    "moe.max_tokens_factor": {"model.name": '"tests.tiny_moe"'},
    "moe.bias_update_speed": {"model.name": '"tests.tiny_moe"', "model.flavor": '"shared"', "moe.bias_update_speed": "0.5"},
    "moe.balance_loss": {"model.name": '"tests.tiny_moe"', "moe.balance_loss": "0.5"},
    "moe.router_z_loss": {"model.name": '"tests.tiny_moe"', "moe.router_z_loss": "0.5"},
    "activation_checkpoint.selective_ac_option": {"activation_checkpoint.selective_ac_option": "2"},
    "activation_checkpoint.memory_budget": {"activation_checkpoint.memory_budget": "0.25", "compile.enable": "true"},
    "compile.backend": {"compile.backend": '"eager"'},
    "optimizer.implementation": {"optimizer.implementation": '"foreach"'},
    "optimizer.eps": {"optimizer.eps": "0.1"},
    "optimizer.decay_parameters": {"optimizer.decay_parameters": '"wq"'},
    "optimizer.rounding": {"training.mixed_precision_param": '"bfloat16"'},
    "training.max_norm": {"training.max_norm": "0.01"},
    "training.document_mask": {},
    "training.seq_len": {"training.seq_len": "8"},
    "training.local_batch_size": {"training.local_batch_size": "4"},
    "training.global_batch_size": {"training.global_batch_size": "4"},
    "training.gc_freq": {"training.gc_freq": "2"},
    "checkpoint.keep_every_n_steps": {"checkpoint.keep_every_n_steps": "6"},
    "checkpoint.keep_latest_k": {"checkpoint.keep_latest_k": "5"},
    "checkpoint.exclude_from_loading": {"checkpoint.initial_load_path": '"weights"'},
    "metrics.log_freq": {"metrics.log_freq": "3"},
    "metrics.spike_window": {"metrics.spike_window": "0"},
    "metrics.spike_threshold": {"metrics.spike_threshold": "100.0"},
    "profiling.profile_freq": {"profiling.profile_freq": "4"},
    "validation.freq": {"validation.freq": "2"},
    "validation.steps": {"validation.steps": "2"},
    "training.on_nonfinite": {"training.on_nonfinite": '"skip"', "optimizer.implementation": '"fused"'},
    "checkpoint.allow_changes": {"checkpoint.allow_changes": '["optimizer.lr"]'},
    "parallelism.reduce_every_microbatch": {},
}
SEVERAL = {  # keys of several ranks
    *(key for key in KEYS if key.startswith("parallelism.")),
    *("training.mixed_precision_reduce", "moe.max_tokens_factor"),
    *("comm.init_timeout_seconds", "comm.train_timeout_seconds", "comm.save_timeout_seconds"),
}


# Only their absence shows on a CPU; test_profiling.py and test_offload.py have the rest.
NEED_A_GPU = (
    *("profiling.enable_memory_snapshot", "profiling.save_memory_snapshot_folder"),
    "activation_checkpoint.offload",
)


def test_every_key_has_a_probe():
    assert sorted(PROBES) == sorted(KEYS)


def configuration(settings: dict[str, str]) -> Config:
    Path("probe.toml").write_text(toml(settings))
    config = read_config("probe.toml", [])
    Path("probe.toml").unlink()
    return config


def pair(settings: dict[str, str], key: str) -> Iterator[Config]:
    """The configuration without the key, and with it."""
    small = {name: value for name, value in SMALL.items() if name != key} | ({key: SMALL[key]} if key in SMALL else {})
    more = MORE.get(key, {})
    yield configuration(small | {name: value for name, value in (more | settings).items() if name != key})
    yield configuration(small | {key: other(key)} | settings | more)


def holds(key: str) -> dict[str, str]:
    """What must be set so that all conditions of a key hold."""
    settings = without(key, "none")
    del settings[key]
    return settings


@pytest.fixture
def result(request, monkeypatch) -> Callable[[Probe, Config, int], object]:
    """What a probe sees of a configuration, on so many ranks; the working folder is then empty again."""

    def of(probe: Callable[..., object], config: Config, ranks: int) -> object:
        wanted = inspect.signature(probe).parameters
        more = {name: request.getfixturevalue(name) for name in ("capsys",) if name in wanted}
        with monkeypatch.context() as patch:
            if "monkeypatch" in wanted:
                more["monkeypatch"] = patch
            found = probe(config.settled(Place(cuda=True)), ranks, **more)
        for path in sorted(Path.cwd().rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return found

    return of


@pytest.mark.slow
@pytest.mark.parametrize("probe", dict.fromkeys(PROBES.values()), ids=lambda probe: probe.__name__)
def test_a_probe_sees_the_same_again(probe, result):
    config = configuration(SMALL)
    assert result(probe, config, 1) == result(probe, config, 1)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if number % 12 == 0 else pytest.mark.slow) for number, key in enumerate(KEYS)]
)
def test_another_value_changes_what_the_probe_of_a_key_sees_where_its_condition_holds_and_only_there(key, result):
    ranks = 2 if key in SEVERAL else 1
    if key not in NEED_A_GPU:
        plain, changed_one = pair(holds(key), key)
        assert not [idle for idle in changed_one.idle(Place(True, ranks)) if f"{idle.section}.{idle.name}" == key]
        assert result(PROBES[key], plain, ranks) != result(PROBES[key], changed_one, ranks), "no effect"
    for condition in effects.effective_when(SECTIONS[key.split(".")[0]].model_fields[key.split(".")[1]]).conditions:
        settings = without(key, condition)
        off = settings | (NO_BATCH if condition == effects.ACCUMULATION else {})
        value = off.pop(key)
        of_place = [part for part in condition.split(" or ") if part in OF_THE_PLACE]
        few = 1 if effects.RANKS in of_place else ranks
        plain, idle_one = configuration(SMALL | off), configuration(SMALL | off | {key: value})
        assert f"{key} = " in "\n".join(map(str, idle_one.idle(Place(effects.CUDA not in of_place, few))))
        if not of_place or effects.CUDA in of_place:
            place = Place(effects.CUDA not in of_place)
            assert plain.settled(place) == idle_one.settled(place)  # so that nothing can differ
        else:
            assert result(PROBES[key], plain, few) == result(PROBES[key], idle_one, few), f"an effect although not: {condition}"
