"""Folders in Hugging Face's format, written by transformers with random weights, and comparisons with them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.attention import SeqInfo
from titanlite.checkpoint.tensors import model_tensors
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.hf.folder import INDEX, each_expert, find_weights, their_name
from titanlite.hf.load import load_weights
from titanlite.registry.family import Family, load_family
from titanlite.tools import import_hf
from titanlite.transforms.initialize import materialize

NORM = "model.norm.weight"
# (model.name, model.flavor) of every family, in test sizes: a new family needs an entry here, but no test
CASES = [
    ("tests.tiny", "scaled"),
    ("tests.tiny", "uneven"),
    ("tests.tiny_qwen3", "tied"),
    ("tests.tiny_qwen3", "biased"),
    ("tests.tiny_gemma3", "plain"),
    ("tests.tiny_gemma3", "two"),
    ("tests.tiny_olmo2", "plain"),
    ("tests.tiny_qwen3_moe", "plain"),
    ("tests.tiny_qwen3_moe", "tied"),
    ("tests.tiny_mixtral", "plain"),
    ("tests.tiny_olmoe", "plain"),
    ("tests.tiny_deepseek_v3", "plain"),
    ("tests.tiny_deepseek_v3", "moonlight"),
    ("tests.tiny_gpt_oss", "plain"),
]


def their_model(family: Family) -> nn.Module:
    """transformers' model of a family's configuration, with random weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, which the ranks of a pool do not need to spend

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**family.module.to_hf(family.config), eos_token_id=0, pad_token_id=None)
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    return model


def of_files(module: ModuleType, name: str, parameter: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Our parameter from tensors in files: one tensor, or a stack with one for each expert."""
    their = their_name(module, name)
    parts = [part.view(tensors[part.name]) for part in each_expert(their, parameter.shape)]
    return torch.stack(parts) if "{e}" in their else parts[0]


def write(folder: Path, name: str, flavor: str, dtype: torch.dtype = torch.float32, shard: str = "100KB") -> Path:
    """A folder of a model and a tokenizer; -> the folder."""
    their_model(load_family(name, flavor)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    train_tokenizer(["a few words of text"]).save(str(folder / "tokenizer.json"))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by safetensors' own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def import_here(source: Path, output: Path, model: str) -> None:
    """import-hf by the ranks of a pool."""
    import_hf._import(torch.device("cpu"), source, output, output.with_name(".unfinished"), model)


def read(folder: Path, name: str, flavor: str, exclude: list[str] | None = None) -> nn.Module:
    """A model in one process with the weights of a folder."""
    family = load_family(name, flavor)
    model = family.on_meta()
    weights = find_weights(folder, family, model, exclude or [])
    materialize(model, torch.device("cpu"))
    load_weights(model_tensors(model), weights)
    return model


def assert_logits_agree(ours: nn.Module, theirs: nn.Module, vocabulary: int) -> None:
    """Asserts that our model and transformers' give the same logits."""
    tokens = torch.randint(vocabulary, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = ours.head(ours(tokens, SeqInfo(torch.arange(48).expand(2, 48)))), theirs(tokens).logits
    assert expected.std() > 0.01
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def change(folder: Path, name: str, how: Callable[[dict], None]) -> None:
    """Changes the tensors of the file that holds `name`."""
    file = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def remove(*names: str) -> Callable[[Path], None]:
    """A function that removes tensors from a folder and its index."""

    def damage(folder: Path) -> None:
        for name in names:
            change(folder, name, lambda tensors, name=name: tensors.pop(name))
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in names}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def replace(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """A function that changes one tensor of a folder."""
    return lambda folder: change(folder, name, lambda tensors: tensors.update({name: how(tensors[name])}))
