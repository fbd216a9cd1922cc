"""Folders in Hugging Face's format, written by transformers with random weights, and what to hold against them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models import llama3
from titanlite.data.tokenizer import train_tokenizer
from titanlite.tools import import_hf
from titanlite.zoo import Family, load_family

# (model.name, model.flavor) of every family, in sizes that a test can hold: a new family needs an entry, no test
CASES = [
    ("tests.tiny", "plain"),
    ("tests.tiny", "tied"),
    ("tests.tiny", "uneven"),
    ("tests.tiny", "scaled"),
    ("tests.tiny_qwen3", "tied"),
    ("tests.tiny_qwen3", "biased"),
    ("tests.tiny_gemma3", "plain"),
    ("tests.tiny_gemma3", "two"),
    ("tests.tiny_olmo2", "plain"),
]


def their_model(family: Family) -> nn.Module:
    """transformers' model of a family's configuration, with random weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, which the ranks of a pool need not spend

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**family.module.to_hf(family.config), eos_token_id=0, pad_token_id=None)
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    return model


def write(folder: Path, name: str, flavor: str, dtype: torch.dtype = torch.float32, shard: str = "100KB") -> Path:
    """A folder of a model and a tokenizer; -> the folder."""
    their_model(load_family(name, flavor)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    train_tokenizer(["a few words of text"]).save(str(folder / "tokenizer.json"))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by the library's own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def import_here(source: Path, output: Path, model: str) -> None:
    """import-hf by the ranks of a pool."""
    import_hf._import(torch.device("cpu"), source, output, output.with_name(".unfinished"), model)


def describe(folder: Path, layers: int) -> None:
    """A config.json of a Llama that is mostly layers, each of 12.6 million parameters."""
    config = llama3.Config(1024, layers, n_heads=8, n_kv_heads=8, head_dim=128, ffn_dim=2730, vocab_size=512)
    (folder / "config.json").write_text(json.dumps(llama3.to_hf(config)))
