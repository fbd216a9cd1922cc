"""Small flavors of Mixtral for the tests."""

from models.mixtral import HF, HF_TYPES, Config, Model, flops, from_hf, initial, sharding, to_hf

__all__ = ["FLAVORS", "HF", "HF_TYPES", "Config", "Model", "flops", "from_hf", "initial", "sharding", "to_hf"]

_PLAIN = Config(64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, expert_dim=48, n_experts=4, vocab_size=512)

FLAVORS: dict[str, Config] = {
    "plain": _PLAIN,
}
