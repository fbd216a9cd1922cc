"""Validates a folder in Hugging Face's format: the safetensors file, shape and dtype of each tensor."""

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import nn

from titanlite.checkpoint.folder import list_steps
from titanlite.checkpoint.tensors import model_tensors
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, listed
from titanlite.ground.untrusted import MIB, Absent, FileName, FileSchema, Unread, read_json, reading, size_of
from titanlite.hf.entries import Entry, dequantize, part_of, stack_of
from titanlite.hf.part import TensorPart
from titanlite.registry.description import read_description
from titanlite.registry.family import Family, described, require_hf
from titanlite.transforms.parameters import is_adapter, tied_names

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors
_QUANTIZED = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}  # parts of quantized tensors
_LIMIT = 128 * MIB  # of the index; that of 90,000 tensors has 9 MiB
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_COMPUTED = ".rotary_emb.inv_freq"  # in old files; computed from the configuration


def their_name(module: ModuleType, name: str) -> str | None:
    """The name of our parameter in Hugging Face's format; None if the family's HF table has none.

    "{e}" in it is the number of an expert: see `each_expert`. It may say which part of a tensor it means: see `TensorPart`.
    """
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    theirs = module.HF.get(f"{name[: number.start()]}{{i}}{name[number.end() :]}" if number else name)
    return theirs.replace("{i}", number[0]) if theirs and number else theirs


def each_expert(theirs: str, shape: Sequence[int]) -> list[TensorPart]:
    """The tensors there that are our parameter of this shape: one for each expert of a stack, or a single one."""
    names = [theirs.replace("{e}", str(expert)) for expert in range(shape[0])] if "{e}" in theirs else [theirs]
    return [TensorPart.of(name) for name in names]


def their_names(family: Family, names: Iterable[str]) -> dict[str, str]:
    """Our parameter name -> theirs. Raises UserError that lists the parameters without an entry in the family's HF table."""
    require_hf(family.module)
    theirs = {name: their_name(family.module, name) for name in names}
    if missing := [name for name, their in theirs.items() if their is None]:
        raise UserError("\n".join(f"{family.module.__name__}: HF has no name for {name}" for name in missing))
    return {name: their for name, their in theirs.items() if their is not None}


def stored_again(family: Family, tied: dict[str, str]) -> dict[str, str]:
    """The names of `tied` that have a tensor of their own in a file: all but that of the tie that config.json knows."""
    known = bool(family.to_hf().get("tie_word_embeddings"))
    return {name: first for name, first in tied.items() if (name, known) != ("head.output.weight", True)}


def find_weights(folder: Path, family: Family, model: nn.Module, exclude: Sequence[str] = ()) -> dict[str, list[Entry]]:
    """The location of each tensor of a model except adapters: our name in checkpoints -> its entry, or all of a tied tensor.

    A parameter that is a tensor for each expert there has one entry, a Stack of theirs.

    model: on any mesh, or on the meta device. exclude: patterns of our names ("model.head.*") to leave out. Raises UserError
    that lists all tensors that are missing, not of this model, or of a wrong shape or dtype, and all missing or damaged files.
    """
    tensors = {name: tensor for name, tensor in model_tensors(model).items() if not is_adapter(name)}
    tied = {f"model.{name}": f"model.{first}" for name, first in tied_names(model).items()}
    theirs = their_names(family, [name.removeprefix("model.") for name in [*tensors, *tied]])
    stored, problems = stored_tensors(folder)
    unused = [pattern for pattern in exclude if not fnmatch.filter(tensors, pattern)]
    problems += [f'checkpoint.exclude_from_loading: "{pattern}" matches no tensor of the model' for pattern in unused]
    weights: dict[str, list[Entry]] = {}
    known: set[str] = set()
    for name in [*tensors, *tied]:
        their, first = theirs[name.removeprefix("model.")], tied.get(name, name)
        shape = tuple(tensors[first].shape)
        parts = each_expert(their, shape)
        known.update(part.name for part in parts)
        if any(fnmatch.fnmatchcase(first, pattern) for pattern in exclude):
            continue
        found = [stored[part.name] for part in parts if part.name in stored]
        if name not in tied:
            problems += [f"{part.name} ({name}): is missing" for part in parts if part.name not in stored]
        stacked = "{e}" in their
        of_each = parts[0].shape(shape[1:] if stacked else shape)
        wrong = [entry for entry in found if entry.shape != of_each]
        problems += [f"{e.name} ({name}): {e.shape} in {e.file.name}, {of_each} in the model" for e in wrong]
        if len(found) == len(parts) and not wrong:
            named = [part_of(entry, part) for entry, part in zip(found, parts, strict=True)]
            weights.setdefault(first, []).append(stack_of(named) if stacked else named[0])
    ignored = [f"*{_COMPUTED}", *getattr(family.module, "unused_in_hf", lambda _: ())(family.config)]
    for name in sorted(stored.keys() - known):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            problems.append(f"{name}: in {stored[name].file.name}, but not in the model")
    if problems:
        raise UserError(listed(f"{folder}: cannot be read as {family.module.__name__}:", problems))
    return weights


def stored_tensors(folder: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a folder by name, and the faults of its files. Raises UserError if the folder has no safetensors, or no
    config.json.

    A quantized tensor, as config.json describes them, is one entry of its name, shape and dtype without quantization.
    """
    known = DTYPES | _QUANTIZED
    entries: dict[str, Entry] = {}
    kinds: dict[str, str] = {}
    problems: list[str] = []
    listed, quantization = _listed(folder), read_description(folder).get("quantization_config")
    for path in sorted({folder / shard for shard in listed.values()}) or [folder / SINGLE]:
        try:
            size_of(path)  # the library would wait for a FIFO
            with reading(path), safe_open(str(path), "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except Unread:  # without its tensors, all of them would be faults
            raise
        except UserError as error:
            problems.append(str(error))
            continue
        except SafetensorError as error:
            problems.append(f"{path}: cannot be read: {error}")
            continue
        problems += [f"{name}: in {entries[name].file.name} and in {path.name}" for name in found.keys() & entries.keys()]
        for name, (shape, kind) in found.items():
            kinds[name] = kind
            entries[name] = Entry(path, name, shape, known.get(kind, torch.float32))
    others = [name for name, shard in listed.items() if name in entries and entries[name].file.name != shard]
    problems += [f"{name}: in {entries[name].file.name}, and {INDEX} says {listed[name]}" for name in others]
    problems += dequantize(entries, quantization) if quantization else []
    for name, entry in entries.items():
        if entry.dtype in _QUANTIZED.values() or kinds.get(name, "F32") not in known:
            here = f"{name}: is stored in {entry.file.name} as {kinds[name]}"
            problems.append(f"{here}, and only {', '.join(DTYPES)} are read, or what quantization_config of config.json says")
    return entries, problems


class _Index(FileSchema):
    """What the index of several safetensors files must hold."""

    weight_map: Annotated[dict[str, Annotated[FileName, Field(pattern=r"\.safetensors$")]], Field(min_length=1)]


def _listed(folder: Path) -> dict[str, str]:
    """Name -> file of each tensor, as the index of a folder says; empty where the folder has a single file."""
    if os.path.lexists(folder / SINGLE):  # as in transformers, this file takes precedence
        return {}
    try:
        return read_json(folder / INDEX, _Index, _LIMIT)["weight_map"]
    except Absent:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        why = f"; {pickles[0]} is a pickle, which could run any code, and is not read" if pickles else ""
        raise UserError(f"{folder}: has neither {SINGLE} nor {INDEX}{why}") from None


# ------------------------------------------------------------------------------------------------------------------ the check


def differences(family: Family, source: Path) -> dict[str, str]:
    """The dimensions in which a family differs from the config.json of a folder, each with both values."""
    there = Family(family.module, described(family.module, read_description(source)))
    ours, theirs = family.dimensions(), there.dimensions()
    return {
        name: f"{name} = {family.shown(name)}, there {there.shown(name)}" for name, now in ours.items() if now != theirs[name]
    }


def faults(config: Config, family: Family) -> Iterator[str]:
    """What prevents a run from reading its weights from Hugging Face's format, or from writing them."""
    cfg, source, model = config.checkpoint, Path(config.checkpoint.initial_load_path), family.on_meta()
    try:
        if cfg.last_save_in_hf:
            their_names(family, [*(name.removeprefix("model.") for name in model_tensors(model)), *tied_names(model)])
            family.to_hf()
    except UserError as error:
        yield f"checkpoint.last_save_in_hf = true: {error}"
    started = bool(list_steps(Path(config.job.dump_folder) / cfg.folder))  # then it is not read any more
    if started or not cfg.initial_load_in_hf:
        return
    try:
        if different := [text for name, text in differences(family, source).items() if name not in config.model.overrides]:
            raise UserError(
                f"config.json has other dimensions than {config.model.title}: {'; '.join(different)}; "
                'model.flavor = "hf" takes those of model.hf_assets_path, and model.overrides changes some'
            )
        find_weights(source, family, model, cfg.exclude_from_loading)
    except UserError as error:
        yield f'checkpoint.initial_load_path = "{source}": {error}'
