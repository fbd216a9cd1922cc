"""Recipes for GPUs, checked on a machine without one: faults are found, and what only a GPU can verify is listed."""

import re
from pathlib import Path

import pytest
import torch

from tests.repetitions import slow_but
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.ground.errors import UserError
from titanlite.loop.summary import built_in, emulated
from titanlite.tools import check as tool
from titanlite.tools import estimate
from titanlite.tools.check import check_here

FOLDER = Path(__file__).parents[2] / "train_configs"
BRANCH = "llama_debug_decay"  # starts from a checkpoint of another run, which is missing here
FEW = ("llama_debug", "llama_8b_float8", "gemma3_12b", "gpt_oss_20b")  # in `make test`


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


def notes(recipe: str, *options: str, local_ranks: int | None = None) -> list[str]:
    path = FOLDER / f"{recipe}.toml"
    ranks = int(re.search(r"^# Ranks: (\d+)", path.read_text(), re.MULTILINE)[1])
    return check_here(read_config(path, list(options)), str(path), ranks, local_ranks)


@pytest.mark.parametrize("recipe", slow_but(FEW, sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != BRANCH)))
def test_every_recipe_is_valid_and_lists_what_only_its_gpus_can_verify(recipe):
    if recipe.endswith("float8"):
        pytest.importorskip("torchao", reason="needs torchao")
    found = notes(recipe)
    compiled = not recipe.startswith("llama_debug")
    alone = not compiled or recipe.endswith("_1gpu") or recipe.startswith("llama_8b_lora")
    flex = {
        "gemma3_12b": ["the window of gemma3"],
        "gpt_oss_20b": ["the window of gpt_oss"],
        "llama_8b_128k": ["training.document_mask = true"],
        "qwen3_8b_128k": ["training.document_mask = true"],
    }
    expected = ["float8.recipe_name"] * recipe.endswith("float8") + ['model.attention = "auto"', *flex.get(recipe, [])]
    expected += ['compile.backend = "inductor"'] * compiled + ["NCCL"] * (not alone) + ["memory: "]
    assert len(found) == len(expected)
    assert [part for part, note in zip(expected, found, strict=True) if part not in note] == []


# options that go together -> what is said of each
OPTIONS = {
    "--model.attention cudnn --float8.enable true --parallelism.cpu_offload true "
    "--parallelism.tensor_parallel_degree 2 --parallelism.enable_async_tensor_parallel true": [
        'model.attention = "cudnn"',
        'float8.recipe_name = "tensorwise": needs a GPU of compute capability 8.9',
        "parallelism.cpu_offload = true",
        "enable_async_tensor_parallel = true",
    ],
    "--training.document_mask true": ["training.document_mask = true: FlexAttention"],
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_gpu_only_option_is_listed_and_is_a_fault_only_if_this_machine_trains(options):
    if "float8" in options:
        pytest.importorskip("torchao", reason="needs torchao")
    listed = "\n".join(notes("llama_8b", *options.split()))
    assert [part for part in OPTIONS[options] if part not in listed] == []
    with pytest.raises(UserError) as raised:
        notes("llama_8b", *options.split(), local_ranks=8)
    faults = [part for part in OPTIONS[options] if part in str(raised.value)]
    assert faults == ([] if "document_mask" in options else OPTIONS[options]), "a mask works on a CPU too"


def test_the_command_lists_gpu_only_options_on_standard_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["titanlite check", str(FOLDER / "llama_8b_1gpu.toml"), "--model.attention", "cudnn"])
    tool.main()
    out, err = capsys.readouterr()
    assert out == "" and "llama_8b_1gpu.toml: no faults; this machine has no GPU" in err
    assert '\n  model.attention = "cudnn": ' in err
    assert "\n  memory: 59.8 GiB a rank for parameters, gradients and optimizer state" in err
    assert "built-in tokenizer and data: a test of speed" in err


@pytest.mark.parametrize(
    ("parameters", "options", "expected"),
    [
        (124_000_000, "", "tokenizer and data: a test of speed"),
        (124_000_000, "--training.dataset_path text.txt", "set model.hf_assets_path"),
        (124_000_000, "--model.hf_assets_path assets --training.dataset_path text.txt", "validation data: a test of speed"),
        (124_000_000, "--model.hf_assets_path assets --training.dataset_path text.txt --validation.dataset_path held.txt", ""),
        (5_000_000, "", ""),
    ],
)
def test_a_large_model_on_built_in_data_is_one_visible_line(parameters, options, expected):
    found = built_in(read_config(FOLDER / "llama_124m.toml", options.split()), parameters)
    assert expected in found and bool(found) == bool(expected)


@pytest.mark.parametrize("fast", [True, False])
def test_the_start_says_that_a_cpu_has_no_instructions_for_the_precision(monkeypatch, fast):
    """A processor with AVX2 alone has 1.3 GFLOP/s in bfloat16, and 80 in float32."""
    for name in ("bf16_on_cpu", "fp16_on_cpu"):
        monkeypatch.setattr(torch_private, name, lambda: fast, raising=False)
    assert [bool(emulated(dtype)) for dtype in ("float32", "bfloat16", "float16")] == [False, not fast, not fast]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert emulated("bfloat16") == ""


def test_the_local_ranks_are_all_ranks_unless_more_are_given(monkeypatch):
    words = ["check", f"{FOLDER}/llama_debug.toml", "--parallelism.tensor_parallel_degree", "2", "--local-ranks", "2"]
    monkeypatch.setattr("sys.argv", words)
    tool.main()
    monkeypatch.setattr("sys.argv", [*words, "--ranks", "1"])
    with pytest.raises(UserError, match="--local-ranks 2: more than --ranks 1"):
        tool.main()


def test_an_estimate_does_not_ask_for_the_gpus_and_data_of_this_machine(monkeypatch):
    """It runs on fake tensors. An older GPU here had refused what a machine without one predicted."""

    def reached(config: Config, ranks: int, routing: str) -> None:
        raise InterruptedError(config.float8.recipe_name)

    pytest.importorskip("torchao", reason="needs torchao")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(estimate, "predict", reached)
    words = ["estimate", f"{FOLDER}/llama_8b_float8.toml", "--ranks", "8", "--training.dataset_path", "/data/elsewhere"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(InterruptedError):
        estimate.main()
    unequal = '[{path = "a", weight = 2.0}, {path = "b"}]'
    monkeypatch.setattr("sys.argv", [*words[:4], "--training.sources", unequal])
    with pytest.raises(UserError, match=r"training\.sources.* weight"):  # which no machine's files change
        estimate.main()
