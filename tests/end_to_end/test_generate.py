"""Text from checkpoints: every family generates the text of transformers, on any mesh, by the command and during training."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.attention import Cache
from tests.end_to_end.forked import Done, prepare, titanlite, train
from tests.end_to_end.test_oracle import MODELS, OF_EACH_FAMILY, both_models, give
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


@pytest.mark.parametrize(
    ("name", "flavor"),
    # test_oracle.py has the logits of all
    [each if each in OF_EACH_FAMILY else pytest.param(*each, marks=pytest.mark.slow) for each in MODELS],
)
def test_greedy_text_equals_transformers_beyond_the_window_and_the_first_growth_of_the_cache(name, flavor, monkeypatch):
    monkeypatch.setattr(Cache, "_STEP", 16)
    ours, theirs = restless_models(name, flavor)
    found = generate(ours, PROMPTS, 40, (), Sampling(temperature=0))
    for prompt, new in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert new == expected[0, len(prompt) :].tolist()
    assert len({tuple(new) for new in found}) == len(PROMPTS)
    assert all(len(set(new)) > 3 for new in found), "a text that repeats itself compares little"


GREEDY = ("--max-new-tokens", "40", "--temperature", "0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run with dimensions of its own."""
    folder = tmp_path_factory.mktemp("trained")
    dimensions = {"overrides": {"window": 5, "ffn_dim": 80, "n_layers": 3}}
    prepare(folder, "tests.tiny_gemma3", model=dimensions, checkpoint={"enable": True, "interval": 10})
    ended = train("run.toml", folder=folder)
    assert ended.code == 0, ended.err
    return folder


def command(folder: Path, *words: str, name: str = "generate") -> Done:
    return titanlite(name, *words, "--model", "tests.tiny_gemma3", folder=folder)


def exported(folder: Path, source: str) -> tuple[nn.Module, dict[str, str]]:
    """transformers' model of the export of a run, and its text from some prompts."""
    ended = command(folder, "--checkpoint", source, "--output", "export", name="export-hf")
    assert ended.code == 0, ended.err
    model, tokenizer = (kind.from_pretrained(folder / "export") for kind in (AutoModelForCausalLM, AutoTokenizer))
    texts = {}
    for prompt in ("two four six", "one"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        texts[prompt] = tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0])
    return model, texts


def test_a_run_with_other_dimensions_generates_the_text_of_transformers_on_two_ranks_and_from_its_export(trained, tmp_path):
    model, texts = exported(tmp_path, str(trained / "out"))
    assert (model.config.num_hidden_layers, model.config.sliding_window, model.config.intermediate_size) == (3, 5, 80)
    prompts = [word for prompt in texts for word in ("--prompt", prompt)]
    split = command(tmp_path, "--checkpoint", str(trained / "out"), *prompts, *GREEDY, "--dtype", "float32", "--tp", "2")
    assert split.code == 0, split.err
    assert split.out == "".join(f"{text}\n\n" for text in texts.values())
    (first, *_) = texts
    assert command(tmp_path, "--checkpoint", "export", "--prompt", first, *GREEDY).out == f"{texts[first]}\n"


@pytest.mark.slow  # the test above without adapters
def test_a_run_of_adapters_generates_the_text_of_transformers(trained, tmp_path):
    shutil.copy(trained / "data.txt", tmp_path)
    shutil.copy(trained / "run.toml", tmp_path)
    base = trained / "out/checkpoint/step-00000010"
    adapters = ["--lora.enable", "true", "--lora.rank", "4", "--checkpoint.initial_load_path", str(base)]
    ended = train("run.toml", *adapters, folder=tmp_path)
    assert ended.code == 0, ended.err
    _, texts = exported(tmp_path, "out")
    for prompt, text in texts.items():
        assert command(tmp_path, "--checkpoint", "out", "--prompt", prompt, *GREEDY, "--dtype", "float32").out == f"{text}\n"


def test_a_damaged_checkpoint_is_refused(trained, tmp_path):
    copy = tmp_path / "step-00000010"
    shutil.copytree(trained / "out/checkpoint/step-00000010", copy)
    data = copy / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    ended = command(trained, "--checkpoint", str(copy), "--prompt", "a")
    assert ended.code == 2 and "is damaged" in ended.err, ended.err
