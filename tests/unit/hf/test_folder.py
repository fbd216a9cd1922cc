"""Folders are read bit for bit, and faults are reported by name before any tensor is read."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import models
from models import gemma3, llama3, qwen3, qwen3_moe
from tests import tiny
from tests.hf_folders import NORM, change, of_files, read, remove, replace, tensors_of
from titanlite.config.read import read_config
from titanlite.ground.errors import UserError
from titanlite.hf import folder as folders
from titanlite.loop.checks import check
from titanlite.registry.family import family_of, load_family
from titanlite.tools.open_model import recognize
from titanlite.verify.facts import stored_tensors_of

# ------------------------------------------------------------------------------------------------------------- recognizing


def describe(folder: Path, config: llama3.Config, **changes) -> Path:
    values = llama3.to_hf(config) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


def test_published_sizes_are_recognized_by_their_dimensions_and_others_are_the_flavor_hf(tmp_path):
    for flavor, published in llama3.FLAVORS.items():
        found = recognize(describe(tmp_path, published))
        assert found[:2] == ("llama3", flavor) and found.family.config == published
    config = dataclasses.replace(llama3.FLAVORS["1b"], n_layers=3)
    assert recognize(describe(tmp_path, config))[:2] == ("llama3", "hf")
    assert load_family("llama3", "hf", str(tmp_path)).config == config


@pytest.mark.parametrize(
    ("module", "flavor", "keys"),
    [
        (qwen3, "2.5-0.5b", {"use_mrope": False, "sliding_window": 32768, "max_window_layers": 24}),  # all base models
        (gemma3, "2-9b", {"sliding_window_size": 4096, "cache_implementation": "hybrid"}),
        (llama3, "1b", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),  # SmolLM 2
        (qwen3_moe, "30b-a3b", {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),  # Qwen3-Coder
    ],
)
def test_keys_of_published_files_that_change_nothing_are_read(tmp_path, module, flavor, keys):
    (tmp_path / "config.json").write_text(json.dumps(module.to_hf(module.FLAVORS[flavor]) | keys))
    assert recognize(tmp_path)[:2] == (module.__name__.removeprefix("models."), flavor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral"}, r"no family of models/ \(deepseek_v3: .*\) reads model_type .*--model"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "reads model_type 'gemma3'; .*save the text model of its text_config, a gemma3_text, alone",
        ),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, "reads model_type 'llama4'; [^;]*$"),
        ({"hidden_size": ...}, "config.json: has no 'hidden_size', which models.llama3 needs"),
    ],
)
def test_a_model_that_no_family_has_is_refused(tmp_path, config, message):
    describe(tmp_path, llama3.FLAVORS["1b"], **config)
    with pytest.raises(UserError, match=message):
        recognize(tmp_path)


def test_a_file_of_models_that_is_no_family_is_none(tmp_path, monkeypatch):
    """Such as layers that two forks share: import-hf had refused every folder, since it lacks Config."""
    (tmp_path / "shared_layers.py").write_text("raise SystemExit")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert recognize(describe(tmp_path, llama3.FLAVORS["1b"])).name == "llama3"


def test_a_broken_family_is_named_only_where_no_other_reads_the_type(tmp_path, monkeypatch):
    """It had stopped every command on a folder, and a distillation run that continues, which never named it."""
    for name, text in {"mine_typo": "FLAVORS = {", "mine_begun": "FLAVORS, HF_TYPES = {}, ('llama',)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    assert recognize(describe(tmp_path, llama3.FLAVORS["1b"])).name == "llama3"
    with pytest.raises(UserError, match=r"reads model_type 'mistral'; .*mine_begun.* lacks Config") as refused:
        recognize(describe(tmp_path, llama3.FLAVORS["1b"], model_type="mistral"))
    assert "models.mine_typo failed" in str(refused.value) and str(refused.value).endswith("; name one with --model")


def test_two_families_that_read_the_same_type_require_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlite.registry.family.family_names", lambda: ["llama3", "tests.tiny"])
    with pytest.raises(UserError, match="--model"):
        recognize(describe(tmp_path, llama3.FLAVORS["1b"]))


def test_the_flavor_hf_needs_assets_and_its_name_is_reserved(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"model\.flavor"):
        load_family("llama3", "hf")
    with pytest.raises(UserError, match=r"config.json: is missing"):
        load_family("llama3", "hf", str(tmp_path))
    monkeypatch.setitem(tiny.FLAVORS, "hf", tiny.FLAVORS["plain"])
    with pytest.raises(UserError, match='rename its flavor "hf"'):
        load_family("tests.tiny", "plain")


# ----------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_parameter_is_the_tensor_of_the_file(sources, monkeypatch, dtype):
    """tests/distributed/test_hf.py reads every family."""
    monkeypatch.setattr("titanlite.hf.load._CHUNK", 1000)  # several reads per tensor, the last one shorter
    folder = sources("tests.tiny", "plain", dtype)
    stored, module = tensors_of(folder), load_family("tests.tiny", "plain").module
    for ours, parameter in stored_tensors_of(read(folder, "tests.tiny", "plain")).items():
        found = of_files(module, ours, parameter, stored)
        assert found.dtype == dtype and torch.equal(parameter, found.float()), ours


def test_experts_that_are_missing_or_have_wrong_shapes_are_named_individually(sources, tmp_path):
    folder = shutil.copytree(sources("tests.tiny_qwen3_moe", "plain"), tmp_path / "mixture")
    gone, odd = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (3, 5))
    remove(gone)(folder)
    replace(odd, lambda t: t[:-1].clone())(folder)
    with pytest.raises(UserError) as raised:
        read(folder, "tests.tiny_qwen3_moe", "plain")
    assert f"{gone} (model.layers.1.ffn.experts.w3): is missing" in str(raised.value)
    assert f"{odd} (model.layers.1.ffn.experts.w3): (31, 64) in " in str(raised.value)
    assert "(32, 64) in the model" in str(raised.value)


def put(name: str) -> Callable[[Path], object]:
    """A function that adds a tensor to a file, but not to the index."""
    return lambda folder: change(folder, NORM, lambda tensors: tensors.update({name: torch.zeros(2)}))


QUERY = "model.layers.1.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "not where the index says": (lambda folder: change(folder, NORM, lambda file: file.pop(NORM)), f"{NORM} .*: is missing$"),
    "in two files": (put(QUERY), f"{QUERY}: in model-.* and in model-.*"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_folder_are_named_before_any_tensor_is_read(source, monkeypatch, fault):
    read(source, "tests.tiny", "plain")  # valid before the damage
    damage, message = FAULTS[fault]
    damage(source)
    monkeypatch.setattr("titanlite.hf.load._slice", None)
    with pytest.raises(UserError, match=message):
        read(source, "tests.tiny", "plain")


def test_missing_misshaped_and_unknown_tensors_are_reported_together_before_any_is_read(source, monkeypatch):
    monkeypatch.setattr("titanlite.hf.load._slice", None)
    for damage in (put("extra"), remove(QUERY, NORM), replace("lm_head.weight", lambda t: t[:5].clone())):
        damage(source)
    with pytest.raises(UserError) as raised:
        read(source, "tests.tiny", "plain")
    message = str(raised.value)
    assert f"{QUERY} (model.layers.1.attention.wq.weight): is missing" in message
    assert message.count("is missing") == 2 and "extra: in model-" in message
    assert "lm_head.weight (model.head.output.weight): (5, 64)" in message


def test_pickles_are_never_read(source):
    shutil.rmtree(source)
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        read(source, "tests.tiny", "plain")


def test_a_tied_head_that_is_stored_too_must_equal_the_embedding(sources, tmp_path):
    tensors = tensors_of(sources("tests.tiny", "tied"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, describe(tmp_path, tiny.FLAVORS["tied"]) / folders.SINGLE)
    assert torch.equal(read(tmp_path, "tests.tiny", "tied").head.output.weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / folders.SINGLE)
    with pytest.raises(UserError, match=r"model\.embed_tokens"):
        read(tmp_path, "tests.tiny", "tied")


def test_excluded_tensors_may_be_missing_and_a_pattern_without_effect_is_reported(source):
    remove("lm_head.weight")(source)
    model = read(source, "tests.tiny", "plain", ["model.head.output.*"])
    assert model.head.output.weight.isnan().all() and not model.embed.weight.isnan().any()
    with pytest.raises(UserError, match=r"model\.haed"):
        read(source, "tests.tiny", "plain", ["model.haed.*"])


# -------------------------------------------------------------------------------------------------------------------- runs

FROM = {"checkpoint.enable": "true", "checkpoint.initial_load_path": "source"}
FROM_HF = FROM | {"checkpoint.initial_load_in_hf": "true"}
INTO_HF = {"checkpoint.enable": "true", "checkpoint.last_save_in_hf": "true"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (FROM, "not a checkpoint.* set checkpoint.initial_load_in_hf = true"),
        (FROM_HF | {"model.flavor": "scaled"}, r"scaled: rope_scaling = Llama3Scaling\(factor=8.0, .*\), there None"),
        (FROM_HF | {"model.overrides.dim": "128"}, r"\(model\.embed\.weight\): \(\d+, 64\) in "),
        (FROM_HF | {"checkpoint.initial_load_model_only": "false"}, "initial_load_in_hf = true: a folder in Hugging"),
        (INTO_HF | {"model.name": "tests.tiny_dropout"}, "last_save_in_hf = true: tests.tiny_dropout: lacks HF, HF_TYPES"),
        (
            INTO_HF | {"model.name": "tests.tiny_gemma3", "model.overrides.attention_softcap": "30.0"},
            "last_save_in_hf = true: tests.tiny_gemma3: .*attention_softcap",
        ),
        (INTO_HF | {"model.overrides.n_heads": "12"}, "last_save_in_hf = true: tests.tiny: .*: dim = 64: Hugging Face's Llama"),
    ],
)
def test_a_run_that_cannot_start_from_a_folder_or_end_with_one_is_refused_by_its_key(source, monkeypatch, keys, message):
    monkeypatch.chdir(source.parent)
    Path("data.txt").write_text("some text")
    start = {"model.name": "tests.tiny", "model.flavor": "plain", "model.hf_assets_path": "source"}
    options = {"training.dataset": "data.txt"} | start | keys
    with pytest.raises(UserError, match=f"(?s){message}"):
        check(read_config(None, [f"--{key}={value}" for key, value in options.items()]), "run.toml", 1)


def test_a_dimension_that_overrides_name_may_differ_from_that_of_the_weights(source, monkeypatch):
    """As where a published model is trained on longer texts."""
    monkeypatch.chdir(source.parent)
    Path("data.txt").write_text("some text")
    yarn = '{ rope_type = "yarn", factor = 4.0, original_max_positions = 64 }'
    start = {
        "model.name": "tests.tiny",
        "model.flavor": "plain",
        "model.hf_assets_path": "source",
        "model.overrides.rope_scaling": yarn,
    }
    options = {"training.dataset": "data.txt"} | start | FROM_HF
    config = read_config(None, [f"--{key}={value}" for key, value in options.items()])
    check(config, "run.toml", 1)
    assert list(folders.differences(family_of(config.model), source)) == ["rope_scaling"]
