"""Every kind of file that others may have written: a valid one, and what a command reads from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file

from models import gemma3, llama3, qwen3_moe
from models.rope import LongRopeScaling, YarnScaling
from tests.token_files import write_file
from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import step_folder
from titanlite.checkpoint.load import intact
from titanlite.checkpoint.manifest import FileDigest, Manifest
from titanlite.checkpoint.storage import METADATA, Writer, read_metadata, tensor_entries
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.read import read_config, stored_config
from titanlite.config.schema import Config, Source
from titanlite.data.indexed import TokenFile
from titanlite.data.prepare import documents, encode, prepare
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.readers import Bad, describe_location, read, where
from titanlite.data.sources import open_source
from titanlite.data.timeline import begin, stored
from titanlite.data.tokenizer import describe, load_tokenizer, tokenizer_digest
from titanlite.ground.errors import UserError
from titanlite.ground.run_files import read_entries, read_reports, read_starts
from titanlite.ground.untrusted import MIB, read_toml
from titanlite.hf.folder import INDEX, SINGLE, find_weights, their_names
from titanlite.loop.divergence import rollbacks
from titanlite.registry.family import load_family
from titanlite.tools.convert_config import convert
from titanlite.tools.open_model import recognize

Change = Callable[[Any], None]


def _same(content: bytes) -> bytes:
    return content


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of file.

    file: its path in the folder into which `write` writes everything that `read` needs in its working folder. limit: bytes, 0
    if there is none. lines: .jsonl. optional: the file may be missing. any_text: every text is valid. cut_is_right: a truncated
    file may be valid. sealed: no changed bit is accepted. named: a pattern of what a message names, if not the file.
    right_texts: valid JSON texts. contradictions: changes of valid JSON that must be refused. unsealed, sealed_again: remove
    and write a checksum.
    """

    title: str
    file: str
    write: Callable[[Path], object]
    read: Callable[[], Any]
    limit: int = 0
    json: bool = True
    text: bool = True
    lines: bool = False
    optional: bool = False
    empty_is_right: bool = False
    any_text: bool = False
    cut_is_right: bool = False
    sealed: bool = False
    keys_may_repeat: bool = False
    named: str = ""
    right_texts: Sequence[str] = ()
    contradictions: dict[str, Change] = field(default_factory=dict)
    unsealed: Callable[[bytes], bytes] = _same
    sealed_again: Callable[[bytes], bytes] = _same


def _set(*place: str | int, value: Any) -> Change:
    def change(values: Any) -> None:
        for key in place[:-1]:
            values = values[key]
        values[place[-1]] = value

    return change


def _dump(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


# --------------------------------------------------------------------------------------------------------- configurations

_TOML = '[training]\nsteps = 10\nseq_len = 64\n\n[model]\nname = "llama3"\nflavor = "debug"\n'


def _write_configuration(folder: Path) -> None:
    (folder / "below.toml").write_text(_TOML)
    (folder / "run.toml").write_text('base = "below.toml"\n' + _TOML)


CONFIGURATIONS = [
    Kind(f"configuration {name}", name, _write_configuration, lambda: read_config("run.toml", []).model_dump(), MIB // 4,
         json=False, cut_is_right=True, empty_is_right=True, named=r"\.toml")
    for name in ("run.toml", "below.toml")
] + [
    Kind("configuration of torchtitan", "below.toml", _write_configuration, lambda: convert(read_toml("below.toml")), MIB // 4,
         json=False, cut_is_right=True, empty_is_right=True, named=r"\.toml")
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ Hugging Face

_SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96, "vocab_size": 512}
_SCALING = llama3.Llama3Scaling(8.0, 1.0, 4.0, 16)
_BY_LENGTH = LongRopeScaling((1.0,) * 8, (2.0,) * 8, 16, factor=4.0)
_MIXTURE = {**{key: value for key, value in _SMALL.items() if key != "ffn_dim"}, "expert_dim": 16, "n_experts": 4, "top_k": 2}
_FAMILIES = {
    "llama": (llama3, llama3.Config(**_SMALL, rope_scaling=_SCALING)),
    "gemma3": (gemma3, gemma3.Config(**_SMALL, window=4, query_scalar=16, global_every=2)),
    "qwen3_moe": (qwen3_moe, qwen3_moe.Config(**_MIXTURE)),
    "llama with YaRN": (llama3, llama3.Config(**_SMALL, rope_scaling=YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.5))),
    "llama with longrope": (llama3, llama3.Config(**_SMALL, rope_scaling=_BY_LENGTH)),
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0,
             "original_max_position_embeddings": 16}  # fmt: skip
_MODEL_CONTRADICTIONS = {
    "head_dim of 15": _set("head_dim", value=15),
    "3 kv heads for 4 heads": _set("num_key_value_heads", value=3),
    "10^7 layers": _set("num_hidden_layers", value=10**7),
    "true layers": _set("num_hidden_layers", value=True),
    "no layers": _set("num_hidden_layers", value=0),
    "a negative width": _set("hidden_size", value=-64),
    "a width of 10^12": _set("hidden_size", value=10**12),
    "an eps that is no number": _set("rms_norm_eps", value=float("nan")),
    "a theta of 0": _set("rope_theta", value=0),
    "another family": _set("model_type", value="mamba"),
    "a key that nobody reads": _set("embedding_multiplier", value=3.0),
    "an activation that nobody has": _set("hidden_act", value="swish"),
    "biases": _set("attention_bias", value=True),
    "YaRN that keeps less than it divides": _set("rope_scaling", value=_YARN | {"beta_fast": 1, "beta_slow": 32}),
    "YaRN that removes attention": _set("rope_scaling", value=_YARN | {"attention_factor": 0}),
    "half of two mscales": _set("rope_scaling", value=_YARN | {"mscale": 1.0}),
    "longrope of 2 factors": _set("rope_scaling", value=_LONGROPE | {"short_factor": [1.0] * 2}),
    "a scaling that nobody has": _set("rope_scaling", value=_YARN | {"rope_type": "su"}),
    "a dynamic scaling that shrinks": _set("rope_scaling", value={"rope_type": "dynamic", "factor": 0.5}),
}


def _dimensions() -> Any:
    return recognize(Path()).family.dimensions()


def _describes(name: str) -> Callable[[Path], None]:
    module, config = _FAMILIES[name]
    return lambda folder: _dump(folder / "config.json", module.to_hf(config))


MODELS = [
    Kind(f"{name}'s config.json", "config.json", _describes(name), _dimensions, 16 * MIB, contradictions=_MODEL_CONTRADICTIONS)
    for name in _FAMILIES
]


def _write_weights(folder: Path) -> None:
    """The weights of tests.tiny in two files with an index, and in one file in single/."""
    family = load_family("tests.tiny", "plain")
    tensors = {name.removeprefix("model."): torch.zeros(t.shape) for name, t in model_tensors(family.on_meta()).items()}
    theirs = their_names(family, tensors)
    weights = {theirs[name]: tensor for name, tensor in tensors.items()}
    names = sorted(weights)
    places = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    for described in (folder, folder / "single"):
        _dump(described / "config.json", family.module.to_hf(family.config))
    _dump(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": dict(list(places.items())[::-1])})
    save_file(weights, folder / "single" / SINGLE)
    quantized = {name: tensor.to(torch.float8_e4m3fn) if "_proj" in name else tensor for name, tensor in weights.items()}
    scales = {
        f"{name}_scale_inv": torch.ones(*(-(-size // 48) for size in tensor.shape))
        for name, tensor in quantized.items()
        if "_proj" in name
    }
    _dump(folder / "float8" / "config.json", family.module.to_hf(family.config) | {"quantization_config": _FLOAT8})
    save_file(quantized | scales, folder / "float8" / SINGLE)


def _weights(folder: str = "") -> Any:
    family = load_family("tests.tiny", "plain")
    found = find_weights(Path(folder), family, family.on_meta())
    return {name: [(entry.file.name, entry.shape) for entry in entries] for name, entries in found.items()}


_FIRST = "model.norm.weight"
_FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 48],
           "modules_to_not_convert": ["lm_head"]}  # fmt: skip
WEIGHTS = [
    Kind("index of safetensors", INDEX, _write_weights, _weights, 128 * MIB, contradictions={
        "another file": _set("weight_map", _FIRST, value="model-00001-of-00002.safetensors"),
        "a file that is missing": _set("weight_map", _FIRST, value="model-00003-of-00002.safetensors"),
        "a file above": _set("weight_map", _FIRST, value="../model.safetensors"),
        "an absolute file": _set("weight_map", _FIRST, value="/etc/passwd"),
        "a pickle": _set("weight_map", _FIRST, value="pytorch_model.bin"),
        "no tensors": _set("weight_map", value={}),
        "a zero byte": _set("weight_map", _FIRST, value="a\0.safetensors"),
    }, named="model"),
    Kind("part of safetensors", "model-00001-of-00002.safetensors", _write_weights, _weights, json=False, text=False,
         named="model"),
    Kind("safetensors", f"single/{SINGLE}", _write_weights, lambda: _weights("single"), json=False, text=False, named="model"),
    Kind("float8 safetensors", f"float8/{SINGLE}", _write_weights, lambda: _weights("float8"), json=False, text=False,
         named="model"),
    Kind("config.json of float8", "float8/config.json", _write_weights, lambda: _weights("float8"), 16 * MIB, contradictions={
        "another method": _set("quantization_config", "quant_method", value="gptq"),
        "the other method": _set("quantization_config", "quant_method", value="mxfp4"),
        "another format": _set("quantization_config", "fmt", value="e5m2"),
        "scales of activations": _set("quantization_config", "activation_scheme", value="static"),
        "a block of nothing": _set("quantization_config", "weight_block_size", value=[48, 0]),
        "another block": _set("quantization_config", "weight_block_size", value=[16, 16]),
        "no block": _set("quantization_config", "weight_block_size", value=None),
        "an entry that nobody reads": _set("quantization_config", "rotation", value="hadamard"),
        "no quantization": _set("quantization_config", value=None),
    }, named="float8"),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- tokenizers

_WORDS = ["def add(a, b):\n    return a + b\n", "a few words of text"]
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}"


def _write_tokenizer(folder: Path) -> None:
    train_tokenizer(_WORDS).save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|endoftext|>",
        "bos_token": {"content": "<|endoftext|>", "lstrip": False},
        "model_max_length": 10,
    }
    _dump(folder / "tokenizer_config.json", settings | {"chat_template": [{"name": "default", "template": _TEMPLATE}]})
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _tokenizer() -> Any:
    loaded, template = load_tokenizer("."), load_template(".")
    return tokenizer_digest(loaded), loaded.end_of_text, loaded.bos, template and template.source


def _write_settings(folder: Path) -> None:
    """Without the file that would replace the template of the settings."""
    _write_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()


def _without_end(values: Any) -> None:
    values["added_tokens"].clear()
    del values["model"]["vocab"]["<|endoftext|>"]


TOKENIZERS = [
    Kind("tokenizer.json", "tokenizer.json", _write_tokenizer, _tokenizer, 512 * MIB, keys_may_repeat=True, contradictions={
        "an id of 4 billion": _set("model", "vocab", "a", value=2**32 - 1),
        "no end of text": _without_end,
        "another model": _set("model", "type", value="Anything"),
        "a merge of nothing": _set("model", "merges", value=[["xx", "yy"]]),
    }),
    Kind("tokenizer_config.json", "tokenizer_config.json", _write_settings, _tokenizer, 512 * MIB, optional=True,
         right_texts=("{}",), contradictions={
        "an end of text that is no token": _set("eos_token", value="<none>"),
        "a template without a name": _set("chat_template", value=[{"template": "x"}]),
    }),
    Kind("chat template", "chat_template.jinja", _write_tokenizer, _tokenizer, 4 * MIB, json=False, optional=True,
         empty_is_right=True, any_text=True),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ token files


def _write_tokens(folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text(f"text {number} " * 20)
    loaded = describe(train_tokenizer(_WORDS), None, "test")
    options: dict[str, Any] = {"append_eos": True, "workers": 1, "shard_tokens": 100, "on_error": "fail"}
    prepare.prepare([str(folder / "text")], folder / "tokens", loaded, **options)
    losses = [[True] * 5, [False] * 7]
    (folder / "foreign").mkdir()
    write_file(folder / "foreign" / "a", [range(5), range(7)], losses=losses)


def _tokens() -> Any:
    loaded = describe(train_tokenizer(_WORDS), None, "test")
    source = open_source(Source(path="tokens"), "training.dataset_path", loaded, "", 4096)
    lengths = [file.document_lengths().tolist() for file in source.files]
    return source.fingerprint, lengths


def _foreign() -> Any:
    file = TokenFile(Path("foreign/a"))
    return file.tokens, file.document_lengths().tolist()


TOKENS = [
    Kind("manifest of tokens", "tokens/manifest.json", _write_tokens, _tokens, 1024 * MIB, named="tokens", contradictions={
        "more documents": _set("documents", value=4),
        "more tokens": _set("tokens", value=10**6),
        "a shard above": _set("shards", 0, "name", value="../text"),
        "no shards": _set("shards", value=[]),
        "format 2": _set("format", value=2),
        "another tokenizer": _set("tokenizer", value="8f0e"),
        "ids that the model lacks": _set("largest_id", value=2**20),
    }),
    Kind("index of tokens", "tokens/00000.idx", _write_tokens, _tokens, json=False, text=False, named="00000"),
    Kind("tokens", "tokens/00000.bin", _write_tokens, _tokens, json=False, text=False, named="00000"),
    Kind("foreign index", "foreign/a.idx", _write_tokens, _foreign, json=False, text=False, named="foreign/a"),
    Kind("foreign losses", "foreign/a.loss", _write_tokens, _foreign, json=False, text=False),
]  # fmt: skip


def _write_unfinished(folder: Path) -> None:
    plan = {"format": 2, "text key": "text", "inputs": [["/a.txt", 10, "7", [["text", 0, 0, 10]]]]}
    _dump(folder / "plan.json", plan)
    skipped = [{"file": "/a.jsonl", "line": 3, "reason": "not JSON"}]
    _dump(folder / "record.json", {"documents": [3], "tokens": [90], "chats": False, "skipped": skipped})
    _dump(folder / "state.json", {"_fingerprint": "8f0e", "_split": "train", "_data_files": [{"filename": "a.arrow"}]})
    (folder / "data.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (folder / "units").mkdir()


def _plan() -> Any:
    plan = {"format": 2, "text key": "text", "inputs": [["/a.txt", 10, "7", [["text", 0, 0, 10]]]]}
    prepare._begin_or_continue(plan, Path())


def _documents() -> Any:
    found = []
    for part in (part for entry in documents.list_inputs(["data.jsonl"]) for part in entry.parts):
        for document in read(part, "text"):
            if isinstance(document, Bad):
                raise UserError(f"{describe_location(*where(part, document.location))}: {document.reason}")
            found.append(document.content)
    return found


PREPARED = [
    Kind("plan of tokenize", "plan.json", _write_unfinished, _plan, 1024 * MIB, optional=True, named=r"plan\.json|unfinished"),
    Kind("record of a unit", "record.json", _write_unfinished, lambda: encode.open_record(Path()), 1024 * MIB),
    Kind("state of a dataset", "state.json", _write_unfinished, lambda: documents._find_dataset("."), 64 * MIB),
    Kind("lines of JSON", "data.jsonl", _write_unfinished, _documents, lines=True, empty_is_right=True, keys_may_repeat=True),
]


# ------------------------------------------------------------------------------------------------------ runs, checkpoints

_SOURCE = {"name": "a", "documents": 3, "tokens": 90, "fingerprint": "8f", "share": 1.0}
_NUMBERS: dict[str, Any] = {
    "step": 10,
    "samples": 80,
    "global_batch": 8,
    "data": {"tokenizer": "8f0e", "beginning": "no BOS", "sources": [_SOURCE]},
    "timeline": begin(8, [("8f", 1)]).numbers(),
    "schedule": {"total_steps": 20},
    "architecture": {"dim": 64, "rope_scaling": None},
    "model_source": {"models.llama3": {"hash": "8f", "text": "import torch"}},
    "config": Config().model_dump(),
    "loss_sum": 3.5,
    "loss_count": 1,
}  # fmt: skip
_STEP = step_folder(Path(), 10)


def _write_checkpoint(folder: Path) -> None:
    def commit(files: dict[str, FileDigest]) -> None:
        manifest.write(folder / _STEP, Manifest(_NUMBERS, files))

    tensors = {"model.weight": torch.arange(12.0).reshape(3, 4), "model.bias": torch.arange(3.0)}
    dcp.save(tensors, storage_writer=Writer(folder / _STEP, _STEP.name, commit), no_dist=True)


def _stored() -> Any:
    found, _ = intact(_STEP)
    manifest.check_run(_STEP, found)
    used = {name: found.numbers.get(name) for name in ("step", "samples", "global_batch", "schedule", "loss_sum")}
    timeline, config = stored(found.numbers, str(_STEP)), stored_config(found.numbers["config"], _STEP)
    return used, timeline, found.numbers["data"]["sources"], found.files, config


def _stored_tensors() -> Any:
    found = manifest.read(_STEP)
    return {name: tuple(entry.size) for name, entry in tensor_entries(read_metadata(_STEP, found.files)).items()}


def _unsealed(content: bytes) -> bytes:
    values = json.loads(content)
    del values["xxh3_128"]
    return json.dumps(values).encode()


def _sealed(content: bytes) -> bytes:
    """A manifest with these values, as a knowledgeable attacker would forge it."""
    try:
        body = json.dumps(json.loads(content), indent=1)
    except (ValueError, RecursionError):
        return content
    return f'{body[:-2]},\n "xxh3_128": "{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'.encode()


CHECKPOINTS = [
    Kind("manifest of a checkpoint", f"{_STEP}/manifest.json", _write_checkpoint, _stored, 64 * MIB, sealed=True,
         named=_STEP.name, unsealed=_unsealed, sealed_again=_sealed, contradictions={
        "a timeline to another sample": _set("timeline", 0, "first_sample", value=8),
        "another source": _set("timeline", 0, "sources", 0, "fingerprint", value="9a"),
        "a file above": _set("files", "../x", value={"bytes": 1, "xxh3_128": "8f" * 16}),
        "an absolute file": _set("files", "/x", value={"bytes": 1, "xxh3_128": "8f" * 16}),
        "a step of another folder": _set("step", value=11),
        "a short checksum": _set("files", ".metadata", "xxh3_128", value="8f"),
        "a file of negative size": _set("files", ".metadata", "bytes", value=-1),
        "a share of 2": _set("data", "sources", 0, "share", value=2.0),
        "a schedule of no steps": _set("schedule", "total_steps", value=0),
        "a section that is a number": _set("config", "model", value=5),
        "no section of checkpoints": lambda values: values["config"].pop("checkpoint") and None,
        "a key of another type": _set("config", "training", "steps", value="many"),
        "format 4": _set("format", value=4),
    }),
    Kind("metadata of a checkpoint", f"{_STEP}/{METADATA}", _write_checkpoint, _stored_tensors, 16 * 1024 * MIB, json=False,
         text=False),
]  # fmt: skip


def _write_run(folder: Path) -> None:
    report = {"step": 1, "loss": 3.5, "grad_norm": None, "tokens_per_second": 100.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(report | {"step": step}) + "\n" for step in (1, 2)))
    incident = {"kind": "rollback", "step": 7, "attempt": 1, "loss": None, "samples": [48, 56], "action": "rollback"}
    incident |= {"superseded": False, "text": "step 7", "found_at": 8, "to_step": 5, "next_sample": 56}
    (folder / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    start = {"time": "2026", "command": ["titanlite", "train"], "global_batch": 8, "model_source": None, "git": None}
    _dump(folder / "provenance.json", [start])


RUNS = [
    Kind("metrics", "metrics.jsonl", _write_run, lambda: [r["step"] for r in read_reports(Path("metrics.jsonl"))], lines=True,
         optional=True, empty_is_right=True),
    Kind("incidents", "incidents.jsonl", _write_run, lambda: rollbacks(read_entries(Path("incidents.jsonl"))), lines=True,
         optional=True, empty_is_right=True, contradictions={
        "a rollback without its place": lambda values: values.pop("to_step") and None,
        "a kind that nobody has": _set("kind", value="surprise"),
    }),
    Kind("provenance", "provenance.json", _write_run, lambda: [s.get("global_batch") for s in read_starts(Path())], 2048 * MIB,
         optional=True, right_texts=("[]",)),
]  # fmt: skip

KINDS = [*CONFIGURATIONS, *MODELS, *WEIGHTS, *TOKENIZERS, *TOKENS, *PREPARED, *CHECKPOINTS, *RUNS]
assert len({kind.title for kind in KINDS}) == len(KINDS)
