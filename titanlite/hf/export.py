"""Exports a checkpoint to a folder that transformers reads. One tensor at a time is in memory, with those of the model that it
joins."""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.tensors import WEIGHTS, is_further, model_tensors
from titanlite.checkpoint.whole import Stored
from titanlite.config.read import stored_config
from titanlite.data.sources import tokenizer_of_run
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.ground.errors import UserError, listed, phase
from titanlite.ground.files import publish, replace_file, split, start_output, unfinished_path, writing
from titanlite.ground.untrusted import FileSchema, Positive, read_json
from titanlite.hf.folder import DTYPES, INDEX, SINGLE, each_expert, stored_again, their_names
from titanlite.hf.part import TensorPart
from titanlite.launch.process import rank_and_world, together
from titanlite.registry.description import LIMIT
from titanlite.registry.family import stored_family, trusted
from titanlite.registry.source import warn_of_changes
from titanlite.transforms.lora import merged
from titanlite.transforms.parameters import tied_names

log = logging.getLogger(__name__)

_CODES = {dtype: code for code, dtype in DTYPES.items()}
# The files of a tokenizer, and the defaults of generation.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
# What an export takes from the config.json beside the tokenizer.
_LENGTH = "max_position_embeddings"
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", _LENGTH)
# How Qwen's tokenizers split a text, a part of the regular expression in transformers' Qwen2Tokenizer.
_QWENS_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"


class _Beside(FileSchema):
    """That config.json, which may be of any architecture, or the generation_config.json."""

    max_position_embeddings: Positive | None = None
    eos_token_id: int | list[int] | None = None


class Item(NamedTuple):
    """A tensor to export."""

    theirs: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, TensorPart]  # names in the model, and what of it these are: usually one, which is all
    expert: int | None = None  # the part of a stack in the model; None: the whole tensor

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor, contiguous. tensors: those of the model, by name."""
        mine = ... if self.expert is None else self.expert
        found = {part: tensors[name][mine] for name, part in self.parts.items()}
        if (whole := found.get(TensorPart(self.theirs))) is not None:
            assert (tuple(whole.shape), whole.dtype) == (self.shape, self.dtype), self
            return whole.contiguous()
        result = torch.empty(self.shape, dtype=self.dtype)
        for part, tensor in found.items():
            view = part.view(result)
            assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype), (self, part)
            view.copy_(tensor)
        return result


def items_of(
    shapes: Mapping[str, tuple[int, ...]], theirs: Mapping[str, str], dtype_of: Callable[[str], torch.dtype]
) -> list[Item]:
    """The tensors to export for those of the model: one for each, one for each expert of a stack, or one for several."""
    items: dict[str, Item] = {}
    for name, shape in shapes.items():
        stacked = "{e}" in theirs[name]
        for expert, part in enumerate(each_expert(theirs[name], shape)):
            size = part.shape(shape[1:] if stacked else shape)
            item = items.setdefault(part.name, Item(part.name, size, dtype_of(name), {}, expert if stacked else None))
            assert (item.shape, item.dtype) == (size, dtype_of(name)), part.name
            item.parts[name] = part
    return list(items.values())


_OPTION = "--assets, in Python assets="  # names the folder of the tokenizer


class Exported:
    """The weights of a checkpoint by their names in the model, with adapters merged, in the dtype of the export.

    dtype: of all floating-point parameters; None: the stored dtypes. assets: replaces the model.hf_assets_path of the run.
    named: the module that the user names as the model's. Raises UserError if the family has changed since the checkpoint was
    saved.
    """

    def __init__(self, stored: Stored, dtype: torch.dtype | None = None, assets: str = "", named: str = ""):
        self.stored, self._dtype, self._given = stored, dtype, assets
        cfg = stored.manifest.numbers["config"].get("model")
        if cfg is None:
            raise UserError(f"{stored.source}: its manifest does not name a model")
        model = trusted(stored_config({"model": cfg}, stored.source), stored.source, named).model
        self.assets = assets or model.hf_assets_path
        self.family = stored_family(model, assets, _OPTION)
        if changed := self.family.changes_since(stored.manifest.numbers["architecture"]):
            raise UserError(listed(f"{stored.source}: {model.title} has changed since it was saved:", changed))
        if rank_and_world()[0] == 0:
            warn_of_changes(stored.source, stored.manifest.numbers.get("model_source"), self.family.module)
        self.model = self.family.on_meta()
        self.tied = tied_names(self.model)  # a checkpoint has each under its first name alone
        self._buffers = dict(self.model.named_buffers())
        self.shapes = {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in model_tensors(self.model).items()}
        weights = [name for name in stored.entries if name.startswith(WEIGHTS) and not is_further(name)]
        if any(map(is_further, stored.entries)) and rank_and_world()[0] == 0:
            log.warning("%s: the modules of training.predict_further are not exported", stored.source)
        weights, self._read = merged(weights, stored.read, stored.manifest.numbers["config"].get("lora", {}))
        there = {name.removeprefix("model."): tuple(stored.entries[name].size) for name in weights}
        if wrong := [name for name in sorted(there.keys() | self.shapes) if there.get(name) != self.shapes.get(name)]:
            lines = [f"{name}: {there.get(name)} in the checkpoint, {self.shapes.get(name)} in the model" for name in wrong]
            raise UserError(listed(f"{stored.source}: does not have the weights of this model:", lines))

    def tokenizer(self) -> LoadedTokenizer | None:
        """The tokenizer of the run; None for an import without one. Raises UserError if it is missing or has changed since."""
        numbers = self.stored.manifest.numbers
        absent = self.assets and not (Path(self.assets) / "tokenizer.json").is_file()
        if absent and not (self._given or numbers["data"].get("tokenizer")):
            return None
        return tokenizer_of_run(self.stored.source, numbers, self.assets, _OPTION)

    def dtype_of(self, name: str) -> torch.dtype:
        """Of an exported weight. A buffer, the bias of a router, loses no precision: transformers has it in float32."""
        stored = self.stored.entries[f"model.{self.tied.get(name, name)}"].properties.dtype
        if self._dtype is None or not stored.is_floating_point:
            return stored
        return torch.promote_types(stored, self._dtype) if name in self._buffers else self._dtype

    def read_tensor(self, name: str) -> Tensor:
        """A whole weight with its adapter merged, in the dtype of the export. name: in the model."""
        tensor = self._read(f"model.{self.tied.get(name, name)}")
        cast = tensor.to(self.dtype_of(name))
        if cast.dtype == torch.float16 and not cast.isfinite().all() and tensor.isfinite().all():
            raise UserError(f"{name}: has values beyond the largest float16, 65504; use bfloat16")
        return cast


@phase("exporting")
def export(
    source: Path,
    output: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 2**30,
    assets: str = "",
    group: dist.ProcessGroup | None = None,
    named: str = "",
    average: bool = False,
) -> list[Path]:
    """Atomically writes a checkpoint as a new folder in Hugging Face's format; returns its safetensors files.

    group: its ranks call this together, and each writes every n-th file; None: one process. shard_bytes: the largest size of a
    file with more than one tensor. named: as for `Exported`. average: as for `Stored`. Raises UserError on all ranks for a
    damaged checkpoint, a model that the format does not support, an existing output, or an error of the disk.
    """
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    unfinished = unfinished_path(output)
    with together(group), writing(output):
        exported = Exported(Stored(source, rank, world, average), dtype, assets, named)
        theirs = their_names(exported.family, [*exported.shapes, *exported.tied])
        again = stored_again(exported.family, exported.tied)
        more = {name: exported.shapes[first] for name, first in again.items()}
        items = items_of(exported.shapes | more, theirs, exported.dtype_of)
        if odd := [item for item in items if item.dtype not in _CODES]:
            lines = [f"{next(iter(item.parts))}: is {item.dtype}, which the format does not support" for item in odd]
            raise UserError("\n".join(dict.fromkeys(lines)))
        tokenizer = exported.tokenizer()
        if rank == 0:
            start_output(output).mkdir()
    parts = split(items, lambda item: item.bytes, shard_bytes)
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)] if len(parts) > 1 else [SINGLE]
    files = dict(zip(names, parts, strict=True))
    with together(group), writing(output):
        for name in names[rank::world]:
            write_file(unfinished / name, files[name], exported.read_tensor)
    with together(group), writing(output):
        if rank == 0:
            if len(files) > 1:
                files_of = {item.theirs: name for name, part in files.items() for item in part}
                total = sum(item.bytes for item in items)
                _write_json(unfinished / INDEX, {"metadata": {"total_size": total}, "weight_map": files_of})
            _describe(unfinished, exported, items, tokenizer)
            publish(unfinished, output)
    return [output / name for name in names]


def write_file(path: Path, items: Sequence[Item], read: Callable[[str], Tensor]) -> None:
    """Writes a safetensors file (https://github.com/huggingface/safetensors#format) tensor by tensor, and syncs it.

    The writer of the library needs all tensors of a file in memory. A stack of experts is read once for all that follow each
    other.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # so that each offset is a multiple of the itemsize
    position = 0
    for item in ordered:
        end = position + item.bytes
        header[item.theirs] = {"dtype": _CODES[item.dtype], "shape": item.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for ours, group in itertools.groupby(ordered, lambda item: tuple(item.parts)):
            tensors = {name: read(name) for name in ours}
            for item in group:
                file.write(item.joined(tensors).reshape(-1).view(torch.uint8).numpy().data)
            del tensors  # before the next ones are read
        file.flush()
        os.fsync(file.fileno())


def _describe(folder: Path, exported: Exported, items: list[Item], loaded: LoadedTokenizer | None) -> None:
    """Writes config.json, and copies or writes the tokenizer's files. transformers makes a generation_config.json that is not
    there from config.json."""
    assets = Path(exported.assets) if exported.assets else None
    if assets:
        for path in [path for name in _COPIED for path in assets.glob(name) if path.is_file()]:
            copy = folder / path.relative_to(assets)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    theirs = exported.family.to_hf()
    if loaded:
        if not assets:
            loaded.tokenizer.save(str(folder / "tokenizer.json"))
        _complete_settings(folder / "tokenizer_config.json", loaded)
        _compare_beginnings(exported.stored.source, loaded, load_tokenizer(str(folder)))
        if theirs.get("model_type") == "qwen2":
            _compare_with_qwens(exported.stored.source, loaded)
    # the defaults of transformers are the ids of other models: of Llama 2, and 0 or 1 for padding, in most vocabularies a text
    facts: dict[str, Any] = {"bos_token_id": None, "eos_token_id": loaded.end_of_text if loaded else None, "pad_token_id": None}
    if assets and os.path.lexists(assets / "config.json"):
        beside = read_json(assets / "config.json", _Beside, LIMIT)
        # a null stays one, unless the tokenizer says more
        facts |= {name: beside.get(name) for name in _CARRIED if beside.get(name) is not None or name in beside.keys() - facts}
    facts["eos_token_id"] = _with_end("config.json", facts["eos_token_id"], loaded)
    generation: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # there is none, or a broken one, which transformers ignores
        generation = read_json(folder / "generation_config.json", _Beside, LIMIT)
    ends = _with_end("generation_config.json", generation.get("eos_token_id"), loaded)
    if ends != generation.get("eos_token_id"):
        _write_json(folder / "generation_config.json", generation | {"eos_token_id": ends})
    length = exported.stored.manifest.numbers["config"].get("training", {}).get("seq_len", 0)
    if length > (facts.get(_LENGTH) or 0):  # also where training has made the context of its pretrained model longer
        if assets and not facts.get(_LENGTH):  # its model's context may be longer
            why = "from training.seq_len: model.hf_assets_path has no config.json with this key at its top level"
            log.warning("%s: %s = %d, %s", exported.stored.source, _LENGTH, length, why)
        facts[_LENGTH] = length
    largest = max(items, key=lambda item: item.bytes)
    dtype = {"torch_dtype": str(largest.dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", facts | theirs | dtype)


def _complete_settings(path: Path, loaded: LoadedTokenizer) -> None:
    """Names in a tokenizer_config.json its class and the end of texts, where it does not: AutoTokenizer then takes a class of
    the model's type, which tokenizes otherwise, or has no end of texts.
    """
    theirs = read_json(path, FileSchema, LIMIT) if path.is_file() else {}
    needed = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": loaded.tokenizer.id_to_token(loaded.end_of_text)}
    if lacking := {name: value for name, value in needed.items() if theirs.get(name) is None}:
        _write_json(path, theirs | lacking)


def _with_end(file: str, ids: int | list[int] | None, loaded: LoadedTokenizer | None) -> int | list[int] | None:
    """The eos_token_id of a file, if it has one, with the end of the run's texts, at which titanlite's generation stops too."""
    named = ids if isinstance(ids, list) else [ids]
    if ids is None or loaded is None or loaded.end_of_text in named:
        return ids
    log.info("%s: eos_token_id gets %s too, which ends the texts of the run", file, loaded.spelled([loaded.end_of_text]))
    return [*named, loaded.end_of_text]


def _compare_beginnings(source: Path, of_run: LoadedTokenizer, written: LoadedTokenizer) -> None:
    """Warns where the tokenizer's files begin a text otherwise than the run did: they do not hold training.add_bos."""
    if of_run.beginning == written.beginning:
        return
    ours, theirs = (loaded.spelled(loaded.beginning) for loaded in (of_run, written))
    prompts = f"begin each prompt with {ours}" if of_run.beginning else "tokenize prompts with add_special_tokens=False"
    log.warning(
        "%s: the texts of the run begin with %s, and the exported tokenizer begins them with %s. With transformers, %s; "
        "in a titanlite run from this export, set training.add_bos = %s",
        source, ours, theirs, prompts, json.dumps(of_run.add_bos),
    )  # fmt: skip


def _compare_with_qwens(source: Path, loaded: LoadedTokenizer) -> None:
    """Warns where a tokenizer splits texts otherwise than Qwen's."""
    split = loaded.tokenizer.pre_tokenizer
    if split is None or json.dumps(_QWENS_SPLIT)[1:-1] not in split.__getstate__().decode():
        log.warning(
            "%s: AutoTokenizer of transformers 5 reads every tokenizer of a qwen2 as Qwen's, which splits numbers and spaces "
            "otherwise than that of the run. Use PreTrainedTokenizerFast.from_pretrained; for servers and lm-eval, copy the "
            "tokenizer's files to a folder without config.json, and name it as the tokenizer",
            source,
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=2) + "\n")
