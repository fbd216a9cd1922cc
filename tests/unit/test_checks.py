"""Rules between keys: a wrong configuration is refused with its key, and the corrected one passes."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn

from tests import tiny
from titanlite import train
from titanlite.config.effects import FILE, OPTION, ConfigLayer
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.launch import process
from titanlite.loop.checks import CHECKS, check
from titanlite.parallel import expert
from titanlite.transforms import activation_checkpoint, compile

TP, SHARD = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree"
CP, METHOD = "parallelism.context_parallel_degree", "parallelism.context_parallel_method"
ATTENTION, HYBRID = "model.attention", "tests.forks.hybrid"
GLOBAL, LOCAL = "training.global_batch_size", "training.local_batch_size"
STEPS, WARMUP = "training.steps", "lr_scheduler.warmup_steps"
TOTAL, RATIO, LEAST = "lr_scheduler.total_steps", "lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"
SOURCES, TESTED = "training.sources", "validation.sources"
POLICY, APART = "training.document_policy", "training.document_mask"
DATASET, DATASET_PATH = "training.dataset", "training.dataset_path"
NONE, MIXED = {DATASET: "stdlib"}, [{"path": "file.txt", "weight": 2.0}, {"path": "."}]
DECAYED, TOKENIZER = "optimizer.decay_parameters", "model.hf_assets_path"
NAME, FLAVOR = "model.name", "model.flavor"
LORA, ADAPTED = "lora.enable", "lora.modules"
DUMP, SAVES = "job.dump_folder", "checkpoint.folder"
OFFLOAD, OVERLAP = "parallelism.cpu_offload", "parallelism.enable_async_tensor_parallel"
SNAPSHOT, SNAPSHOTS = "profiling.enable_memory_snapshot", "profiling.save_memory_snapshot_folder"
CHUNKS = "activation_checkpoint.sequence_chunks"
AC, BLOCKS = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
LAST, EP = "parallelism.reduce_every_microbatch", "parallelism.expert_parallel_degree"
NODE = "parallelism.expert_parallel_node_size"
MIXTURE = {"model.name": "tests.tiny_moe", "model.flavor": "plain", "model.hf_assets_path": "fits"}  # 8 experts
COMPILE, PARTS, BACKEND = "compile.enable", "compile.components", "compile.backend"
PRECISION, FUSED = "training.mixed_precision_param", "optimizer.implementation"
VALIDATE, TEXT = "validation.enable", "validation.dataset"
SAVE, LOAD_STEP, WEIGHTS = "checkpoint.enable", "checkpoint.load_step", "checkpoint.initial_load_path"
EXCLUDE, ALLOW = "checkpoint.exclude_from_loading", "checkpoint.allow_changes"
EVERY, INTERVAL = "checkpoint.keep_every_n_steps", "checkpoint.interval"
NONFINITE, MODE = "training.on_nonfinite", "checkpoint.async_mode"


def configuration(keys: dict[str, Any]) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = value
    return Config.model_validate(tables)


def faults(keys: dict[str, Any], ranks: int = 1, local_ranks: int | None = None, layer: ConfigLayer = FILE) -> list[str]:
    config = configuration({DATASET: "file.txt"} | keys)
    vars(config)["layers"] = dict.fromkeys(config.layers, layer)
    try:
        check(config, "run.toml", ranks, local_ranks)
    except UserError as error:
        first, *lines = str(error).splitlines()
        assert first == f"run.toml: {len(lines)} fault{'s' if len(lines) > 1 else ''}"
        return lines
    return []


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A working folder with the files in the tables below."""
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    return tmp_path


def files(folder: Path) -> None:
    (folder / "file.txt").write_text("some text")
    (folder / "run.log").write_text("some text")
    (folder / "empty").mkdir()
    (folder / "saves/checkpoint/step-00000007").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "weights/manifest.json").touch()
    for name, words in {"fits": ["</s>"], "large": ["</s>", *map(str, range(5000))], "endless": ["a", "b"]}.items():
        (folder / name).mkdir()
        model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
        Tokenizer(model).save(str(folder / name / "tokenizer.json"))
    (folder / "broken").mkdir()
    (folder / "broken/tokenizer.json").write_text("{}")


# ranks, a wrong configuration, its only fault, and the changes that correct it
# fmt: off
CASES = [
    (6, {TP: 4}, ["tensor_parallel_degree = 4", "number of processes, 6"], {TP: 2}),
    (4, {SHARD: 2}, ["data_parallel_shard_degree = 2", "needs 2 processes, and there are 4"], {SHARD: 4}),
    (4, {TP: 4, "training.seq_len": 30}, [f"{TP} = 4", "training.seq_len = 30"], {"training.seq_len": 32}),
    (2, {CP: 2, "training.seq_len": 30}, [f"{CP} = 2", "seq_len = 30 must be a multiple of 2 x 2 x"], {"training.seq_len": 32}),
    (8, {CP: 8, METHOD: "ulysses"}, [f'{METHOD} = "ulysses"', "do not divide 4 heads of llama3 debug"], {METHOD: "gather"}),
    (2, {CP: 2, ATTENTION: "tiles"}, [f'{ATTENTION} = "tiles"', f'{METHOD} = "gather"'], {METHOD: "ulysses"}),
    (2, {CP: 2, ATTENTION: "tiles"}, ["takes no mask", 'use "flash", "math" or'], {ATTENTION: "flash"}),
    (2, {CP: 2, NAME: HYBRID, FLAVOR: "plain", TOKENIZER: "fits"}, [f"in {HYBRID}, layers.1 does not"], {CP: 1}),
    (2, {AC: "full", CHUNKS: 2, TP: 2}, [f"{CHUNKS} = 2 with {TP} = 2", "use context parallelism"], {TP: 1}),
    (1, {AC: "full", CHUNKS: 33, "training.seq_len": 32}, [f"{CHUNKS} = 33", "training.seq_len = 32 tokens"], {CHUNKS: 32}),
    (4, MIXTURE | {EP: 8}, [f"{EP} = 8", "tensor_parallel_degree = 4 x 1 x 1 = 4"], {EP: 4}),
    (3, MIXTURE | {EP: 3}, [f"{EP} = 3: tests.tiny_moe plain has 8 experts, which 3 does not divide"], {EP: 1}),
    (4, MIXTURE | {EP: 4, NODE: 3}, [f"{NODE} = 3", f"{EP} = 4 must be a multiple above it"], {NODE: 2}),
    (4, MIXTURE | {EP: 4, NODE: 4}, [f"{NODE} = 4"], {NODE: 1}),
    (2, {EP: 2}, [f"{EP} = 2: llama3 debug has no Experts of models/moe.py; set it to 1"], {EP: 1}),
    (8, {TP: 8}, [f"{TP} = 8", "does not divide n_kv_heads = 4 of llama3 debug"], {TP: 4}),

    (1, {NAME: "llama4"}, ["model.name = 'llama4'", "models/ has: deepseek_v3, gemma3, gpt_oss, llama3"], {NAME: "llama3"}),
    (1, {NAME: "my.own"}, ["model.name = 'my.own'", "no module my.own"], {NAME: "models.llama3"}),
    (1, {FLAVOR: "9b"}, ["model.flavor = '9b'", "debug, 124m, 1b, 3b"], {FLAVOR: "1b"}),
    (1, {DECAYED: "w[q"}, [f"{DECAYED} = 'w[q'", "not a regular expression"], {DECAYED: "w[q]"}),
    (1, {DECAYED: "w_q"}, [f"{DECAYED} = 'w_q'", "matches no trained parameter"], {DECAYED: "wq"}),

    (1, {DECAYED: "wq.weight", LORA: True}, [DECAYED, "matches no trained parameter"], {DECAYED: "wq.lora_a"}),

    (1, {LORA: True, ADAPTED: ["*.wq", "*.wz"]}, [f'{ADAPTED}: "*.wz" matches no nn.Linear'], {ADAPTED: ["*.wq"]}),
    (1, {LORA: True, "lora.rank": 257}, ["lora.rank = 257", "layers.*.attention.w", "than"], {"lora.rank": 128}),
    (1, {LORA: True, ADAPTED: ["head.*"]}, [f'{ADAPTED}: "head.*"', "there are: layers.*.attention.wq,"], {ADAPTED: ["*"]}),

    (1, {TOKENIZER: "empty"}, [f'{TOKENIZER} = "empty"', "no tokenizer.json"], {TOKENIZER: "fits"}),
    (1, {TOKENIZER: "large"}, [TOKENIZER, '"large"', "ids up to 5000", "vocabulary of 4096"], {FLAVOR: "8b"}),
    (1, {NAME: "tests.tiny", FLAVOR: "plain"}, [TOKENIZER, "default tokenizer", "4095", "512"], {TOKENIZER: "fits"}),

    (2, {GLOBAL: 6, LOCAL: 2}, [f"{GLOBAL} = 6", f"{LOCAL} = 2", "2 data-parallel ranks = 4; ", "at most 1 can"], {GLOBAL: 8}),

    (1, {STEPS: 9, WARMUP: 10}, [f"{WARMUP} = 10", f"{STEPS} = 9"], {STEPS: 10}),
    (1, {STEPS: 5, TOTAL: 9, WARMUP: 10}, [f"{WARMUP} = 10", f"{TOTAL} = 9"], {TOTAL: 10}),
    (1, {STEPS: 100, WARMUP: 20, RATIO: 0.9}, [f"{RATIO} = 0.9", "90 steps", f"{WARMUP} = 20", f"{STEPS} = 100"], {RATIO: 0.8}),
    (1, {STEPS: 300, TOTAL: 200, WARMUP: 9}, [f"{STEPS} = 300", f"{TOTAL} = 200", LEAST], {LEAST: 0.1}),
    (1, {STEPS: 300, RATIO: 1e-3}, [f"{RATIO} = 0.001", f"less than one step of {STEPS} = 300"], {RATIO: 0.01}),

    (1, {DATASET: "stdlib", DATASET_PATH: "nowhere"}, [f'{DATASET_PATH} = "nowhere"'], {DATASET_PATH: "file.txt"}),
    (1, {"training.add_bos": True}, ["training.add_bos = true", "model.hf_assets_path is set"], {"training.add_bos": None}),
    (1, {DATASET: "file.txt", DATASET_PATH: "file.txt"}, [f'{DATASET} = "file.txt": has', f"{DATASET_PATH} is not set"], NONE),

    (1, {SOURCES: [{"path": "file.txt"}], DATASET: "file.txt"}, [DATASET, f"no effect unless {SOURCES} is not"], NONE),
    (1, NONE | {SOURCES: MIXED}, [SOURCES, '"." has no weight'], {SOURCES: [MIXED[0], {"path": ".", "weight": 1.0}]}),
    (1, NONE | {SOURCES: MIXED[:1] * 2}, [SOURCES, 'two are called "file.txt"'], {SOURCES: MIXED[:1]}),
    (1, {VALIDATE: True, TESTED: MIXED[:1]}, [TESTED, 'weight and epochs of "file.txt"'], {TESTED: MIXED[1:]}),
    (1, {APART: True, POLICY: "truncate"}, [f"{APART} = true: has no effect", f'{POLICY} != "tr'], {POLICY: "best_fit"}),

    (1, {SAVES: "/saves", SAVE: True}, ['checkpoint.folder = "/saves"', "inside job.dump_folder"], {SAVES: "a/b"}),
    (1, {LOAD_STEP: 8, SAVE: True, DUMP: "saves"}, [f"{LOAD_STEP} = 8", "which has: 7"], {LOAD_STEP: 7}),
    (1, {WEIGHTS: "empty", SAVE: True}, [f'{WEIGHTS} = "empty"', "not a checkpoint"], {WEIGHTS: "weights"}),
    (1, {NONFINITE: "rollback"}, [f'{NONFINITE} = "rollback"', "go back to", f"{SAVE} = true"], {SAVE: True}),
    (1, {NONFINITE: "rollback", SAVE: True, EXCLUDE: ["a"]}, [f'"rollback" with {EXCLUDE} = ["a"]'], {EXCLUDE: []}),
    (1, {NONFINITE: "skip", FUSED: "foreach"}, [f'{FUSED} = "foreach" with {NONFINITE} = "skip"'], {FUSED: "fused"}),
    (1, {SAVE: True, EVERY: 750}, [f"{EVERY} = 750", f"multiple of {INTERVAL} = 500"], {EVERY: 1500}),
    (1, {SAVE: True, ALLOW: ["optimizer.lrr"]}, [ALLOW, '"optimizer.lrr"', "mean optimizer.lr?"], {ALLOW: ["optimizer.lr"]}),
    (1, {SAVE: True, ALLOW: ["data", "metrics.*"]}, [ALLOW, '"metrics.*" is no key'], {ALLOW: ["data", "lr_scheduler.*"]}),
    (1, {SAVES: "s3://bucket/saves", SAVE: True}, ['checkpoint.folder = "s3://bucket/saves"'], {SAVES: "saves"}),
    (1, {"job.dump_folder": "s3://bucket/run"}, ['job.dump_folder = "s3://bucket/run"', "URL"], {"job.dump_folder": "run"}),
    (1, {"job.dump_folder": "~/run"}, ['job.dump_folder = "~/run"'], {"job.dump_folder": "run"}),
    (1, {SAVES: "tb", SAVE: True}, ['checkpoint.folder = "tb"', "is already used by"], {SAVES: "saves"}),

    (1, {AC: "selective", BLOCKS: 99}, [f"{BLOCKS} = 99: the model has", "blocks"], {BLOCKS: 2}),
    (1, {AC: "memory_budget"}, [f'{AC} = "memory_budget"', "compile.enable = true"], {COMPILE: True, BACKEND: "aot_eager"}),
    (1, {AC: "memory_budget", COMPILE: True, BACKEND: "eager"}, [AC, 'other than "eager"'], {BACKEND: "aot_eager"}),
    (1, {AC: "memory_budget", COMPILE: True, PARTS: ["loss"], BACKEND: "aot_eager"}, [AC, PARTS], {PARTS: ["model"]}),
    (1, {COMPILE: True, BACKEND: "inducter"}, [f'{BACKEND} = "inducter"', "no such backend", "ind"], {BACKEND: "aot_eager"}),
    (1, {PRECISION: "float16", FUSED: "foreach"}, [f'{FUSED} = "foreach"', PRECISION, "skips steps"], {FUSED: "fused"}),
    (1, {VALIDATE: True, TEXT: "nowhere"}, [f'{TEXT} = "nowhere"', "no such file"], {TEXT: "file.txt"}),
]
# fmt: on


@pytest.mark.parametrize(("ranks", "wrong", "expected", "change"), CASES)
def test_wrong_values_are_refused_by_name_and_correct_ones_pass(ranks, wrong, expected, change):
    found = faults(wrong, ranks)
    assert len(found) == 1, found
    assert [part for part in expected if part not in found[0]] == []
    assert faults(wrong | change, ranks) == []


@pytest.mark.parametrize(
    ("mode", "backend", "refused"),
    [("memory_budget", "aot_eager", 1), ("memory_budget", "inductor", 0), ("full", "aot_eager", 0)],
)
def test_only_inductor_may_recompute_the_dropout_of_blocks(mode, backend, refused):
    model = SimpleNamespace(layers=nn.ModuleDict({"0": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))}))
    config = Config.model_validate({"activation_checkpoint": {"mode": mode}, "compile": {"backend": backend}})
    found = list(activation_checkpoint.model_faults(config, model))
    assert len(found) == refused and all("dropout" in fault for fault in found)


def test_faults_of_all_kinds_are_reported_together():
    wrong = {TP: 3, FLAVOR: "9b", STEPS: 9, DATASET: "c4", LOAD_STEP: 3, SAVE: True}
    found = faults(wrong, ranks=4)
    expected = ["tensor_parallel_degree = 3", FLAVOR, f"{WARMUP} = 200", DATASET, LOAD_STEP]
    assert [part for part in expected if not any(part in line for line in found)] == []
    assert len(found) == len(expected)


def test_every_check_comes_after_those_that_it_depends_on():
    names = [each.name for each in CHECKS]
    assert len(set(names)) == len(names)
    for number, each in enumerate(CHECKS):
        assert set(each.needs) <= set(names[:number]), each.name


def test_more_ranks_than_gpus_are_refused_on_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert faults({}, ranks=3, local_ranks=3) == ["  NGPU = 3: this machine has 2 visible GPUs"]
    assert faults({}, ranks=4, local_ranks=2) == []


def test_a_rank_leaves_the_data_and_the_number_of_gpus_to_what_it_does_next(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for dataset in ("c4", "tests.own.parts:unnamed"):
        config = configuration({DATASET: dataset})
        with pytest.raises(UserError, match="2 faults"):
            check(config, "run.toml", 3, 3)
        assert check(config, "run.toml", 3, 3, open_files=False) == []


PREFETCH, ALL = {"parallelism.fsdp_prefetch": 2}, {OVERLAP: True, TP: 2, COMPILE: True}
PINNED = {SAVE: True, MODE: "async_with_pinned_mem"}
# (ranks, whether there is a GPU, options), their only fault, and the same for a correct configuration
ON_MACHINES = [
    ((1, False, {SNAPSHOT: True}), f"{SNAPSHOT} = true (option): has no effect unless the machine has a GPU",
     (1, True, {SNAPSHOT: True})),
    ((1, True, PREFETCH), "has no effect unless the run has more than one rank", (2, True, PREFETCH)),
    ((2, True, {LAST: False, LOCAL: 2}), f"{LAST} = false (option): has no effect unless a step has more",
     (2, True, {LAST: False, LOCAL: 2, GLOBAL: 8})),
    ((1, True, {SNAPSHOTS: "..", SNAPSHOT: True}), f'{SNAPSHOTS} = ".."', (1, True, {SNAPSHOTS: "a", SNAPSHOT: True})),
    ((2, False, ALL), f"{OVERLAP} = true (option): has no effect unless the machine has a GPU", (2, True, ALL)),
    ((1, True, ALL | {TP: 1}), f"{TP} > 1", (2, True, ALL)),
    ((2, True, ALL | {COMPILE: False}), f"{COMPILE} = true", (2, True, ALL)),
    ((2, True, ALL | {PARTS: ["loss"]}), f'{PARTS} has "model"', (2, True, ALL)),
    ((2, True, ALL | {BACKEND: "aot_eager"}), f'{BACKEND} = "inductor"', (2, True, ALL)),
    ((1, False, PINNED), f'{MODE} = "async_with_pinned_mem": only copies from a GPU', (1, True, PINNED)),
    ((1, True, {PRECISION: "float16", OFFLOAD: True}), f"{OFFLOAD} = true", (1, True, {OFFLOAD: True})),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "expected", "right"), ON_MACHINES)
def test_options_that_this_machine_does_not_support_are_refused(monkeypatch, wrong, expected, right):
    for (ranks, cuda, keys), faulty in ((wrong, True), (right, False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        found = faults(keys, ranks, layer=OPTION)
        assert len(found) == faulty and (not faulty or expected in found[0]), found


def test_without_a_mesh_for_each_parameter_split_experts_are_not_compiled_and_not_checkpointed_by_operation(monkeypatch):
    """As in PyTorch 2.11; test_expert_parallel.py trains this way."""
    compiled, kept = {COMPILE: True, BACKEND: "aot_eager"}, {AC: "selective", BLOCKS: "op"}
    monkeypatch.setattr(expert, "BEFORE_2_13", False)
    for keys in (compiled, kept):
        assert faults(MIXTURE | {EP: 2} | keys, ranks=2) == []
    monkeypatch.setattr(expert, "BEFORE_2_13", True)
    (fault,) = faults(MIXTURE | {EP: 2} | compiled, ranks=2)
    assert f"{EP} = 2: with {COMPILE} = true, needs PyTorch 2.13" in fault
    (fault,) = faults(MIXTURE | {EP: 2} | kept, ranks=2)
    assert f'{EP} = 2: with {BLOCKS} = "op", needs PyTorch 2.13' in fault
    for keys in ({}, {AC: "full"}, {AC: "selective", BLOCKS: 2}, compiled | {PARTS: ["loss"]}):
        assert faults(MIXTURE | {EP: 2} | keys, ranks=2) == []
    assert faults(MIXTURE | compiled, ranks=2) == faults(MIXTURE | kept, ranks=2) == []


def test_a_disk_without_room_for_checkpoints_is_refused_if_any_are_written(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 0))
    (fault,) = faults({SAVE: True, DUMP: "empty/run"}, local_ranks=1)
    assert 'checkpoint.folder = "checkpoint": ' in fault and "has 0.00 GiB free, and 2 checkpoints of this run need" in fault
    assert faults({DUMP: "empty/run"}, local_ranks=1) == []
    assert faults({SAVE: True, DUMP: "empty/run"}) == []  # checked on a machine that will not train


def test_a_rank_of_any_scheduler_checks_the_disk(monkeypatch, caplog, place):
    """torchrun starts ranks without `titanlite launch`, which alone had checked it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 0))
    (place / "run.toml").write_text(f'{DATASET} = "file.txt"\n{SAVE} = true\n')
    monkeypatch.setattr("sys.argv", ["titanlite train", "run.toml"])
    monkeypatch.setattr(process, "set_up_logging", lambda: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert "run.toml: 1 fault" in caplog.text and "2 checkpoints of this run need" in caplog.text


def test_a_folder_without_permission_is_refused(monkeypatch, place):
    """By `os.access`, since permissions do not restrict root, who may run these tests."""
    for denied, keys in (("saves/checkpoint", {SAVE: True, DUMP: "saves"}), ("empty", {DUMP: "empty/run"})):
        monkeypatch.setattr(os, "access", lambda path, mode, denied=denied: Path(path).absolute() != place / denied)
        (fault,) = faults(keys)
        assert f"/{denied}: no permission to write in it" in fault


@pytest.mark.parametrize(
    ("table", "without", "entry", "expected"),
    [
        ("sharding", "layers.*.ffn.w2", {}, "sharding: no pattern matches layers.*.ffn.w2"),
        ("initial", "*", {"*": None, "*.gate": None}, "initial: the pattern '*.gate' matches nothing"),
    ],
)
def test_a_model_whose_tables_do_not_fit_is_refused_by_the_parameters_name(monkeypatch, table, without, entry, expected):
    complete = getattr(tiny, table)

    def changed(config: tiny.Config) -> dict[str, Any]:
        return {pattern: value for pattern, value in complete(config).items() if pattern != without} | entry

    monkeypatch.setattr(tiny, table, changed)
    (fault,) = faults({NAME: "tests.tiny", FLAVOR: "plain", TOKENIZER: "fits"})
    assert expected in fault


def test_an_error_in_a_models_flops_is_found_before_training(monkeypatch):
    def flops(cfg: tiny.Config, seq_len: int) -> None:
        raise ZeroDivisionError(f"no heads at {seq_len}")

    monkeypatch.setattr(tiny, "flops", flops)
    (fault,) = faults({NAME: "tests.tiny", FLAVOR: "plain", TOKENIZER: "fits"})
    assert "its code failed" in fault and "no heads at" in fault


def test_inductor_without_a_c_compiler_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compile, "has_compiler", lambda: False)
    (fault,) = faults({COMPILE: True})
    assert 'compile.backend = "inductor": needs a C++ compiler' in fault
    monkeypatch.setattr(compile, "has_compiler", lambda: True)
    assert faults({COMPILE: True}) == []
