"""import-hf and export-torch as a user runs them, and runs that start and end in Hugging Face's format."""

import json
import re
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from tests import hf_folders
from tests.end_to_end import forked
from tests.end_to_end.forked import Done
from tests.hf_folders import tensors_of
from tests.waiting import PATIENCE
from titanlite.checkpoint.whole import Stored
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


def test_import_hf_prints_the_keys_of_a_run_whose_last_save_has_the_tensors_and_the_config_of_its_source(tmp_path):
    source = fork(tmp_path / "source", rope_theta=1234.0)
    ended = titanlite(
        "import-hf", "--source", source, "--output", "weights", "--model", "tests.tiny", "--ranks", 2, folder=tmp_path
    )
    toml = ended.out[ended.out.index("[model]") :]
    assert 'flavor = "hf"' in toml
    begun = train(tmp_path, toml, "--checkpoint.last_save_in_hf", "true", *STILL, ranks=2)
    assert begun.code == 0, begun.err
    assert f"weights read from {tmp_path / 'weights'}" in begun.err
    output = tmp_path / "out/checkpoint/step-00000002-hf"
    before, after = tensors_of(source), tensors_of(output)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name].float()) for name in before)
    assert AutoTokenizer.from_pretrained(output)("a few words of text")["input_ids"]
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


def test_a_run_is_exported_into_one_file_that_pytorch_reads(tmp_path):
    toml = '[model]\nname = "tests.tiny"\nflavor = "large"\n[checkpoint]\nenable = true\n'
    assert train(tmp_path, toml).code == 0
    checkpoint = tmp_path / "out/checkpoint/step-00000002"
    titanlite("export-torch", "--checkpoint", "out", "--output", "one.pt", "--dtype", "bfloat16", *OWN, folder=tmp_path)
    weights, stored = torch.load(tmp_path / "one.pt", weights_only=True), Stored(checkpoint)
    family = load_family("tests.tiny", "large")
    family.module.Model(family.config).load_state_dict(weights)  # strict: no missing and no unexpected names
    assert all(torch.equal(weights[name], stored.read(f"model.{name}").bfloat16()) for name in weights)
    ended = titanlite("export-torch", "--checkpoint", checkpoint, "--output", "one.pt", folder=tmp_path, code=2)
    assert "one.pt: already exists" in ended.err
    unfinished = tmp_path / ".two.pt.unfinished"
    unfinished.symlink_to("/dev/full")  # torch.save reports "enforce fail at inline_container.cc" there
    ended = titanlite("export-torch", "--checkpoint", checkpoint, "--output", "two.pt", *OWN, folder=tmp_path, code=2)
    assert re.fullmatch(r"two\.pt: cannot be written: .*No space left on device\n", ended.err) and not unfinished.is_symlink()
