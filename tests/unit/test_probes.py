"""Every key changes a run if its condition holds, and nothing if it does not.

Two real runs of a few steps are compared: the names of their files, and metrics.jsonl except for times.
"""

import datetime
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hostile.keys import OF_THE_PLACE, setting, toml
from tests.token_files import TEXTS, write_jsonl
from titanlite import train
from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import KEYS, SECTIONS, read_config
from titanlite.config.schema import Config
from titanlite.data.mixture import open_on_every_rank
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.parallel.mesh import build_mesh, resolve_degrees
from titanlite.registry.family import vocabulary_of

# A small run in which each key can show its effect.
SMALL = {
    "model.name": '"tests.tiny"',
    "model.flavor": '"plain"',
    "model.hf_assets_path": '"assets"',
    "training.dataset_path": '"text.jsonl"',
    "training.seq_len": "16",
    "training.steps": "6",
    "training.local_batch_size": "2",
    "training.global_batch_size": "8",
    "training.mixed_precision_param": '"float32"',
    "lr_scheduler.warmup_steps": "2",
    "checkpoint.interval": "2",
    "checkpoint.keep_latest_k": "3",
    "metrics.log_freq": "2",
    "validation.dataset_path": '"text.jsonl"',
    "validation.freq": "4",
    "validation.steps": "1",
    "profiling.profile_freq": "3",
    "float8.emulate": "true",
    "optimizer.implementation": '"for-loop"',  # compiles nothing
}
MOE = {"model.name": '"tests.tiny_moe"', "model.flavor": '"shared"'}
SOURCES = '[{ path = "other.jsonl" }]'
# What else a key needs to show its effect, or the value that shows it.
MORE: dict[str, dict[str, str]] = {
    "lr_scheduler.total_steps": {"lr_scheduler.total_steps": "9"},
    "training.steps": {"training.steps": "8"},
    "model.name": {"model.name": '"tests.tiny_qwen3"'},
    "model.flavor": {"model.flavor": '"tied"'},
    "model.overrides": {"model.overrides": "{ n_layers = 3 }"},
    "training.dataset": {"training.dataset": '"other.jsonl"', "training.dataset_path": '""'},
    "training.dataset_options": {"training.dataset_path": '""'},
    "training.dataset_path": {"training.dataset_path": '"other.jsonl"'},
    "training.sources": {"training.sources": SOURCES, "training.dataset_path": '""'},
    "validation.dataset": {"validation.dataset": '"other.jsonl"', "validation.dataset_path": '""'},
    "validation.dataset_options": {"validation.dataset_path": '""'},
    "validation.dataset_path": {"validation.dataset_path": '"other.jsonl"'},
    "validation.sources": {"validation.sources": SOURCES, "validation.dataset_path": '""'},
    "training.mixed_precision_param": {"training.mixed_precision_param": '"bfloat16"'},
    "training.seq_len": {"training.seq_len": "8"},
    "training.local_batch_size": {"training.local_batch_size": "8", "training.global_batch_size": "-1"},
    "training.global_batch_size": {"training.global_batch_size": "4"},
    "training.max_norm": {"training.max_norm": "0.01"},
    "moe.bias_update_speed": {**MOE, "moe.bias_update_speed": "0.5"},
    "moe.balance_loss": {**MOE, "moe.balance_loss": "0.5"},
    "moe.router_z_loss": {**MOE, "moe.router_z_loss": "0.5"},
    "lora.rank": {"lora.rank": "4"},
    "lora.modules": {"lora.modules": '["*.wq"]'},
    "float8.filter_fqns": {"float8.filter_fqns": '["layers.0.*"]'},
    "optimizer.decay_parameters": {"optimizer.decay_parameters": '"wq"'},
    "optimizer.eps": {"optimizer.eps": "0.1"},
    "optimizer.ema_decay": {"optimizer.ema_decay": "0.9", "validation.enable": "true"},
    "checkpoint.interval": {"checkpoint.interval": "3"},
    "checkpoint.keep_every_n_steps": {"checkpoint.keep_every_n_steps": "2", "checkpoint.keep_latest_k": "1"},
    "checkpoint.keep_latest_k": {"checkpoint.keep_latest_k": "1"},
    "metrics.log_freq": {"metrics.log_freq": "3"},
    "profiling.profile_freq": {"profiling.profile_freq": "4"},
    "validation.freq": {"validation.freq": "2"},
    "validation.steps": {"validation.steps": "2"},
}
# Keys without a quickly visible effect in a run of one rank on a CPU; another test names each of them.
ELSEWHERE = (
    *("parallelism.*", "activation_checkpoint.*", "compile.*", "dataloader.*", "comm.*", "training.mixed_precision_reduce"),
    *("job.description", "job.print_config", "job.time_limit_minutes", "training.gc_freq", "training.deterministic"),
    *("training.on_nonfinite", "moe.max_tokens_factor", "optimizer.implementation", "metrics.spike_*"),
    *("float8.emulate", "float8.enable_fsdp_float8_all_gather", "profiling.*memory_snapshot*", "validation.sample_*"),
    *("checkpoint.async_mode", "checkpoint.load_step", "checkpoint.initial_load_*", "checkpoint.exclude_from_loading"),
    *("checkpoint.allow_changes", "model.hf_assets_path", "model.attention", "training.add_bos", "distillation.*"),
)
SHOWN = [key for key in KEYS if not any(fnmatchcase(key, pattern) for pattern in ELSEWHERE)]


pytestmark = pytest.mark.usefixtures("group_of_file")


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory) -> Iterator[Path]:
    """The working folder, with a tokenizer and two texts."""
    folder, before = tmp_path_factory.mktemp("probes"), Path.cwd()
    (folder / "assets").mkdir()
    train_tokenizer(TEXTS).save(str(folder / "assets" / "tokenizer.json"))
    write_jsonl(folder / "text.jsonl", [text * 3 for text in TEXTS])
    write_jsonl(folder / "other.jsonl", [text * 3 for text in TEXTS[::-1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLITE_CACHE", str(folder / "cache"))
        os.chdir(folder)
        yield folder
        os.chdir(before)


def configuration(settings: dict[str, str]) -> Config:
    Path("run.toml").write_text(toml(settings))
    return read_config("run.toml", [])


@functools.cache
def seen(settings: tuple[tuple[str, str], ...]) -> tuple[list[str], list[dict[str, Any]]]:
    """(names of files, reports except for times and memory) of a run with these settings."""
    config = configuration(dict(settings)).settled(Hardware(cuda=False))
    data, validation = open_on_every_rank(config, vocabulary_of(config.model))
    home, folder = Path.cwd(), tempfile.mkdtemp()
    (Path(folder) / "assets").symlink_to(home / "assets")
    os.chdir(folder)
    try:
        mesh = build_mesh(resolve_degrees(config.parallelism, 1), "cpu")
        train.train(config, data, validation, mesh, torch.device("cpu"), 0.0)
        written = {str(path.parent if "events" in path.name else path) for path in Path().rglob("*") if path.is_file()}
        lines = [json.loads(line) for path in Path().rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    finally:
        os.chdir(home)
        shutil.rmtree(folder)
    timed = ("second", "memory", "fraction", "mfu")
    return sorted(written), [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines]


def test_every_other_key_is_named_by_another_test():
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    others = [key for key in KEYS if key not in (*SHOWN, "comm.save_timeout_seconds")]
    assert [key for key in others if not any(key.split(".")[1] in text for text in texts)] == []


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if number % 12 == 0 else pytest.mark.slow) for number, key in enumerate(SHOWN)]
)
def test_another_value_of_a_key_changes_the_run(key):
    if key.startswith("float8"):
        pytest.importorskip("torchao", reason="needs torchao")
    holding = setting(key, "none")
    changed = holding | SMALL | {key: holding[key]} | MORE.get(key, {})
    plain = {name: value for name, value in changed.items() if name != key} | ({key: SMALL[key]} if key in SMALL else {})
    assert seen(tuple(changed.items())) != seen(tuple(plain.items())), "no effect"


def test_saves_have_a_timeout_of_their_own(monkeypatch):
    timeouts, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **words: timeouts.append(words["timeout"]) or new_group(**words))
    seen.__wrapped__(tuple((SMALL | {"checkpoint.enable": "true", "comm.save_timeout_seconds": "77"}).items()))
    assert timeouts == [datetime.timedelta(seconds=77)]


@pytest.mark.slow
def test_a_repeated_run_compares_as_equal():
    assert seen.__wrapped__(tuple(SMALL.items())) == seen(tuple(SMALL.items()))


def test_a_key_whose_condition_does_not_hold_is_named_and_has_no_effect():
    for key in KEYS:
        for condition in effects.effective_when(SECTIONS[key.split(".")[0]].model_fields[key.split(".")[1]]).conditions:
            off = {"training.global_batch_size": "-1"} | setting(key, condition)
            plain, idle = configuration({name: value for name, value in off.items() if name != key}), configuration(off)
            parts = [part for part in condition.split(" or ") if part in OF_THE_PLACE]
            here = Hardware(effects.CUDA not in parts, 1 if parts and effects.CUDA not in parts else 2)
            assert f"{key} = " in "\n".join(map(str, idle.idle(here))), (key, condition)
            assert plain.settled(here) == idle.settled(here), (key, condition)
