"""Mixtures of experts as a user runs them: each family is trained with split experts, exported, evaluated, continues text, is
verified and estimated, and refuses adapters of its experts; runs are killed and go on; a dense model becomes a mixture."""

import json
from pathlib import Path

import pytest

from tests import hf_folders
from tests.campaigns import trajectory
from tests.end_to_end import test_eval
from tests.end_to_end.forked import Done, titanlite, train

FAMILIES = ("tests.tiny_qwen3_moe", "tests.tiny_deepseek_v3")  # with and without shared experts; test_oracle.py has all
RUN = """
[job]
dump_folder = "out"
[model]
name = "{}"
flavor = "plain"
overrides = {{ vocab_size = 4096 }}  # of the default tokenizer
[training]
dataset = "data.txt"
steps = 10
seq_len = 32
local_batch_size = 4
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[moe]
balance_loss = 0.01
[checkpoint]
enable = true
interval = 10
last_save_in_hf = true
"""
pytestmark = pytest.mark.slow  # `make test` has split experts in tests/distributed, and the commands with dense models
SPLIT = ("--parallelism.expert_parallel_degree", "2")


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on two ranks that split the experts, and the family."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "data.txt").write_text("one two three four five six seven eight nine ten\n" * 300)
    (folder / "run.toml").write_text(RUN.format(request.param))
    ended = train("run.toml", *SPLIT, folder=folder, ranks=2)
    assert ended.code == 0, ended.err
    assert "expert_rank_load" in (folder / "out/metrics.jsonl").read_text()
    return folder, request.param


def command(trained: tuple[Path, str], *words: object, **variables: str) -> Done:
    folder, family = trained
    return titanlite(*words, "--model", family, folder=folder, **variables)


def test_answers_are_scored_as_by_transformers_model_of_the_export(trained):
    folder, _ = trained
    test_eval.write_tasks(folder)
    words = ["--checkpoint", "out", "--tasks", "choice,written", "--include-path", "tasks", "--output", "found.json"]
    ended = command(trained, "eval", *words, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "cache"))
    assert ended.code == 0, ended.err
    found = json.loads((folder / "found.json").read_text())["samples"]
    answers, _, written = test_eval.expected(folder / test_eval.EXPORT)
    for sample, expected in zip(found["choice"], answers, strict=True):
        assert [value for value, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-3)
    assert [sample["filtered_resps"][0] for sample in found["written"]] == written


def test_verify_compares_split_experts_and_estimate_predicts_them(trained):
    folder, _ = trained
    meshes = [word for mesh in ("1", "dp_shard=2,ep=2") for word in ("--mesh", mesh)]
    ended = titanlite("verify", "run.toml", "--steps", "2", *meshes, folder=folder)
    assert ended.code == 0, ended.err + ended.out
    estimated = [
        titanlite("estimate", "run.toml", "--ranks", "2", *SPLIT, "--routing", routing, folder=folder)
        for routing in ("balanced", "worst")
    ]
    assert [ended.code for ended in estimated] == [0, 0], estimated[0].err
    assert estimated[0].out != estimated[1].out


def test_adapters_of_experts_are_refused_and_those_of_attention_are_trained(trained):
    folder, _ = trained
    words = ["run.toml", "--job.dump_folder", "adapted", "--training.steps", "2", "--lora.enable", "true"]
    refused = train(*words, folder=folder)
    assert refused.code == 2 and "layers.*.attention.*" in refused.err, refused.err
    ended = train(*words, "--lora.modules", "layers.*.attention.*", "--checkpoint.last_save_in_hf", "false", folder=folder)
    assert ended.code == 0, ended.err


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "data.txt").write_text("".join(f"line {number} of {number * number}\n" for number in range(900)))
    (tmp_path / "run.toml").write_text(RUN.format(FAMILIES[0]))
    return tmp_path


def test_an_upcycled_model_trains_with_split_experts_as_on_one_process(folder):
    source = hf_folders.write(folder / "source", "tests.tiny", "plain")
    made = titanlite("import-hf", "--source", source, "--output", "weights", "--upcycle-experts", "4", folder=folder)
    assert made.code == 0, made.err
    section = made.out[made.out.index("[model]") :]
    before, after = RUN.partition("[model]")[0], RUN[RUN.index("[training]") : RUN.index("[checkpoint]")]
    (folder / "run.toml").write_text(before + after + section)
    words = ["run.toml", "--metrics.log_freq", "1", "--training.global_batch_size", "8"]
    for name, ranks, degrees in (("one", 1, ()), ("split", 2, SPLIT)):
        ended = train(*words, "--job.dump_folder", name, *degrees, folder=folder, ranks=ranks)
        assert ended.code == 0, ended.err
        assert f"weights read from {folder / 'weights'}" in ended.err
    one, split = ([step.loss for step in trajectory(folder / name).values()] for name in ("one", "split"))
    assert split == pytest.approx(one, rel=1e-5) and one[-1] < 0.9 * one[0]
