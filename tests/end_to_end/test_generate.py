"""Text from checkpoints: every family generates the text of transformers, on any mesh, by the command and during training."""

import importlib
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.attention import Cache
from tests.end_to_end.forked import Done, prepare, titanlite, train
from tests.end_to_end.test_oracle import MODELS, both_models, give
from tests.repetitions import slow_but
from titanlite.inference.generate import Sampling, generate

PROMPTS = [[5], list(range(100, 123)), [7, 8, 9, 400]]


def restless_models(name: str, flavor: str) -> tuple[nn.Module, nn.Module]:
    """Both models with layers so large that they do not repeat the last token, as models with tied embeddings would."""
    ours, theirs = both_models(name, flavor)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            if key.endswith(("attention.wo.weight", "ffn.w2.weight", "experts.w2")):
                parameter *= 10
            elif key.endswith("post_norm.weight"):
                parameter += 10
            elif key.endswith("experts.w1") and "gpt_oss" in name:
                parameter *= 4  # a gate near 0 passes little
    give(dict(ours.named_parameters()), importlib.import_module(name), theirs)
    return ours, theirs


# the first flavor of each family is in `make test`; test_oracle.py has the logits of all
_FEW = {name: (name, flavor) for name, flavor in reversed(MODELS)}.values()


@pytest.mark.parametrize(
    ("name", "flavor"), [each if each in _FEW else pytest.param(*each, marks=pytest.mark.slow) for each in MODELS]
)
def test_greedy_text_equals_transformers_beyond_the_window_and_the_first_growth_of_the_cache(name, flavor, monkeypatch):
    monkeypatch.setattr(Cache, "_STEP", 16)
    ours, theirs = restless_models(name, flavor)
    found = generate(ours, PROMPTS, 40, None, Sampling(temperature=0))
    for prompt, new in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert new == expected[0, len(prompt) :].tolist()
    assert len({tuple(new) for new in found}) == len(PROMPTS)
    assert all(len(set(new)) > 3 for new in found), "a text that repeats itself compares little"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    prepare(folder, "tests.tiny_gemma3", training={"steps": 30}, checkpoint={"enable": True, "interval": 15})
    ended = train("run.toml", folder=folder)
    assert ended.code == 0, ended.err
    return folder


def command(folder: Path, *words: str, name: str = "generate") -> Done:
    return titanlite(name, *words, "--model", "tests.tiny_gemma3", folder=folder)


def test_the_command_continues_several_prompts_with_the_same_text_on_two_ranks(trained):
    words = [
        "--checkpoint",
        "out",
        "--prompt",
        "one two three",
        "--prompt",
        "six",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
    ]
    alone = command(trained, *words)
    assert alone.code == 0, alone.err
    assert re.fullmatch(r"one two three(.+)\n\nsix(.+)\n\n", alone.out, re.DOTALL), alone.out
    assert command(trained, *words, "--tp", "2").out == alone.out
    earlier = command(trained, "--checkpoint", "out/checkpoint/step-00000015", *words[2:])
    assert earlier.code == 0 and earlier.out != alone.out


@pytest.mark.parametrize("kind", slow_but(["weights"], ["weights", "adapters", "overrides"]))
def test_the_export_generates_the_same_text_in_transformers(trained, tmp_path, kind):
    source, adapters = trained / "out", kind == "adapters"
    if kind != "weights":
        shutil.copy(trained / "data.txt", tmp_path)
        shutil.copy(trained / "run.toml", tmp_path)
        base = trained / "out" / "checkpoint" / "step-00000015"
        adapted = ["--lora.enable", "true", "--lora.rank", "4", "--checkpoint.initial_load_path", str(base)]
        options = adapted if adapters else ["--model.overrides", "{ window = 5, ffn_dim = 80, n_layers = 3 }"]
        ended = train("run.toml", *options, folder=tmp_path)
        assert ended.code == 0, ended.err
        source = tmp_path / "out"
    exported = command(tmp_path, "--checkpoint", str(source), "--output", "export", name="export-hf")
    assert exported.code == 0, exported.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    if kind == "overrides":
        assert (model.config.num_hidden_layers, model.config.sliding_window, model.config.intermediate_size) == (3, 5, 80)
        refused = train("run.toml", "--model.overrides", "{ window = 5, ffn_dim = 80 }", folder=tmp_path)
        assert refused.code == 2 and "n_layers = " in refused.err and "another architecture" in refused.err
        resumed = train("run.toml", *options, folder=tmp_path)
        assert resumed.code == 0 and "nothing to do" in resumed.err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    prompt = "two four six"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0])
    words = ["--checkpoint", str(source), "--prompt", prompt, "--max-new-tokens", "40", "--temperature", "0"]
    assert command(tmp_path, *words, "--dtype", "float32").out == expected + "\n"
    if not adapters:  # the folder itself, in its own dtype
        assert command(tmp_path, "export", *words[2:]).out == expected + "\n"


def test_a_damaged_checkpoint_is_refused_and_so_is_one_of_another_model(trained, tmp_path):
    copy = tmp_path / "step-00000030"
    shutil.copytree(trained / "out" / "checkpoint" / "step-00000030", copy)
    data = copy / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    ended = command(trained, "--checkpoint", str(copy), "--prompt", "a")
    assert ended.code == 2 and "is damaged" in ended.err, ended.err
