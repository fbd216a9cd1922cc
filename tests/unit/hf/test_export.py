"""An export equals the imported model bit for bit, and transformers and the safetensors library read it."""

import dataclasses
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests import tiny
from tests.hf_folders import CASES, NORM, assert_logits_agree, change_json, read, remove, replace, tensors_of, write
from titanlite.checkpoint import manifest
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.tokenizer import load_tokenizer
from titanlite.ground.errors import UserError
from titanlite.hf import export as exporting
from titanlite.hf import folder as folders
from titanlite.registry.description import read_description
from titanlite.registry.family import described, load_family
from titanlite.tools import export_hf
from titanlite.transforms.parameters import is_tied
from titanlite.verify.facts import logit_faults, shape_faults

CODE = "def f(x):\n        return 12345\n\n    x = 12<|endoftext|>"  # families' own tokenizers split it otherwise


class Exported(NamedTuple):
    name: str
    flavor: str
    dtype: torch.dtype
    source: Path
    folder: Path


def export(source: Path, *words, **keys) -> list[Path]:
    """An export whose command names the model's module, as in the checkpoint."""
    return exporting.export(source, *words, **keys, named=manifest.read(source).numbers["config"]["model"]["name"])


@pytest.fixture(scope="module", params=enumerate(CASES), ids=lambda numbered: "-".join(numbered[1]))
def exported(request, sources, imported, tmp_path_factory) -> Exported:
    """Each family as an export in several files, every second one in bfloat16.

    Its config.json was read with every key that transformers knows. Its tokenizer is that of README: GPT-2's folder names
    neither the class nor the end of texts.
    """
    number, (name, flavor) = request.param
    dtype, folder = (torch.float32, torch.bfloat16)[number % 2], tmp_path_factory.mktemp("export")
    family = load_family(name, flavor)
    source = shutil.copytree(sources(name, flavor, dtype), folder / "source")
    theirs = AutoConfig.for_model(**family.module.to_hf(family.config), eos_token_id=0, pad_token_id=None).to_dict()
    (source / "config.json").write_text(json.dumps(theirs))
    train_tokenizer([CODE] * 9).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"model_max_length": 1024, "eos_token": null}')
    export(imported(name, flavor, dtype), folder / "out", shard_bytes=100_000, assets=str(source))
    return Exported(name, flavor, dtype, source, folder / "out")


def test_import_and_export_return_every_tensor_bit_for_bit(exported):
    before, after = tensors_of(exported.source), tensors_of(exported.folder)
    sizes = [[t.nbytes for t in load_file(file).values()] for file in sorted(exported.folder.glob("*.safetensors"))]
    assert len(sizes) > 1 and all(len(held) == 1 or sum(held) <= 100_000 for held in sizes)
    assert all(sum(one) + sum(other) > 100_000 for one, other in itertools.pairwise(sizes)), "one file would do"
    assert after.keys() == before.keys()
    assert all(after[key].dtype == exported.dtype and torch.equal(after[key], before[key]) for key in before)
    index = json.loads((exported.folder / folders.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * exported.dtype.itemsize for t in before.values())


def test_transformers_loads_the_export_unchanged_and_gives_our_logits(exported):
    theirs = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32)
    ours = read(exported.folder, exported.name, exported.flavor)
    assert_logits_agree(ours, theirs, load_family(exported.name, exported.flavor).config.vocab_size)


def test_config_json_of_the_export_describes_the_model_with_the_ids_of_the_source(exported):
    family, theirs = load_family(exported.name, exported.flavor), json.loads((exported.source / "config.json").read_text())
    written, ids = json.loads((exported.folder / "config.json").read_text()), ("bos_token_id", "eos_token_id", "pad_token_id")
    assert theirs["pad_token_id"] is None and {key: written[key] for key in ids} == {key: theirs[key] for key in ids}
    assert described(family.module, read_description(exported.folder)) == family.config  # also with its older name
    assert "rope_parameters" not in written  # transformers 4 and older servers read rope_theta and rope_scaling alone


def test_transformers_reads_the_tokenizer_of_the_export_as_the_run_did(exported, tmp_path):
    ids = load_tokenizer(str(exported.source)).encode(CODE)
    described = json.loads((exported.folder / "config.json").read_text())
    readers = [AutoTokenizer.from_pretrained(exported.folder), PreTrainedTokenizerFast.from_pretrained(exported.folder)]
    if described["model_type"] == "qwen2":  # takes Qwen's rules whatever the files say: a warning and the guide say what helps
        assert readers[0](CODE)["input_ids"] != ids, "transformers has changed: the warning is no longer needed"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(exported.folder / name, tmp_path)
        readers[0] = AutoTokenizer.from_pretrained(tmp_path)
    for theirs in readers:
        assert (theirs(CODE)["input_ids"], theirs.eos_token, theirs.model_max_length) == (ids, "<|endoftext|>", 1024)


@pytest.mark.parametrize("qwens", [True, False])
def test_a_warning_names_the_tokenizer_of_a_qwen2_that_transformers_reads_otherwise(imported, source, caplog, tmp_path, qwens):
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if qwens:
        split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.save(str(source / "tokenizer.json"))
    export(imported("tests.tiny_qwen3", "biased"), tmp_path / "out", assets=str(source))
    assert ("PreTrainedTokenizerFast.from_pretrained" in caplog.text) != qwens
    caplog.clear()
    export(imported("tests.tiny_qwen3", "tied"), tmp_path / "other", assets=str(source))
    assert "PreTrainedTokenizerFast" not in caplog.text


def test_a_source_in_older_spelling_or_of_another_architecture_exports_what_is_read_again(pools, monkeypatch, tmp_path):
    """Keys that were copied from beside the tokenizer came twice, in an older and a newer spelling."""
    case = "tests.tiny_gemma3", "plain"
    family, source = load_family(*case), write(tmp_path / "source", *case)
    c, older = family.config, {"rope_type": "linear", "factor": family.config.rope_factor}
    older = {"rope_scaling": older, "rope_theta": c.rope_theta, "rope_local_base_freq": c.local_rope_theta}
    change_json(source / "config.json", rope_parameters=None, **older)
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model=case[0])
    export(tmp_path / "weights", tmp_path / "again")
    assert c.rope_factor > 1 and described(family.module, read_description(tmp_path / "again")) == c
    (source / "config.json").write_text('{"model_type": "unknown", "sliding_window_pattern": "LLLG", "eos_token_id": 3}')
    read_manifest = manifest.read
    monkeypatch.setattr(
        manifest, "read", lambda folder: _with(read_manifest(folder), model={"name": case[0], "flavor": case[1]})
    )
    export(tmp_path / "weights", tmp_path / "beside", assets=str(source))
    assert described(family.module, read_description(tmp_path / "beside")) == c
    written = json.loads((tmp_path / "beside/config.json").read_text())
    ids = {key: value for key, value in written.items() if key.endswith("_token_id")}
    assert ids == {"bos_token_id": None, "eos_token_id": [3, 0], "pad_token_id": None}  # not transformers' default, 0 for Gemma


def test_the_export_of_a_fork_that_ties_by_itself_has_the_tensor_of_each_name(pools, tmp_path):
    """config.json says that nothing is tied, so that transformers drew a head at random."""
    case = "tests.forks.tied_by_itself", "plain"
    remove("lm_head.weight")(write(tmp_path / "source", *case))
    pools[1].run("tests.hf_folders:import_here", source=tmp_path / "source", output=tmp_path / "weights", model=case[0])
    export(tmp_path / "weights", tmp_path / "out")
    exported = tensors_of(tmp_path / "out")
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    assert_logits_agree(read(tmp_path / "out", *case), theirs, load_family(*case).config.vocab_size)
    assert shape_faults(load_family(*case)) == logit_faults(load_family(*case)) == []


def test_a_family_whose_tie_config_json_knows_has_the_tensors_of_transformers():
    family = load_family("tests.tiny", "tied")
    assert is_tied(family.on_meta())
    assert shape_faults(family) == logit_faults(family) == []


def test_the_export_and_its_config_json_have_the_requested_dtype(sources, imported, tmp_path):
    export(imported("tests.tiny", "plain"), tmp_path / "out", torch.bfloat16)
    before, after = tensors_of(sources("tests.tiny", "plain")), tensors_of(tmp_path / "out")
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_dtype_that_the_format_does_not_have_is_refused_before_the_checkpoint_is_read(monkeypatch, tmp_path, capsys):
    words = ["--checkpoint", str(tmp_path), "--output", str(tmp_path / "out"), "--dtype", "float64"]
    monkeypatch.setattr(sys, "argv", ["titanlite export-hf", *words])
    with pytest.raises((SystemExit, UserError)) as ended:
        export_hf.main()
    assert "float64" in str(ended.value) + capsys.readouterr().err


def test_values_beyond_float16_are_refused_by_name(pools, source, tmp_path):
    replace(NORM, lambda t: t + 7e4)(source)
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model="tests.tiny")
    with pytest.raises(UserError, match="has values beyond the largest"):
        export(tmp_path / "weights", tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()


def test_files_beside_the_runs_tokenizer_are_copied_and_its_ids_are_kept(pools, source, tmp_path):
    (source / "chat_template.jinja").write_text("{{ messages }}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "mine": 1}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "additional_chat_templates").mkdir()  # as transformers saves all but the default
    (source / "additional_chat_templates/rag.jinja").write_text("{{ documents }}")
    (source / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [0, 3]}')
    change_json(source / "config.json", eos_token_id=[0, 3], bos_token_id=7, max_position_embeddings=99)
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model="tests.tiny")
    export(tmp_path / "weights", tmp_path / "out")
    files = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json", "additional_chat_templates/rag.jinja")
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["max_position_embeddings"]) == ([0, 3], 7, 99)


@pytest.mark.parametrize(("named", "written"), [(3, [3, 0]), ([2, 3], [2, 3, 0]), ([0, 3], [0, 3]), (None, None)])
def test_a_served_export_ends_texts_where_the_run_does_too(imported, source, caplog, tmp_path, named, written):
    """Where a base model's tokenizer names the end of turns, as a warning on chats advises. transformers reads these files."""
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": named}))
    change_json(source / "config.json", eos_token_id=named)
    caplog.set_level("INFO")
    export(imported("tests.tiny", "plain"), tmp_path / "out", assets=str(source))
    assert caplog.text.count("eos_token_id gets <|endoftext|> too") == 2 * (written != named)
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == (written or 0)
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"temperature": 0.5, "eos_token_id": written}
    assert load_tokenizer(str(tmp_path / "out")).ends == load_tokenizer(str(source)).ends


def test_a_broken_generation_config_which_transformers_ignores_is_copied(imported, source, tmp_path):
    (source / "generation_config.json").write_text("version https://git-lfs.github.com/spec/v1")
    export(imported("tests.tiny", "plain"), tmp_path / "out", assets=str(source))
    assert (tmp_path / "out/generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == 0  # as in config.json


def test_a_context_that_a_run_has_made_longer_is_that_of_the_export(imported, sources, monkeypatch, caplog, tmp_path):
    """config.json of the pretrained model had limited what serves and evaluates the longer one. Where only its tokenizer is
    there, the context may be longer than that of the run, and a line says what is written.
    """
    read_manifest = manifest.read
    monkeypatch.setattr(manifest, "read", lambda folder: _with(read_manifest(folder), training={"seq_len": 4096}))
    export(imported("tests.tiny", "plain"), tmp_path / "out", assets=str(sources("tests.tiny", "plain")))
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 4096
    assert "max_position_embeddings" not in caplog.text
    (assets := tmp_path / "tokenizer").mkdir()
    shutil.copy(sources("tests.tiny", "plain") / "tokenizer.json", assets)
    export(imported("tests.tiny", "plain"), tmp_path / "again", assets=str(assets))
    (assets / "config.json").write_text('{"text_config": {"max_position_embeddings": 9}}')  # as Gemma 3's with vision
    export(imported("tests.tiny", "plain"), tmp_path / "nested", assets=str(assets))
    line = "max_position_embeddings = 4096, from training.seq_len: model.hf_assets_path has no config.json with"
    assert caplog.text.count(line) == 2


def _with(found: manifest.Manifest, **sections: object) -> manifest.Manifest:
    return found._replace(numbers=found.numbers | {"config": found.numbers["config"] | sections})


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_a_warning_says_where_the_exported_tokenizer_begins_texts_otherwise_than_the_run(
    imported, source, monkeypatch, caplog, tmp_path, add_bos
):
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": "<s>"}')
    read_manifest = manifest.read
    monkeypatch.setattr(manifest, "read", lambda folder: _with(read_manifest(folder), training={"add_bos": add_bos}))
    export(imported("tests.tiny", "plain"), tmp_path / "out", assets=str(source))
    assert ("run begin with <s>, and" in caplog.text and "set training.add_bos = true" in caplog.text) == bool(add_bos)
    assert bool(caplog.text) == bool(add_bos)


def test_leftovers_of_a_killed_export_are_removed_and_a_complete_one_is_kept(imported, tmp_path):
    (tmp_path / ".new.unfinished").mkdir()
    (tmp_path / ".new.unfinished/half.safetensors").touch()
    export(imported("tests.tiny", "plain"), tmp_path / "new")
    assert not (tmp_path / "new/half.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    with pytest.raises(UserError, match="new: already exists"):
        export(imported("tests.tiny", "plain"), tmp_path / "new")


def test_the_unfinished_work_of_tokenize_is_no_leftover_of_an_export(imported, tmp_path):
    (tmp_path / ".new.unfinished").mkdir()
    (tmp_path / ".new.unfinished/plan.json").touch()
    with pytest.raises(UserError, match="new: titanlite tokenize is not finished there"):
        export(imported("tests.tiny", "plain"), tmp_path / "new")
    assert (tmp_path / ".new.unfinished/plan.json").exists()


def test_a_family_that_has_changed_since_the_checkpoint_is_not_exported(imported, monkeypatch, tmp_path):
    checkpoint = imported("tests.tiny", "plain")  # other tests use it too
    monkeypatch.setitem(tiny.FLAVORS, "plain", dataclasses.replace(tiny.FLAVORS["plain"], rope_theta=7.0))
    with pytest.raises(UserError, match="plain has changed since it was saved"):
        export(checkpoint, tmp_path / "out")
