"""import-hf, export-hf and export-torch as a user runs them, and runs that start and end in Hugging Face's format."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import hf_folders
from tests.end_to_end import forked
from tests.end_to_end.forked import Done
from tests.hf_folders import tensors_of
from tests.waiting import PATIENCE
from titanlite.checkpoint.whole import Stored
from titanlite.data.sources import open_tokenizer
from titanlite.hf.export import items_of, write_file
from titanlite.hf.folder import their_names
from titanlite.registry.family import load_family

OWN = ("--model", "tests.tiny")
STILL = ("--optimizer.lr", "1e-20", "--optimizer.weight_decay", "0.0")  # weights do not change


def titanlite(*words: object, folder: Path, code: int = 0) -> Done:
    """A command that ends with this exit code; 2 means a message without traceback."""
    ended = forked.titanlite(*words, folder=folder, timeout=PATIENCE)
    assert ended.code == code, ended.out + ended.err
    assert "Traceback" not in ended.err
    return ended


def train(folder: Path, toml: str, *words: str, ranks: int = 1) -> Done:
    forked.prepare(folder, more=toml, training={"steps": 2, "local_batch_size": 2}, lr_scheduler={"warmup_steps": 0})
    return forked.train("run.toml", *words, folder=folder, ranks=ranks)


def fork(folder: Path, **values: object) -> Path:
    """A folder that no flavor of tests.tiny describes."""
    hf_folders.write(folder, "tests.tiny", "plain", torch.bfloat16)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    config.get("rope_parameters", {}).pop("rope_theta", None)
    path.write_text(json.dumps(config))
    return folder


def assert_logits_agree(folder: Path, flavor: str, checkpoint: Path, assets: str = "") -> None:
    """Those of transformers from an export, and ours from the checkpoint."""
    family, stored = load_family("tests.tiny", flavor, assets), Stored(checkpoint)
    model = family.module.Model(family.config)
    model.load_state_dict({name: stored.read(f"model.{name}") for name, _ in model.named_parameters()}, strict=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32
    hf_folders.assert_logits_agree(model, theirs, family.config.vocab_size)


def test_import_hf_prints_the_keys_of_a_run_whose_last_save_transformers_reads(tmp_path):
    source = fork(tmp_path / "source", rope_theta=1234.0)
    ended = titanlite(
        "import-hf", "--source", source, "--output", "weights", "--model", "tests.tiny", "--ranks", 2, folder=tmp_path
    )
    toml = ended.out[ended.out.index("[model]") :]
    assert 'flavor = "hf"' in toml
    begun = train(tmp_path, toml, "--checkpoint.last_save_in_hf", "true", *STILL, ranks=2)
    assert begun.code == 0, begun.err
    assert f"weights read from {tmp_path / 'weights'}" in begun.err
    checkpoint, output = tmp_path / "out/checkpoint/step-00000002", tmp_path / "out/checkpoint/step-00000002-hf"
    before, after = tensors_of(source), tensors_of(output)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name].float()) for name in before)
    assert AutoTokenizer.from_pretrained(output)("a few words of text")["input_ids"]
    assert_logits_agree(output, "hf", checkpoint, str(source))
    assert json.loads((output / "config.json").read_text())["rope_theta"] == 1234.0

    # a killed run would have left no export: the next start, which has nothing else to do, writes it
    shutil.rmtree(output)
    again = train(tmp_path, toml, "--checkpoint.last_save_in_hf", "true", *STILL, ranks=2)
    assert again.code == 0 and "nothing to do" in again.err and tensors_of(output).keys() == before.keys()


def test_a_run_starts_from_a_folder_on_any_mesh_and_resumes_from_its_own_checkpoints(tmp_path):
    source = hf_folders.write(tmp_path / "source", "tests.tiny", "tied", torch.bfloat16)
    toml = f'''
[model]
name = "tests.tiny"
flavor = "tied"
hf_assets_path = "{source}"
[checkpoint]
enable = true
initial_load_path = "{source}"
initial_load_in_hf = true
'''
    ended = train(tmp_path, toml, "--parallelism.tensor_parallel_degree", "2", *STILL, ranks=2)
    assert ended.code == 0, ended.err
    assert f"weights read from {source}" in ended.err
    stored, before = Stored(tmp_path / "out/checkpoint/step-00000002"), tensors_of(source)
    family = load_family("tests.tiny", "tied")
    for ours, theirs in their_names(family, dict(family.on_meta().named_parameters())).items():
        assert torch.equal(stored.read(f"model.{ours}"), before[theirs].float()), ours
    shutil.rmtree(source / "model-00001-of-00002.safetensors", ignore_errors=True)
    for file in source.glob("*.safetensors"):
        file.unlink()
    ended = train(tmp_path, toml, "--training.steps", "3", "--checkpoint.allow_changes", "lr_scheduler.total_steps",
                  "--lr_scheduler.total_steps", "3", *STILL)  # fmt: skip
    assert ended.code == 0 and "resumed from" in ended.err, ended.err


def test_a_run_with_the_default_tokenizer_is_exported_with_it_and_into_one_file(tmp_path):
    toml = '[model]\nname = "tests.tiny"\nflavor = "large"\n[checkpoint]\nenable = true\n'
    assert train(tmp_path, toml).code == 0
    checkpoint = tmp_path / "out/checkpoint/step-00000002"
    titanlite("export-hf", "--checkpoint", "out", "--output", "hf", "--shard-gib", 0.0005, *OWN, folder=tmp_path)
    tokenizer, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), open_tokenizer("")
    text = "def f(x):\n    return x + 1\n"
    assert tokenizer(text)["input_ids"] == ours.tokenizer.encode(text).ids
    assert tokenizer.eos_token_id == ours.end_of_text == json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"]
    assert_logits_agree(tmp_path / "hf", "large", checkpoint)
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    generated = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generate(tokens, max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > tokens.shape[1]

    titanlite("export-torch", "--checkpoint", checkpoint, "--output", "one.pt", "--dtype", "bfloat16", *OWN, folder=tmp_path)
    weights, stored = torch.load(tmp_path / "one.pt", weights_only=True), Stored(checkpoint)
    family = load_family("tests.tiny", "large")
    family.module.Model(family.config).load_state_dict(weights)  # strict: no missing and no unexpected names
    assert all(torch.equal(weights[name], stored.read(f"model.{name}").bfloat16()) for name in weights)
    ended = titanlite("export-torch", "--checkpoint", checkpoint, "--output", "one.pt", folder=tmp_path, code=2)
    assert "one.pt: already exists" in ended.err


@pytest.mark.slow
def test_no_rank_of_an_import_holds_more_than_its_slices(tmp_path):
    """Results for 8 billion parameters: benchmarks/results/hf_import.md."""
    held = {}
    for layers in (1, 40):
        folder = tmp_path / str(layers)
        write_zeros(folder, layers)
        ended = titanlite("import-hf", "--source", folder, "--output", f"weights-{layers}", "--ranks", 2, folder=tmp_path)
        held[layers] = [float(found) for found in re.findall(r"(\d+\.\d\d)", ended.out.splitlines()[0])]
    (_, small, _), (whole, large, slices) = held[1], held[40]
    print(f"{whole} GiB: a rank held {large}, {slices} of them its slices; with next to nothing {small}")
    size = (folder / "model.safetensors").stat().st_size / 2**30
    assert abs(whole - size) < 0.01 and abs(slices - size / 2) < 0.01 and size > 0.9
    assert large - small < slices + 0.2 < size


def write_zeros(folder: Path, layers: int) -> None:
    """Half a billion parameters in 40 layers, zero."""
    folder.mkdir()
    hf_folders.describe(folder, layers)
    module = load_family("llama3", "hf", str(folder))
    shapes = {name: tuple(p.shape) for name, p in module.on_meta().named_parameters()}
    items = items_of(shapes, their_names(module, shapes), lambda _: torch.bfloat16)
    write_file(folder / "model.safetensors", items, lambda name: torch.zeros(shapes[name], dtype=torch.bfloat16))
