"""MoE models as a user runs them: each family is trained with split experts, exported, evaluated, generates text, is verified
and estimated, and refuses adapters of its experts; a dense model becomes an MoE model.
"""

import json
from pathlib import Path

import pytest

from tests import hf_folders
from tests.campaigns import trajectory
from tests.end_to_end import test_eval
from tests.end_to_end.forked import Done, prepare, titanlite, train
from tests.end_to_end.test_run_train import undocumented

FAMILIES = ("tests.tiny_qwen3_moe", "tests.tiny_deepseek_v3")  # with and without shared experts; test_oracle.py has all
pytestmark = pytest.mark.slow  # `make test` has split experts in tests/distributed, and the commands with dense models
SPLIT = ("--parallelism.expert_parallel_degree", "2")


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on two ranks that split the experts, and the family."""
    folder = tmp_path_factory.mktemp("mixture")
    default_tokenizer = {"overrides": {"vocab_size": 4096}}
    saved = {"enable": True, "interval": 10, "last_save_in_hf": True}
    prepare(folder, request.param, "plain", model=default_tokenizer, moe={"balance_loss": 0.01}, checkpoint=saved)
    ended = train("run.toml", *SPLIT, folder=folder, ranks=2)
    assert ended.code == 0, ended.err
    assert "expert_rank_load" in (folder / "out/metrics.jsonl").read_text()
    assert undocumented(folder / "out") == []
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


def test_an_upcycled_model_trains_with_split_experts_as_on_one_process(tmp_path):
    source = hf_folders.write(tmp_path / "source", "tests.tiny", "plain")
    made = titanlite("import-hf", "--source", source, "--output", "weights", "--upcycle-experts", "4", folder=tmp_path)
    assert made.code == 0, made.err
    section = made.out[made.out.index("[model]") :]
    prepare(tmp_path, more=section, training={"global_batch_size": 8}, moe={"balance_loss": 0.01})
    for name, ranks, degrees in (("one", 1, ()), ("split", 2, SPLIT)):
        ended = train("run.toml", "--job.dump_folder", name, *degrees, folder=tmp_path, ranks=ranks)
        assert ended.code == 0, ended.err
        assert f"weights read from {tmp_path / 'weights'}" in ended.err
    one, split = ([step.loss for step in trajectory(tmp_path / name).values()] for name in ("one", "split"))
    assert split == pytest.approx(one, rel=1e-5) and one[-1] < 0.9 * one[0]
