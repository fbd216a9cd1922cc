"""Hugging Face's format: what is read is what was written, bit for bit, and what is wrong with a folder is told by name."""

import dataclasses
import importlib
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import llama3
from models.blocks import SeqInfo
from tests import hf_folders, tiny
from tests.hf_folders import CASES, tensors_of
from titanlite.__main__ import COMMANDS
from titanlite.checkpoint.manifest import Damaged
from titanlite.checkpoint.tensors import model_tensors
from titanlite.checks import check
from titanlite.config import Config
from titanlite.errors import UserError
from titanlite.hf import export as exporting
from titanlite.hf import folder as folders
from titanlite.hf.export import Item, export, split, write_file
from titanlite.hf.folder import find_weights, recognise, their_names
from titanlite.hf.load import load_weights
from titanlite.initialize import materialize
from titanlite.zoo import Family, load_family

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Callable[..., Path]:
    """Folders by transformers, each written once; not to be changed."""
    written: dict[tuple, Path] = {}

    def source(name: str, flavor: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, flavor, dtype)
        if key not in written:
            written[key] = hf_folders.write(tmp_path_factory.mktemp("source"), *key)
        return written[key]

    return source


@pytest.fixture
def source(sources, tmp_path) -> Path:
    """A folder of a test's own, of three files."""
    return shutil.copytree(sources("tests.tiny", "plain"), tmp_path / "source")


def read(folder: Path, name: str, flavor: str, exclude: list[str] | None = None) -> torch.nn.Module:
    family = load_family(name, flavor)
    model = family.on_meta()
    weights = find_weights(folder, family, model, exclude or [])
    materialize(model, CPU)
    load_weights(model_tensors(model), weights)
    return model


def change(folder: Path, name: str, how: Callable[[dict], None]) -> None:
    """Changes the tensors of the file that holds `name`."""
    file = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# ------------------------------------------------------------------------------------------------------------- recognising


def describe(folder: Path, config: llama3.Config, **changes) -> Path:
    values = llama3.to_hf(config) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


@pytest.mark.parametrize("flavor", llama3.FLAVORS)
def test_published_sizes_are_recognised_by_their_dimensions(tmp_path, flavor):
    found = recognise(describe(tmp_path, llama3.FLAVORS[flavor]))
    assert found[:2] == ("llama3", flavor) and found.family.config == llama3.FLAVORS[flavor]


def test_a_size_of_ones_own_is_the_flavour_hf_and_trains_from_the_same_config_json(tmp_path):
    config = dataclasses.replace(llama3.FLAVORS["1b"], n_layers=3)
    found = recognise(describe(tmp_path, config))
    assert found[:2] == ("llama3", "hf")
    assert load_family("llama3", "hf", str(tmp_path)).config == config


def test_a_fork_is_taken_when_it_is_named(sources):
    assert recognise(sources("tests.tiny", "tied"), "tests.tiny")[:2] == ("tests.tiny", "tied")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mistral"},
            r"no family of models/ \(gemma3: gemma3_text, gemma2; llama3: llama; .*\) reads model_type 'mistral'.*--model",
        ),
        ({"hidden_act": "gelu"}, "models.llama3 cannot be built from it: .*gelu"),
        ({"model_type": 1}, "has no model_type"),
        ({"hidden_size": ...}, "config.json: has no 'hidden_size', which models.llama3 needs"),
    ],
)
def test_a_model_that_no_family_has_is_refused(tmp_path, config, message):
    describe(tmp_path, llama3.FLAVORS["1b"], **config)
    with pytest.raises(UserError, match=message):
        recognise(tmp_path)


def test_two_families_that_read_the_same_type_are_not_guessed_between(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "family_names", lambda: ["llama3", "tests.tiny"])
    with pytest.raises(UserError, match=r"llama3 and tests.tiny both read model_type 'llama'; name one with --model"):
        recognise(describe(tmp_path, llama3.FLAVORS["1b"]))


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_json_that_is_none_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config.json: (cannot be read|does not describe a model)"):
        recognise(tmp_path)


def test_the_flavour_hf_needs_assets_and_is_nobody_elses_name(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r'model.flavor = "hf".*hf_assets_path, which is empty'):
        load_family("llama3", "hf")
    with pytest.raises(UserError, match=r"config.json: cannot be read"):
        load_family("llama3", "hf", str(tmp_path))
    monkeypatch.setitem(tiny.FLAVORS, "hf", tiny.FLAVORS["plain"])
    with pytest.raises(UserError, match='its flavour "hf" needs another name'):
        load_family("tests.tiny", "plain")


def test_a_parameter_that_the_table_forgets_is_named(monkeypatch):
    monkeypatch.delitem(tiny.HF, "layers.{i}.ffn.w1.weight")
    family = load_family("tests.tiny", "plain")
    names = [name for name, _ in family.on_meta().named_parameters()]
    with pytest.raises(UserError, match=r"tests.tiny: HF has no name for layers.0.ffn.w1.weight\n.*layers.1.ffn.w1.weight$"):
        their_names(family, names)


# ----------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "flavor"), CASES)
def test_every_parameter_is_the_tensor_of_the_file(sources, monkeypatch, name, flavor, dtype):
    monkeypatch.setattr("titanlite.hf.load._CHUNK", 1000)  # several reads a tensor, the last one shorter
    folder = sources(name, flavor, dtype)
    model, stored = read(folder, name, flavor), tensors_of(folder)
    names = their_names(load_family(name, flavor), [ours for ours, _ in model.named_parameters()])
    assert set(names.values()) == stored.keys()
    for ours, parameter in model.named_parameters():
        assert stored[names[ours]].dtype == dtype
        assert torch.equal(parameter, stored[names[ours]].float()), ours


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            change(folder, name, lambda tensors, name=name: tensors.pop(name))
        index = json.loads((folder / folders.INDEX).read_text())
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in names}
        (folder / folders.INDEX).write_text(json.dumps(index))

    return damage


def replace(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: change(folder, name, lambda tensors: tensors.update({name: how(tensors[name])}))


def add(folder: Path) -> None:
    change(folder, "model.norm.weight", lambda tensors: tensors.update(extra=torch.zeros(2)))
    places = json.loads((folder / folders.INDEX).read_text())["weight_map"]
    change_json(folder / folders.INDEX, weight_map={**places, "extra": places["model.norm.weight"]})


def one_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def truncate(folder: Path) -> None:
    one_file(folder).write_bytes(one_file(folder).read_bytes()[:-1])


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (remove(QUERY), rf"  {QUERY} \(model.layers.1.attention.wq.weight\): is missing$"),
    "several": (remove(QUERY, NORM), rf"(?s){QUERY} .*is missing\n.*{NORM} \(model.head.norm.weight\): is missing$"),
    "misshaped": (replace(QUERY, lambda t: t[:-1].clone()), rf"{QUERY} .*\(63, 64\) in .*, \(64, 64\) in the model"),
    "another rank": (replace(NORM, lambda t: t[None]), rf"{NORM} .*\(1, 64\) in"),
    "quantised": (replace(NORM, lambda t: t.to(torch.float8_e4m3fn)), rf"{NORM}: is stored in .* as F8_E4M3, and only F32"),
    "extra": (add, "  extra: in model-.*, but not in the model$"),
    "not where the index says": (
        lambda folder: change(folder, NORM, lambda tensors: tensors.pop(NORM)), f"{NORM}: not in model-.*, where .* says it is"
    ),
    "not in the index": (
        lambda folder: change(folder, NORM, lambda tensors: tensors.update(extra=torch.zeros(2))),
        "extra: in model-.*, but model.safetensors.index.json does not say so",
    ),
    "no file": (lambda folder: one_file(folder).unlink(), r"model-00001-of-\d+.safetensors: is missing"),
    "cut off": (truncate, r"model-00001-of-\d+.safetensors: is damaged: "),
    "no header": (lambda folder: one_file(folder).write_bytes(b"\xff" * 100), r"safetensors: is damaged: "),
    "out of the folder": (
        lambda folder: change_json(folder / folders.INDEX, weight_map={NORM: "../a.safetensors"}),
        r"is refused: '../a.safetensors' is no safetensors file of this folder",
    ),
    "no index": (lambda folder: (folder / folders.INDEX).write_text("{}"), "not an index of safetensors files"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_folder_is_told_by_name_before_anything_is_read(source, monkeypatch, fault):
    read(source, "tests.tiny", "plain")  # it was sound
    damage, message = FAULTS[fault]
    damage(source)
    monkeypatch.setattr("titanlite.hf.load._slice", None)
    with pytest.raises(UserError, match=message):
        read(source, "tests.tiny", "plain")


def test_all_faults_are_told_at_once(source):
    for damage in (remove(QUERY, NORM), replace("lm_head.weight", lambda t: t[:5].clone())):
        damage(source)
    change(source, "lm_head.weight", lambda tensors: tensors.update(extra=torch.zeros(2)))
    with pytest.raises(UserError) as raised:
        read(source, "tests.tiny", "plain")
    told = str(raised.value)
    assert told.count("is missing") == 2 and "lm_head.weight (model.head.output.weight): (5, 64)" in told and "extra" in told


def test_pickles_are_never_read(source):
    shutil.rmtree(source)
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(UserError, match=r"neither model.safetensors nor .*pytorch_model.bin is a pickle, .* is not read"):
        read(source, "tests.tiny", "plain")


def test_frequencies_that_old_files_hold_are_left_out(source):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(source, NORM, lambda tensors: tensors.update({name: torch.zeros(4)}))
    places = json.loads((source / folders.INDEX).read_text())["weight_map"]
    change_json(source / folders.INDEX, weight_map={**places, name: places[NORM]})
    read(source, "tests.tiny", "plain")


def test_a_tied_head_that_is_stored_too_must_equal_the_embedding(sources, tmp_path):
    tensors = tensors_of(sources("tests.tiny", "tied"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / folders.SINGLE)
    assert torch.equal(read(tmp_path, "tests.tiny", "tied").head.output.weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / folders.SINGLE)
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight, and config.json says .* tied"):
        read(tmp_path, "tests.tiny", "tied")


def test_what_is_excluded_may_be_missing_and_a_pattern_without_effect_is_told(source):
    remove("lm_head.weight")(source)
    model = read(source, "tests.tiny", "plain", ["model.head.output.*"])
    assert model.head.output.weight.isnan().all() and not model.embed.weight.isnan().any()
    with pytest.raises(UserError, match=r'exclude_from_loading: "model.haed.\*" matches no tensor'):
        read(source, "tests.tiny", "plain", ["model.haed.*"])


# --------------------------------------------------------------------------------------------------------------- exporting


@pytest.fixture(scope="module")
def imported(sources, pools, tmp_path_factory) -> Callable[..., Path]:
    """Checkpoints that import-hf makes of these folders."""
    made: dict[tuple, Path] = {}

    def checkpoint(name: str, flavor: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, flavor, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("imported") / "weights"
            pools[1].run("tests.hf_folders:import_here", source=sources(*key), output=made[key], model=name)
        return made[key]

    return checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "flavor"), CASES)
def test_import_and_export_give_back_every_tensor_bit_for_bit(sources, imported, tmp_path, name, flavor, dtype):
    before = tensors_of(sources(name, flavor, dtype))
    files = export(imported(name, flavor, dtype), tmp_path / "out", shard_bytes=100_000)
    after = tensors_of(tmp_path / "out")
    contents = [list(load_file(file).values()) for file in files]
    assert len(files) > 1 and all(len(held) == 1 or sum(t.nbytes for t in held) <= 100_000 for held in contents)
    assert after.keys() == before.keys()
    assert all(after[key].dtype == dtype and torch.equal(after[key], before[key]) for key in before)
    index = json.loads((tmp_path / "out" / folders.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * dtype.itemsize for t in before.values())


@pytest.mark.parametrize("shard", [10**9, 100_000], ids=["one file", "several files"])
@pytest.mark.parametrize(("name", "flavor"), CASES)
def test_transformers_loads_the_export_as_it_is_and_gives_our_logits(sources, imported, tmp_path, name, flavor, shard):
    export(imported(name, flavor), tmp_path / "out", shard_bytes=shard)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    ours = read(tmp_path / "out", name, flavor)
    tokens = torch.randint(load_family(name, flavor).config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours.head(ours(tokens, SeqInfo(torch.arange(48).expand(2, 48))))
        original = AutoModelForCausalLM.from_pretrained(sources(name, flavor)).float()(tokens).logits
    assert torch.equal(expected, original) and expected.std() > 0.1
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{name} {flavor}: logits differ by {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_export_has_the_dtype_that_is_asked_for_and_config_json_says_so(sources, imported, tmp_path, dtype):
    export(imported("tests.tiny", "plain"), tmp_path / "out", dtype)
    before, after = tensors_of(sources("tests.tiny", "plain")), tensors_of(tmp_path / "out")
    assert all(after[name].dtype == dtype and torch.equal(after[name], before[name].to(dtype)) for name in before)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_values_that_float16_does_not_hold_are_refused_by_name(pools, source, tmp_path):
    replace(NORM, lambda t: t + 7e4)(source)
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model="tests.tiny")
    with pytest.raises(UserError, match=r"head.norm.weight: has values beyond the largest float16, 65504; use bfloat16"):
        export(tmp_path / "weights", tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_goes_along_and_names_its_end_of_text(sources, imported, tmp_path):
    export(imported("tests.tiny", "plain"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer("few words")["input_ids"]) == "few words"
    original = (sources("tests.tiny", "plain") / "tokenizer.json").read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == original


def test_what_the_run_had_beside_its_tokenizer_is_copied_and_its_ids_are_kept(pools, source, tmp_path):
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "mine": 1}')
    (source / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [0, 3]}')
    change_json(source / "config.json", eos_token_id=[0, 3], bos_token_id=7, max_position_embeddings=99)
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model="tests.tiny")
    export(tmp_path / "weights", tmp_path / "out")
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["max_position_embeddings"]) == ([0, 3], 7, 99)


def test_assets_that_have_moved_are_named_by_an_option(pools, source, tmp_path):
    pools[1].run("tests.hf_folders:import_here", source=source, output=tmp_path / "weights", model="tests.tiny")
    source.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="no such folder; name where it is now with --assets"):
        export(tmp_path / "weights", tmp_path / "out")
    export(tmp_path / "weights", tmp_path / "out", assets=str(tmp_path / "moved"))
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_an_output_that_is_there_is_not_touched_and_leftovers_of_a_killed_export_are(imported, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(UserError, match=r"out: is there already"):
        export(imported("tests.tiny", "plain"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / ".new.unfinished").mkdir()
    (tmp_path / ".new.unfinished/half.safetensors").touch()
    export(imported("tests.tiny", "plain"), tmp_path / "new")
    assert not (tmp_path / "new/half.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_a_damaged_checkpoint_is_not_exported(imported, tmp_path):
    damaged = shutil.copytree(imported("tests.tiny", "plain"), tmp_path / "damaged")
    with open(next(damaged.glob("*.distcp")), "r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    with pytest.raises(UserError, match="is damaged: its checksum is") as raised:
        export(damaged, tmp_path / "out")
    assert not isinstance(raised.value, Damaged) and sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_a_family_that_has_changed_since_is_not_exported_as_what_it_was(imported, monkeypatch, tmp_path):
    monkeypatch.setitem(tiny.FLAVORS, "plain", dataclasses.replace(tiny.FLAVORS["plain"], rope_theta=7.0))
    with pytest.raises(UserError, match=r"plain is not what it was then:\n  rope_theta = 7.0, was 10000.0"):
        export(imported("tests.tiny", "plain"), tmp_path / "out")


def test_an_export_holds_one_tensor_at_a_time(imported, monkeypatch, tmp_path):
    alive: list[weakref.ref] = []
    real = exporting.Exported.read_tensor

    def counted(self, name: str) -> torch.Tensor:
        assert not [ref for ref in alive if ref() is not None]
        tensor = real(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(exporting.Exported, "read_tensor", counted)
    export(imported("tests.tiny", "plain"), tmp_path / "out")
    assert len(alive) == 21


def test_files_of_mixed_dtypes_are_what_the_library_reads(tmp_path):
    tensors = {
        "odd": torch.arange(3).bfloat16(), "scalar": torch.tensor(2.5), "wide": torch.randn(4, 5).T, "none": torch.empty(0, 3)
    }  # fmt: skip
    items = [Item(name, f"their.{name}", tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_file(tmp_path / "a.safetensors", items, tensors.__getitem__)
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[f"their.{name}"], tensor) for name, tensor in tensors.items()) and len(found) == 4
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_is_filled_up_to_its_size_and_a_larger_tensor_has_one_of_its_own():
    items = [Item(str(size), "", (size,), torch.bfloat16) for size in (10, 20, 5, 100, 1)]
    sizes = [[item.shape[0] for item in file] for file in split(items, 60)]
    assert sizes == [[10, 20], [5], [100], [1]]


def test_a_family_knows_itself_again_from_the_config_json_that_it_writes(imported, tmp_path):
    for name, flavor in CASES:
        export(imported(name, flavor), tmp_path / name / flavor)
        assert recognise(tmp_path / name / flavor, name)[:2] == (name, flavor)
        assert isinstance(recognise(tmp_path / name / flavor, name).family, Family)


# ------------------------------------------------------------------------------------------- what cannot be, told beforehand


def case(words: str, *told: str) -> tuple[str, tuple[str, ...]]:
    return words, told


COMMAND_FAULTS = {
    "no source": case("import-hf --source nowhere --output new", "nowhere: no such folder"),
    "no such model": case("import-hf --source source --output new --model llama9", "model.name = 'llama9'", "llama3"),
    "output is there": case("import-hf --source source --output weights", "weights: is there already"),
    "no ranks": case("import-hf --source source --output new --ranks 0", "--ranks 0: must be at least 1"),
    "damaged": case("import-hf --source damaged --output new", "model.norm.weight (model.head.norm.weight): is missing"),
    "no checkpoint": case("export-hf --checkpoint nowhere --output new", "nowhere: no such folder"),
    "no size": case("export-hf --checkpoint weights --output new --shard-gib 0", "--shard-gib 0.0: must be above 0"),
    "export is there": case("export-hf --checkpoint weights --output source", "source: is there already"),
    "no dtype": case("export-hf --checkpoint weights --output new --dtype int8", "'int8'", "bfloat16"),
    "no place": case("export-torch --checkpoint weights --output weights/manifest.json/new", "cannot be written"),
}
HF = "checkpoint.enable=true checkpoint.initial_load_path=source checkpoint.initial_load_in_hf=true"
WEIGHTS = "checkpoint.enable=true checkpoint.initial_load_path=weights"
RUN_FAULTS = {
    "a folder is no checkpoint": case(HF[: HF.rindex(" ")], "not a checkpoint", "set checkpoint.initial_load_in_hf = true"),
    "other dimensions": case(f"{HF} model.flavor=scaled", "other dimensions than tests.tiny scaled: rope_scaling = [8.0, 1.0"),
    "other shapes": case(f"{HF} model.flavor=uneven", "vocab_size = 515, there 512"),
    "damaged": case(HF.replace("source", "damaged"), "model.norm.weight (model.head.norm.weight): is missing"),
    "nowhere": case(HF.replace("source", "nowhere"), 'initial_load_path = "nowhere"', "config.json: cannot be read"),
    "a branch of a folder": case(f"{HF} checkpoint.initial_load_model_only=false", "model_only = false: a folder in Hugging"),
    "a branch of an import": case(f"{WEIGHTS} checkpoint.initial_load_model_only=false", "weights alone, made by import-hf"),
    "no path": case("checkpoint.enable=true checkpoint.initial_load_in_hf=true", "has no effect without", "initial_load_path"),
    "not enabled": case(
        "checkpoint.initial_load_in_hf=true checkpoint.last_save_in_hf=true",
        "initial_load_in_hf = true: has no effect with checkpoint.enable = false",
        "last_save_in_hf = true: has no effect with checkpoint.enable = false",
    ),
    "no place for a family": case(
        "checkpoint.enable=true checkpoint.last_save_in_hf=true model.name=tests.tiny_dropout",
        "last_save_in_hf = true: tests.tiny_dropout: lacks HF, HF_TYPES, from_hf, to_hf",
    ),
}  # fmt: skip


@pytest.fixture
def place(sources, imported, tmp_path, monkeypatch) -> Path:
    """The working folder, with source, damaged, and weights, which import-hf has made of source."""
    shutil.copytree(sources("tests.tiny", "plain"), tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "damaged")
    remove(NORM)(tmp_path / "damaged")
    shutil.copytree(imported("tests.tiny", "plain"), tmp_path / "weights")
    (tmp_path / "data.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", COMMAND_FAULTS)
def test_a_wrong_command_is_refused_in_a_sentence_and_writes_nothing(place, monkeypatch, capsys, fault):
    before = sorted(path.name for path in place.iterdir())
    words, told = COMMAND_FAULTS[fault]
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(COMMANDS[words.split()[0]][0]).main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(part in said for part in told), said
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_a_wrong_run_is_refused_before_any_process_starts(place, fault):
    words, told = RUN_FAULTS[fault]
    start = "model.name=tests.tiny model.flavor=plain model.hf_assets_path=source training.dataset=data.txt"
    values: dict[str, dict] = {}
    for word in [*start.split(), *words.split()]:
        key, value = word.split("=")
        section, name = key.split(".")
        values.setdefault(section, {})[name] = {"true": True, "false": False}.get(value, value)
    with pytest.raises(UserError) as raised:
        check(Config.model_validate(values), "run.toml", 1)
    assert all(part in str(raised.value) for part in told), raised.value
    assert len(str(raised.value).splitlines()) <= 3, "more than what is wrong"
