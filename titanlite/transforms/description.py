"""The config.json of a folder in Hugging Face's format: each of its keys is used, known to change nothing, or refused.

A family's `from_hf` reads the keys that it uses from a `Description`, which remembers them. Any other key is refused by name,
unless it is in HARMLESS or has a value in NEUTRAL: it may change the mathematics.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

# Keys that change no logits, by the sources of transformers 5.23: what the files are, and defaults of training and generation.
_HARMLESS = """
architectures dtype torch_dtype transformers_version _name_or_path name_or_path _commit_hash tokenizer_class use_cache
initializer_range max_position_embeddings pretraining_tp return_dict output_hidden_states output_attentions torchscript
use_bfloat16 chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset cache_implementation
id2label label2id num_labels problem_type finetuning_task task_specific_params bos_token_id eos_token_id pad_token_id
sep_token_id decoder_start_token_id unsloth_fixed unsloth_version max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
HARMLESS = frozenset(_HARMLESS.split())
# Values that change nothing of keys that a family does not read. So does null, which stands for a key that is not set.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "residual_dropout": (0,),
    "embedding_dropout": (0,),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "partial_rotary_factor": (1,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "tie_last_hidden_states": (False, True),
    "pruned_heads": ({},),
    "quantization_config": (),
}
# What a value can be.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "a number above 0": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "true or false": lambda value: type(value) is bool,
    "a text": lambda value: type(value) is str,
    "a list": lambda value: type(value) is list,
    "a table": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
_COUNT, _NUMBER, _FLAG, _TEXT, _LIST, _TABLE, _NULL = _KINDS
# What the values of keys that families read must be; null stands for a key that is not set.
_MUST_BE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), (_COUNT,)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (_COUNT, _NULL)),
    **dict.fromkeys(("sliding_window_pattern", "original_max_position_embeddings"), (_COUNT,)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), (_NUMBER,)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), (_NUMBER,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (_NUMBER, _NULL)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), (_FLAG,)),
    "use_bidirectional_attention": (_FLAG, _NULL),
    **dict.fromkeys(("hidden_act", "hidden_activation", "rope_type", "type"), (_TEXT, _NULL)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "full_attention", "sliding_attention"), (_TABLE, _NULL)),
    "layer_types": (_LIST, _NULL),
}


class Description(dict[str, Any]):
    """The values of a config.json, or of a table in it. It remembers which of its keys have been read."""

    def __init__(self, values: dict[str, Any], path: Path):
        super().__init__({key: Description(value, path) if isinstance(value, dict) else value for key, value in values.items()})
        self.path = path
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """A value that must be there, and not null."""
        self.used.add(key)
        if (value := super().__getitem__(key)) is None:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)


def read_description(folder: Path) -> Description:
    """The config.json of a folder in Hugging Face's format. Raises UserError, also for values of a wrong type."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"{path}: does not describe a model: it has no model_type")
    description = Description(values, path)
    raise_faults(description, _wrong_kinds(description))
    return description


def raise_faults(description: Description, faults: Iterable[str]) -> None:
    if lines := [f"{description.path}: {fault}" for fault in faults]:
        raise UserError("\n".join(lines))


def _wrong_kinds(table: Description, above: str = "") -> Iterator[str]:
    for key, value in table.items():
        kinds = _MUST_BE.get(key, ())
        if kinds and not any(_KINDS[kind](value) for kind in kinds):
            yield f"{above}{key} = {json.dumps(value)}: must be {' or '.join(kinds)}"
        elif isinstance(value, Description):
            yield from _wrong_kinds(value, f"{above}{key}.")


def unused_keys(table: Description, family: str, above: str = "") -> Iterator[str]:
    """A sentence for each key that `from_hf` has not read and that may change the mathematics."""
    for key, value in table.items():
        neutral = NEUTRAL.get(key, ())
        if key in table.used and isinstance(value, Description):
            yield from unused_keys(value, family, f"{above}{key}.")
        elif not (key in table.used or value is None or key in HARMLESS or value in neutral):
            only = f"only {' and '.join(map(json.dumps, neutral))} or its absence" if neutral else "only its absence or null"
            yield f"{above}{key} = {json.dumps(value)}: {family} does not read this key; {only} is known to change nothing"
