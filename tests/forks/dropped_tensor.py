"""A fork whose Hugging Face map lacks a matrix."""

from models import llama3
from tests.tiny import FLAVORS, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

HF = {ours: theirs for ours, theirs in llama3.HF.items() if ours != "layers.{i}.ffn.w3.weight"}
