"""Recipes: valid on the number of ranks in their header, within the memory that it claims. And what estimates count."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from models.attention import SeqInfo
from models.rope import rotation
from tests.repetitions import campaign_but
from tests.tiny import FLAVORS, Model
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.loop.step import build_model
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.plan.predict import Prediction, predict
from titanlite.plan.report import GIB, RESERVE
from titanlite.plan.step import simulated_ranks
from titanlite.registry.family import family_of
from titanlite.tools import estimate as tool
from titanlite.transforms.compile import has_compiler

FOLDER = Path("train_configs")
# recipe: ranks, parameters
RECIPES = {
    "llama_debug": (1, 5_245_184),
    "llama_124m": (8, 123_587_328),
    "llama_1b": (8, 1_235_814_400),
    "llama_1b_muon": (8, 1_235_814_400),
    "llama_3b": (8, 3_212_749_824),
    "llama_8b": (8, 8_030_261_248),
    "llama_8b_1gpu": (1, 8_030_261_248),
    "llama_8b_128k": (8, 8_030_261_248),
    "llama_8b_float8": (8, 8_030_261_248),
    "llama_8b_hsdp": (64, 8_030_261_248),
    "llama_8b_sft": (8, 8_030_261_248),
    "llama_8b_lora": (1, 8_198_033_408),
    "llama_8b_lora_80gb": (1, 8_198_033_408),
    "llama_70b": (256, 70_553_706_496),
    "llama_405b": (512, 405_853_388_800),
    "qwen3_8b": (8, 8_190_735_360),
    "qwen3_8b_128k": (8, 8_190_735_360),
    "qwen3_30b_a3b": (32, 30_532_122_624),
    "mixtral_8x7b": (32, 46_702_792_704),
    "olmoe_7b": (8, 6_919_161_856),
    "gpt_oss_20b": (32, 20_914_757_184),
    "deepseek_v3": (2048, 671_026_404_352),
    "gemma3_12b": (16, 11_766_034_176),
    "olmo2_7b": (64, 7_298_617_344),
}
FEW = ("llama_debug", "llama_8b")  # in `make test`
# in a campaign: families and features that other recipes have
REPEATED = ("llama_124m", "llama_1b", "llama_1b_muon", "llama_3b", "llama_8b_float8", "llama_8b_hsdp", "llama_8b_sft")
REPEATED += ("llama_8b_lora_80gb", "qwen3_8b_128k", "mixtral_8x7b", "olmoe_7b")
PIPELINES = ("llama_405b", "deepseek_v3")  # whose ranks hold different shares, and whole gradients of them
BYTES = {"llama_8b_1gpu": 8}  # of a parameter with its gradient and two moments; 16 in the others, all float32
SHARDS = {"llama_8b_hsdp": 8}  # over how many ranks; over all in the others
DEVICE_GIB = {"llama_8b_1gpu": 141, "llama_8b_lora": 24}  # 80 for the others


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine the threads of an operation wait for each other much longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_table_of_this_file_has_every_recipe():
    every = {path.stem for path in FOLDER.glob("*.toml")} - {
        "llama_debug_constant",
        "llama_debug_decay",
    }  # two that branch off
    assert every == {"llama_70b_lora", *RECIPES}


def estimated(recipe: str, ranks: int) -> Prediction:
    """What a recipe holds, once that is found to be what its header claims. tests/unit/test_elsewhere.py checks each recipe."""
    path = FOLDER / f"{recipe}.toml"
    header = path.read_text().partition("\n[")[0]
    config = read_config(str(path), [])
    assert re.search(r"^# Ranks: (\d+) ", header, re.MULTILINE)[1] == str(ranks)
    found = predict(config, ranks)
    print(f"{path.name} on {ranks}: {found}")
    claimed = float(re.search(r"^# Memory a rank: ([\d.]+) GiB", header, re.MULTILINE)[1])
    assert found.memory.total / GIB == pytest.approx(claimed, rel=0.1)
    assert found.memory.total + RESERVE < DEVICE_GIB.get(recipe, 80) * GIB
    return found


@pytest.mark.parametrize("recipe", campaign_but(FEW, RECIPES.keys() - {*REPEATED}, RECIPES))
def test_a_recipe_is_sound_and_fits_the_memory_that_its_header_claims(recipe):
    ranks, parameters = RECIPES[recipe]
    found = estimated(recipe, ranks)
    # masters, gradients and two moments of AdamW, all sharded over all ranks
    assert found.parameters == parameters
    if recipe not in PIPELINES and "lora" not in recipe and "muon" not in recipe:
        shards = SHARDS.get(recipe, ranks)
        assert sum(found.during("update")[:3]) == pytest.approx(BYTES.get(recipe, 16) * parameters / shards, rel=0.001)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_names_the_source_of_its_values_or_says_that_it_is_a_speed_test(path):
    header = path.read_text().partition("\nbase = ")[0].partition("\n[")[0]
    source = re.search(r"arXiv:\d{4}\.\d{5}|\w+\.(?:com|co)/\w|benchmarks/NOTES\.md", header)
    assert source or header.startswith("# Speed test: ")


def tiny(**sections: dict) -> Config:
    """Two layers of dimension 64 in float32, 2 sequences of 512."""
    training = {"local_batch_size": 2, "seq_len": 512, "mixed_precision_param": "float32"}
    return Config.model_validate(
        {"model": {"name": "tests.tiny", "flavor": "plain"}, **sections, "training": training | sections.get("training", {})}
    )


def test_predicted_activations_are_those_that_a_block_saves():
    shape = FLAVORS["plain"]
    seq = SeqInfo(torch.arange(512).expand(2, 512))
    rope = rotation(seq, shape.head_dim, shape.rope_theta)
    block = Model(shape).layers["0"]
    elsewhere = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *rope)}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(2, 512, shape.dim, requires_grad=True), rope, seq)
    kept = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in elsewhere)
    assert predict(tiny(), 1, "cpu").during("loss").activations == shape.n_layers * kept


@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_predicted_activations_of_compiled_blocks_are_those_that_inductor_saves(mode):
    """Inductor's code allocates outside of PyTorch's dispatcher, so only its saved tensors can be measured."""
    config = tiny(compile={"enable": True, "components": ["model"]}, activation_checkpoint={"mode": mode})
    shape, saved = FLAVORS["plain"], {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with simulated_ranks(1):
        mesh = build_mesh(dict.fromkeys(DIMENSIONS, 1), "cpu")
        model = build_model(family_of(config.model), config, mesh, torch.device("cpu"))
        seq, tokens = SeqInfo(torch.arange(512).expand(2, 512)), torch.zeros(2, 512, dtype=torch.int64)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(tokens, seq)
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = sum(size for place, size in saved.items() if place not in of_model)
    once = tokens.nbytes + 2 * (2 * 512 * shape.head_dim * 4)  # for the embedding's gradient; cosines and sines
    assert hidden.requires_grad and predict(config, 1, "cpu").during("loss").activations == pytest.approx(kept - once, rel=0.01)


@pytest.mark.parametrize(("gib", "code", "verdict"), [(80, 0, "fits"), (3, 1, "does not fit")])
def test_the_command_says_whether_the_run_fits_and_which_keys_have_no_effect(gib, code, verdict, capsys, monkeypatch):
    words = ["estimate", "train_configs/llama_debug.toml", "--device-memory-gib", str(gib), "--training.seq_len", "64"]
    words += ["--checkpoint.enable", "false"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert f"{verdict} a device of {gib} GiB" in out and "keys without effect: checkpoint." in err
