"""An MoE model as a user runs it: a dense model becomes one, trains with split experts, and is exported.

tests/distributed compares every family with one process, test_oracle.py and test_generate.py with transformers.
"""

import pytest

from tests import hf_folders
from tests.campaigns import trajectory
from tests.end_to_end.forked import prepare, titanlite, train
from tests.end_to_end.test_run_train import undocumented
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.registry.family import load_family
from titanlite.transforms.meta import on_meta

SPLIT = ("--parallelism.expert_parallel_degree", "2")


@pytest.mark.slow  # the docstring names what `make test` has
def test_an_upcycled_model_trains_with_split_experts_as_on_one_process_and_is_exported(tmp_path):
    source = hf_folders.write(tmp_path / "source", "tests.tiny", "plain")
    made = titanlite("import-hf", "--source", source, "--output", "weights", "--upcycle-experts", "4", folder=tmp_path)
    assert made.code == 0, made.err
    section = made.out[made.out.index("[model]") :]
    prepare(tmp_path, more=section, training={"global_batch_size": 8}, moe={"balance_loss": 0.01})
    for name, ranks, degrees in (("one", 1, ()), ("split", 2, (*SPLIT, "--checkpoint.last_save_in_hf", "true"))):
        ended = train("run.toml", "--job.dump_folder", name, *degrees, folder=tmp_path, ranks=ranks)
        assert ended.code == 0, ended.err
        assert f"weights read from {tmp_path / 'weights'}" in ended.err
    one, split = ([step.loss for step in trajectory(tmp_path / name).values()] for name in ("one", "split"))
    assert split == pytest.approx(one, rel=1e-5) and one[-1] < 0.9 * one[0]
    last = hf_folders.tensors_of(next((tmp_path / "split/checkpoint").glob("step-*-hf")))
    assert any("experts.3." in name for name in last) and all(tensor.isfinite().all() for tensor in last.values())
    assert "expert_rank_load" in (tmp_path / "split/metrics.jsonl").read_text() and undocumented(tmp_path / "split") == []
    estimates = [
        titanlite("estimate", "run.toml", "--ranks", "2", *SPLIT, "--routing", routing, folder=tmp_path).out
        for routing in ("balanced", "worst")
    ]
    assert all("GiB" in text for text in estimates) and estimates[0] != estimates[1]


def test_adapters_of_experts_are_refused_and_those_of_attention_are_not():
    family = load_family("tests.tiny_deepseek_v3", "plain")
    with pytest.raises(UserError, match=r"lora.*layers\.\*\.ffn\.experts"):
        on_meta(family, Config.model_validate({"lora": {"enable": True}}))
    on_meta(family, Config.model_validate({"lora": {"enable": True, "modules": ["layers.*.attention.*"]}}))
