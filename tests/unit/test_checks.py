"""What must hold between keys: a wrong configuration is refused by the name of its key, the right one beside it passes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from tests import tiny
from titanlite.config.effects import FILE, OPTION, ConfigLayer
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import CHECKS, check
from titanlite.parallel import fsdp
from titanlite.transforms import compile

TP, SHARD = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree"
CP, METHOD = "parallelism.context_parallel_degree", "parallelism.context_parallel_method"
ATTENTION, HYBRID = "model.attention", "tests.forks.hybrid"
RESHARD = "parallelism.fsdp_reshard_after_forward"
GLOBAL, LOCAL = "training.global_batch_size", "training.local_batch_size"
STEPS, WARMUP = "training.steps", "lr_scheduler.warmup_steps"
TOTAL, RATIO, LEAST = "lr_scheduler.total_steps", "lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"
SOURCES, TESTED, POLICY = "training.sources", "validation.sources", "training.document_policy"
APART = "training.document_mask"
DATASET, DATASET_PATH, BOARD = "training.dataset", "training.dataset_path", "metrics.save_tb_folder"
NONE, MIXED = {DATASET: "stdlib"}, [{"path": "file.txt", "weight": 2.0}, {"path": "."}]
DECAYED, TOKENIZER = "optimizer.decay_parameters", "model.hf_assets_path"
NAME, FLAVOR = "model.name", "model.flavor"
LORA, ADAPTED = "lora.enable", "lora.modules"
DUMP, SAVES = "job.dump_folder", "checkpoint.folder"
TRACE, TRACES, SNAPSHOTS = "profiling.enable_profiling", "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder"
OFFLOAD, OVERLAP = "parallelism.cpu_offload", "parallelism.enable_async_tensor_parallel"
SNAPSHOT, RECORD = "profiling.enable_memory_snapshot", "comm.trace_buf_size"
CHUNKS = "activation_checkpoint.sequence_chunks"
AC, BLOCKS = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
LAST = "parallelism.reduce_every_microbatch"
EP = "parallelism.expert_parallel_degree"
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
    """A working folder with what the tables below name."""
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


# ranks, a wrong configuration, what its one fault must say, and what to change for a right one
# fmt: off
CASES = [
    (6, {TP: 4}, ["tensor_parallel_degree = 4", "number of processes, 6"], {TP: 2}),
    (4, {SHARD: 2}, ["data_parallel_shard_degree = 2", "needs 2 processes, and there are 4"], {SHARD: 4}),
    (8, {SHARD: 4, TP: 4}, ["needs 16 processes, and there are 8"], {SHARD: 2}),
    (4, {TP: 4, "training.seq_len": 30}, [f"{TP} = 4", "training.seq_len = 30"], {"training.seq_len": 32}),
    (4, {RESHARD: 3}, [f"{RESHARD} = 3", "data_parallel_shard_degree = 4"], {RESHARD: 2}),
    (4, {RESHARD: 4}, [f"{RESHARD} = 4", "smaller"], {RESHARD: "always"}),
    (2, {CP: 2, "training.seq_len": 30}, [f"{CP} = 2", "seq_len = 30 must be a multiple of 2 x 2 x"], {"training.seq_len": 32}),
    (8, {CP: 8, METHOD: "ulysses"}, [f'{METHOD} = "ulysses"', "do not divide 4 heads of llama3 debug"], {METHOD: "gather"}),
    (2, {CP: 2, ATTENTION: "tiles"}, [f'{ATTENTION} = "tiles"', f'{METHOD} = "gather"'], {METHOD: "ulysses"}),
    (2, {CP: 2, ATTENTION: "tiles"}, ["takes no mask", 'use "flash", "math" or'], {ATTENTION: "flash"}),
    (2, {CP: 2, NAME: HYBRID, FLAVOR: "plain", TOKENIZER: "fits"}, [f"in {HYBRID}, layers.1 does not"], {CP: 1}),
    (2, {AC: "full", CHUNKS: 2, TP: 2}, [f"{CHUNKS} = 2 with {TP} = 2", "use context parallelism"], {TP: 1}),
    (1, {AC: "full", CHUNKS: 33, "training.seq_len": 32}, [f"{CHUNKS} = 33", "training.seq_len = 32 tokens"], {CHUNKS: 32}),
    (4, MIXTURE | {EP: 8}, [f"{EP} = 8", "tensor_parallel_degree = 4 x 1 x 1 = 4"], {EP: 4}),
    (3, MIXTURE | {EP: 3}, [f"{EP} = 3: tests.tiny_moe plain has 8 experts, which 3 does not divide"], {EP: 1}),
    (2, {EP: 2}, [f"{EP} = 2: llama3 debug has no Experts of models/moe.py; set it to 1"], {EP: 1}),
    (4, MIXTURE | {EP: 2, RESHARD: 2}, [f"{RESHARD} = 2", f"{EP} = 2 shards some", '"always" or'], {RESHARD: "always"}),
    (8, {TP: 8}, [f"{TP} = 8", "does not divide n_kv_heads = 4 of llama3 debug"], {TP: 4}),

    (1, {NAME: "llama4"}, ["model.name = 'llama4'", "models/ has: deepseek_v3, gemma3, gpt_oss, llama3"], {NAME: "llama3"}),
    (1, {NAME: "my.own"}, ["model.name = 'my.own'", "no module my.own"], {NAME: "models.llama3"}),
    (1, {NAME: "blocks"}, ["model.name = 'blocks'", "lacks Config, FLAVORS"], {NAME: "llama3"}),
    (1, {FLAVOR: "9b"}, ["model.flavor = '9b'", "debug, 1b, 3b, 8b"], {FLAVOR: "1b"}),
    (1, {DECAYED: "w[q"}, [f"{DECAYED} = 'w[q'", "not a regular expression"], {DECAYED: "w[q]"}),
    (1, {DECAYED: "w_q"}, [f"{DECAYED} = 'w_q'", "matches no trained parameter"], {DECAYED: "wq"}),

    (1, {DECAYED: "wq.weight", LORA: True}, [DECAYED, "matches no trained parameter"], {DECAYED: "wq.lora_a"}),

    (1, {LORA: True, ADAPTED: ["*.wq", "*.wz"]}, [f'{ADAPTED}: "*.wz" matches no nn.Linear'], {ADAPTED: ["*.wq"]}),
    (1, {LORA: True, "lora.rank": 257}, ["lora.rank = 257", "layers.*.attention.w", "than"], {"lora.rank": 128}),
    (1, {LORA: True, ADAPTED: ["head.*"]}, [f'{ADAPTED}: "head.*"', "there are: layers.*.attention.wq,"], {ADAPTED: ["*"]}),
    (1, {LORA: True, ADAPTED: ["layers.0.atention.wq"]}, ["did you mean layers.*.attention.wq?"], {ADAPTED: ["layers.0.*.wq"]}),

    (1, {TOKENIZER: "empty"}, [f'{TOKENIZER} = "empty"', "no tokenizer.json"], {TOKENIZER: "fits"}),
    (1, {TOKENIZER: "large"}, [TOKENIZER, '"large"', "ids up to 5000", "vocabulary of 4096"], {FLAVOR: "8b"}),
    (1, {TOKENIZER: "endless"}, [f"endless{os.sep}tokenizer.json", "no end-of-text token"], {TOKENIZER: "fits"}),
    (1, {TOKENIZER: "broken"}, [f"broken{os.sep}tokenizer.json", "not a tokenizer"], {TOKENIZER: "fits"}),
    (1, {NAME: "tests.tiny", FLAVOR: "plain"}, [TOKENIZER, "default tokenizer", "4095", "512"], {TOKENIZER: "fits"}),

    (2, {GLOBAL: 6, LOCAL: 2}, [f"{GLOBAL} = 6", f"{LOCAL} = 2", "2 data-parallel ranks = 4"], {GLOBAL: 8}),

    (1, {STEPS: 9, WARMUP: 10}, [f"{WARMUP} = 10", f"{STEPS} = 9"], {STEPS: 10}),
    (1, {STEPS: 5, TOTAL: 9, WARMUP: 10}, [f"{WARMUP} = 10", f"{TOTAL} = 9"], {TOTAL: 10}),
    (1, {STEPS: 100, WARMUP: 20, RATIO: 0.9}, [f"{RATIO} = 0.9", "90 steps", f"{WARMUP} = 20", f"{STEPS} = 100"], {RATIO: 0.8}),
    (1, {STEPS: 300, TOTAL: 200, WARMUP: 9}, [f"{STEPS} = 300", f"{TOTAL} = 200", LEAST], {LEAST: 0.1}),
    (1, {STEPS: 300, RATIO: 1e-3}, [f"{RATIO} = 0.001", f"less than one step of {STEPS} = 300"], {RATIO: 0.01}),

    (1, {DATASET: "stdlib", DATASET_PATH: "nowhere"}, [f'{DATASET_PATH} = "nowhere"'], {DATASET_PATH: "file.txt"}),
    (1, {DATASET: "stdlib", DATASET_PATH: "empty"}, [f"{DATASET_PATH} = ", "/empty: the folder holds no"], {DATASET_PATH: "."}),
    (1, {DATASET: "c4"}, [f'{DATASET} = "c4"', "tokenize --input hub:allenai/c4:en"], {DATASET: "file.txt"}),
    (1, {DATASET: "run.log"}, [f'{DATASET} = "', "run.log", "not of a known kind of text"], {DATASET: "file.txt"}),
    (1, {"training.add_bos": True}, ["training.add_bos = true", "model.hf_assets_path is set"], {"training.add_bos": None}),
    (1, {DATASET: "file.txt", DATASET_PATH: "file.txt"}, [f'{DATASET} = "file.txt": has', f"{DATASET_PATH} is not set"], NONE),

    (1, NONE | {SOURCES: [{"path": "nowhere"}]}, [f'{SOURCES} = "nowhere"', "no such file"], {SOURCES: MIXED[1:]}),
    (1, {SOURCES: [{"path": "file.txt"}], DATASET: "file.txt"}, [DATASET, f"no effect unless {SOURCES} is not"], NONE),
    (1, NONE | {SOURCES: MIXED}, [SOURCES, '"." has no weight'], {SOURCES: [MIXED[0], {"path": ".", "weight": 1.0}]}),
    (1, NONE | {SOURCES: MIXED[:1] * 2}, [SOURCES, 'two are called "file.txt"'], {SOURCES: MIXED[:1]}),
    (1, {VALIDATE: True, TESTED: MIXED[:1]}, [TESTED, 'weight and epochs of "file.txt"'], {TESTED: MIXED[1:]}),
    (1, {APART: True, POLICY: "truncate"}, [f"{APART} = true: has no effect", f'{POLICY} != "tr'], {POLICY: "best_fit"}),

    (1, {DUMP: "file.txt"}, ['job.dump_folder = "file.txt"', "is not a folder"], {DUMP: "empty"}),
    (1, {DUMP: "file.txt/new"}, ['job.dump_folder = "file.txt/new"', "is not a folder"], {DUMP: "new/new"}),
    (1, {SAVES: "/saves", SAVE: True}, ['checkpoint.folder = "/saves"', "inside job.dump_folder"], {SAVES: "a/b"}),
    (1, {BOARD: "a/../../b"}, [f'{BOARD} = "a/../../b"'], {BOARD: "a"}),
    (1, {TRACES: "/traces", TRACE: True}, [f'{TRACES} = "/traces"', "inside job.dump_folder"], {TRACES: "a/traces"}),
    (1, {LOAD_STEP: 8, SAVE: True, DUMP: "saves"}, [f"{LOAD_STEP} = 8", "which has: 7"], {LOAD_STEP: 7}),
    (1, {LOAD_STEP: 8, SAVE: True, DUMP: "new"}, [f"{LOAD_STEP} = 8", "which has: none"], {LOAD_STEP: -1}),
    (1, {WEIGHTS: "empty", SAVE: True}, [f'{WEIGHTS} = "empty"', "not a checkpoint"], {WEIGHTS: "weights"}),
    (1, {NONFINITE: "rollback"}, [f'{NONFINITE} = "rollback"', "go back to", f"{SAVE} = true"], {NONFINITE: "skip"}),
    (1, {NONFINITE: "rollback"}, [f'{NONFINITE} = "rollback"'], {SAVE: True}),
    (1, {NONFINITE: "rollback", SAVE: True, EXCLUDE: ["a"]}, [f'"rollback" with {EXCLUDE} = ["a"]'], {EXCLUDE: []}),
    (1, {NONFINITE: "skip", FUSED: "foreach"}, [f'{FUSED} = "foreach" with {NONFINITE} = "skip"'], {FUSED: "fused"}),
    (1, {SAVE: True, EVERY: 750}, [f"{EVERY} = 750", f"multiple of {INTERVAL} = 500"], {EVERY: 1500}),
    (1, {SAVE: True, ALLOW: ["optimizer.lrr"]}, [ALLOW, '"optimizer.lrr"', "mean optimizer.lr?"], {ALLOW: ["optimizer.lr"]}),
    (1, {SAVE: True, ALLOW: ["xyzzy"]}, [ALLOW, '"xyzzy"', "there are: model.name, ", ", data"], {ALLOW: ["data"]}),
    (1, {SAVE: True, ALLOW: ["data", "metrics.*"]}, [ALLOW, '"metrics.*" is no key'], {ALLOW: ["data", "lr_scheduler.*"]}),
    (1, {SAVES: "tb", SAVE: True}, ['checkpoint.folder = "tb"', "is the place of"], {SAVES: "saves"}),

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
def test_the_wrong_is_refused_by_name_and_the_right_beside_it_passes(ranks, wrong, expected, change):
    found = faults(wrong, ranks)
    assert len(found) == 1, found
    assert [part for part in expected if part not in found[0]] == []
    assert faults(wrong | change, ranks) == []


def test_faults_of_all_kinds_are_told_together():
    wrong = {TP: 3, FLAVOR: "9b", STEPS: 9, DATASET: "c4", LOAD_STEP: 3, SAVE: True}
    found = faults(wrong, ranks=4)
    expected = ["tensor_parallel_degree = 3", FLAVOR, f"{WARMUP} = 200", DATASET, LOAD_STEP]
    assert [part for part in expected if not any(part in line for line in found)] == []
    assert len(found) == len(expected)


def test_every_check_comes_after_those_that_it_needs():
    names = [each.name for each in CHECKS]
    assert len(set(names)) == len(names)
    for number, each in enumerate(CHECKS):
        assert set(each.needs) <= set(names[:number]), each.name


def test_more_ranks_than_gpus_are_refused_where_there_are_gpus(monkeypatch):
    assert faults({}, ranks=3, local_ranks=3) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert faults({}, ranks=3, local_ranks=3) == ["  NGPU = 3: this machine has 2 visible GPUs"]
    assert faults({}, ranks=4, local_ranks=2) == []


@pytest.mark.parametrize(("key", "value", "off"), [(SNAPSHOT, True, False), (RECORD, 2000, 0), (OFFLOAD, True, False)])
def test_what_only_cuda_can_do_is_refused_without_it_as_an_option_but_not_in_a_file(monkeypatch, key, value, off):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (fault,) = faults({key: value}, layer=OPTION)
    assert f"{key} = {str(value).lower()} (option): has no effect unless the machine has a GPU" in fault
    assert faults({key: off}, layer=OPTION) == faults({key: value}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert faults({key: value}, layer=OPTION) == []


def test_what_only_several_ranks_can_do_is_refused_on_one_as_an_option_but_not_in_a_file():
    keys = {"parallelism.fsdp_prefetch": 2}
    assert "has no effect unless the run has more than one rank" in faults(keys, layer=OPTION)[0]
    assert faults(keys) == faults(keys, ranks=2, layer=OPTION) == []


def test_reductions_that_wait_are_refused_without_accumulation_as_an_option_but_not_in_a_file():
    keys = {LAST: False, LOCAL: 2}
    assert f"{LAST} = false (option): has no effect unless a step has more" in faults(keys, 2, layer=OPTION)[0]
    assert faults(keys, 2) == faults(keys | {GLOBAL: 8}, 2, layer=OPTION) == []


def test_a_folder_of_snapshots_is_inside_the_run_where_there_are_any(monkeypatch):
    assert "has no effect unless" in faults({SNAPSHOTS: ".."})[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (fault,) = faults({SNAPSHOTS: "..", SNAPSHOT: True})
    assert f'{SNAPSHOTS} = ".."' in fault and "inside job.dump_folder" in fault


def test_overlapped_tensor_parallelism_needs_a_group_the_compiler_and_cuda(monkeypatch):
    right = {OVERLAP: True, TP: 2, COMPILE: True}
    for change, condition in (
        ({TP: 1}, f"{TP} > 1"),
        ({COMPILE: False}, f"{COMPILE} = true"),
        ({PARTS: ["loss"]}, f'{PARTS} has "model"'),
        ({BACKEND: "aot_eager"}, f'{BACKEND} = "inductor"'),
    ):
        (fault,) = faults(right | change, ranks=(right | change)[TP])
        assert f"{OVERLAP} = true: has no effect unless {condition}" in fault
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (fault,) = faults(right, ranks=2, layer=OPTION)
    assert f"{OVERLAP} = true (option): has no effect unless the machine has a GPU" in fault
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert faults(right, ranks=2, layer=OPTION) == []


def test_without_a_mesh_for_each_parameter_split_experts_are_not_compiled_and_not_checkpointed_by_operation(monkeypatch):
    """As in PyTorch 2.11; test_expert_parallel.py trains so."""
    compiled, kept = {COMPILE: True, BACKEND: "aot_eager"}, {AC: "selective", BLOCKS: "op"}
    for keys in (compiled, kept):
        assert faults(MIXTURE | {EP: 2} | keys, ranks=2) == []
    monkeypatch.setattr(fsdp, "MESH_PER_PARAMETER", False)
    (fault,) = faults(MIXTURE | {EP: 2} | compiled, ranks=2)
    assert f"{EP} = 2: with {COMPILE} = true, needs PyTorch 2.13" in fault
    (fault,) = faults(MIXTURE | {EP: 2} | kept, ranks=2)
    assert f'{EP} = 2: with {BLOCKS} = "op", needs PyTorch 2.13' in fault
    for keys in ({}, {AC: "full"}, {AC: "selective", BLOCKS: 2}, compiled | {PARTS: ["loss"]}):
        assert faults(MIXTURE | {EP: 2} | keys, ranks=2) == []
    assert faults(MIXTURE | compiled, ranks=2) == faults(MIXTURE | kept, ranks=2) == []


def test_pinned_memory_is_refused_where_there_is_no_gpu_to_copy_from(monkeypatch):
    keys = {SAVE: True, MODE: "async_with_pinned_mem"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (fault,) = faults(keys)
    assert f'{MODE} = "async_with_pinned_mem": only copies from a GPU' in fault and 'use "async"' in fault
    assert faults(keys | {MODE: "async"}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert faults(keys) == []


def test_a_disk_without_room_for_checkpoints_is_refused_if_any_are_written(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 0))
    (fault,) = faults({SAVE: True, DUMP: "empty/run"}, local_ranks=1)
    assert 'checkpoint.folder = "checkpoint": ' in fault and "has 0.00 GiB free, and 2 checkpoints of this run need" in fault
    assert faults({DUMP: "empty/run"}, local_ranks=1) == []
    assert faults({SAVE: True, DUMP: "empty/run"}) == []  # checked on another machine than the one that will train


def test_a_checkpoint_folder_without_permission_is_refused(monkeypatch, place):
    saves = place / "saves/checkpoint"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).absolute() != saves)
    (fault,) = faults({SAVE: True, DUMP: "saves"})
    assert 'checkpoint.folder = "checkpoint": ' in fault and "/checkpoint: no permission to write in it" in fault


def test_a_folder_without_permission_is_refused(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind root, who may run these tests
    (fault,) = faults({DUMP: "empty/run"})
    assert 'job.dump_folder = "empty/run": ' in fault and "/empty: no permission to write in it" in fault


@pytest.mark.parametrize(
    ("table", "without", "entry", "expected"),
    [
        ("sharding", "layers.*.ffn.w2", {}, "sharding: no pattern matches layers.*.ffn.w2"),
        ("sharding", None, {"layers.*.ffn.w9": "row"}, "sharding: the pattern 'layers.*.ffn.w9' matches nothing"),
        ("sharding", "head.norm", {"head.norm": "rows"}, "sharding: head.norm has the unknown style 'rows'"),
        ("initial", "*", {"[!h]*": None}, "initial: no pattern matches head.output.weight"),
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


def test_a_models_flops_that_raise_are_found_before_training(monkeypatch):
    def flops(cfg: tiny.Config, seq_len: int) -> None:
        raise ZeroDivisionError(f"no heads at {seq_len}")

    monkeypatch.setattr(tiny, "flops", flops)
    (fault,) = faults({NAME: "tests.tiny", FLAVOR: "plain", TOKENIZER: "fits"})
    assert "its code failed" in fault and "no heads at" in fault


@pytest.mark.parametrize(("recipe", "ranks"), [("llama_debug", 1), ("llama_debug", 2)])
def test_the_recipes_pass(recipe, ranks):
    root = Path(__file__).parents[2]
    path = root / "train_configs" / f"{recipe}.toml"
    check(read_config(path, []), str(path), ranks)


def test_inductor_without_a_c_compiler_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compile, "has_compiler", lambda: False)
    (fault,) = faults({COMPILE: True})
    assert 'compile.backend = "inductor": needs a C++ compiler' in fault
    monkeypatch.setattr(compile, "has_compiler", lambda: True)
    assert faults({COMPILE: True}) == []


def test_float16_and_offload_are_refused_together(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (fault,) = faults({PRECISION: "float16", OFFLOAD: True})
    assert "parallelism.cpu_offload = true" in fault and PRECISION in fault
