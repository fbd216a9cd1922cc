"""What `titanlite check-model` checks without training: tables, constructor, FLOPs, Hugging Face.

Each function takes a family with its flavor and returns the faults as sentences.
"""

import dataclasses
import importlib.util
import inspect
import json
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from models.attention import SeqInfo
from models.blocks import Constant
from models.head import SIZES, Head
from titanlite.checkpoint.tensors import model_tensors
from titanlite.hf.folder import each_expert, stored_again, their_name
from titanlite.parallel.tensor import sharding_faults, undivided_sizes
from titanlite.registry.family import Family
from titanlite.transforms.initialize import fill, match_initial, named_tensors
from titanlite.transforms.libraries import silence_imports
from titanlite.transforms.parameters import every_layer, match_table, tied_names

SEQ_LEN = 32
SMALL = 20_000_000  # only models with fewer parameters are built in memory
LOGITS = 1e-4  # tolerance for logits against transformers, relative to the largest one


def size_of(family: Family) -> int:
    """Parameters of the model."""
    return sum(parameter.numel() for parameter in family.on_meta().parameters())


# ------------------------------------------------------------------------------------------------------- building, tables


def construction_faults(family: Family) -> list[str]:
    family.dimensions()  # raises UserError for a value that no checkpoint can keep
    model = family.on_meta()
    lacking = [part for part in ("embed", "layers", "head") if not hasattr(model, part)]
    faults = [f"Model lacks {part}; models/llama3.py shows it" for part in lacking]
    for name, parameter in model.named_parameters():
        if not parameter.is_meta or parameter.dtype != torch.float32:
            faults.append(f"{every_layer(name)} is {parameter.dtype} on {parameter.device}, and must be float32 on meta")
    for path, module in model.named_modules():
        for key in (key for key, value in vars(module).items() if isinstance(value, Tensor)):
            name = every_layer(f"{path}.{key}")
            faults.append(f"{name} is a tensor but no parameter, and is lost on meta: compute it in forward")
    return list(dict.fromkeys(faults))


def table_faults(family: Family) -> list[str]:
    return sharding_faults(family.on_meta(), family, 1)


def initial_faults(family: Family) -> list[str]:
    return match_initial(family.on_meta(), family)[1]


def undivided_faults(family: Family) -> list[str]:
    """Sizes that tensor parallelism over 2 ranks does not divide."""
    model = family.on_meta()
    if undivided := undivided_sizes(family, model, 2):
        return [f"2 ranks of tensor parallelism cannot share {', '.join(undivided)}"]
    return [fault for fault in sharding_faults(model, family, 2) if fault not in sharding_faults(model, family, 1)]


def constructor_faults(family: Family) -> list[str]:
    """Parameters and buffers that a constructor sets to other values than `initial`: they are lost on meta.

    What modules of torch.nn set by themselves does not count, and random values only have to have the same mean and deviation.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills the result of torch.empty with NaN, or with the largest integer
    try:
        with _NoDefaults():
            model = family.build()
    finally:
        torch.use_deterministic_algorithms(before)
    distributions, _ = match_initial(model, family)
    lost = {}
    for name, tensor in named_tensors(model):
        values = tensor.detach()
        empty = values.isnan() if values.is_floating_point() else values == _fill_value(values.dtype)
        if name in distributions and not empty.all():
            initial = values.clone()
            fill(initial, name, distributions[name], 0)
            if not _explains(distributions[name], initial[~empty], values[~empty]):
                lost[every_layer(name)] = distributions[name]
    lines = [f"{name}: what the constructor sets is lost on meta, and initial makes it {lost[name]}" for name in lost]
    return [f"{line}; give initial an entry for it, or compute it in forward" for line in lines]


class _NoDefaults(TorchFunctionMode):
    """Skips what the `reset_parameters` of modules of torch.nn do to their tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init gives it by name
        if getattr(func, "__name__", "").endswith("_") and isinstance(target, nn.Parameter):
            frame = inspect.currentframe()
            while frame is not None:
                code = frame.f_code
                if code.co_name.lstrip("_") == "reset_parameters" and code.co_filename.startswith(_TORCH_NN):
                    return target
                frame = frame.f_back
        return func(*args, **kwargs)


_TORCH_NN = os.path.dirname(inspect.getfile(nn))


def _explains(distribution: Any, initial: Tensor, values: Tensor) -> bool:
    """Whether values of a constructor may be those of a distribution, of which `initial` is another draw."""
    if isinstance(distribution, Constant) or values.unique().numel() < 2:
        return torch.equal(initial, values)
    mean, deviation = initial.double().mean(), initial.double().std()
    error = 6 * deviation / values.numel() ** 0.5  # of the mean; of the deviation it is smaller
    return bool(
        (values.double().mean() - mean).abs() <= 2 * error
        and (values.double().std() - deviation).abs() <= 2 * error + 0.2 * deviation
    )


def _fill_value(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def initial_remark(family: Family) -> str:
    """What the last pattern, "*", catches: a parameter that was forgotten is among it."""
    table = family.module.initial(family.config)
    if not table or list(table)[-1] != "*":
        return ""
    names = [name for name, _ in named_tensors(family.on_meta())]
    others, _ = match_table({pattern: how for pattern, how in table.items() if pattern != "*"}, names, "initial")
    caught = dict.fromkeys(every_layer(name) for name in names if name not in others)
    return f'"*" gives {table["*"]} to {", ".join(caught)}'


# ----------------------------------------------------------------------------------------------------------------- FLOPs


def flops_faults(family: Family) -> list[str]:
    """`flops` against PyTorch's count: three forward passes, with attention over the whole sequence as PaLM counts it.

    A large model whose forward pass reads values, which meta tensors do not have, is not counted; the small one has the same
    formula.
    """
    function = inspect.unwrap(family.module.flops).__code__
    function_at = f"flops ({function.co_filename}, line {function.co_firstlineno})"
    says, of_one = family.module.flops(family.config, SEQ_LEN), family.module.flops(family.config, 1)
    faults = []
    if says.causal > says.palm:
        faults.append(f"{function_at}: causal {says.causal:,.0f} is more than palm {says.palm:,.0f}")
    if of_one.causal != of_one.palm:
        faults.append(f"{function_at}: for one token causal {of_one.causal:,.0f} and palm {of_one.palm:,.0f} must be equal")
    try:
        counts = _count(family, torch.device("meta"))
    except Exception:
        if size_of(family) >= SMALL:
            return faults
        counts = _count(family, torch.device("cpu"))
    total = counts.pop("Global")
    if abs(says.palm - total) > 1e-6 * total:
        parts = ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())
        faults.append(f"{function_at}: palm says {says.palm:,.0f} a token, PyTorch counts {total:,.0f}: {parts}")
    return faults


def _count(family: Family, device: torch.device) -> dict[str, float]:
    """FLOPs per token, forward and backward: of the model ("Global"), and of each part over all layers.

    The head computes the loss, as in training, where a fork may do more than for logits. No parameter requires a gradient, so
    that it computes none in the same pass; that gradients are enabled is what it sees of training.
    """
    with device:
        model = family.build().requires_grad_(False)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
        seq = SeqInfo(torch.arange(SEQ_LEN)[None])
    for head in (module for module in model.modules() if isinstance(module, Head)):
        head.sizes = SIZES["cpu"]  # there are none for meta
    # the counter knows no CPU attention kernel; the math kernel consists of matmuls
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.head(model(tokens, seq), tokens)
    flops: dict[str, float] = {}
    for name, counts in counter.get_flop_counts().items():
        # "Global", "Model.head", "Model.layers.0.attention"
        if name == "Global" or name.count(".") == 3 or (name.count(".") == 1 and not name.endswith(".layers")):
            part = every_layer(name.partition(".")[2] or name)
            flops[part] = flops.get(part, 0) + 3 * sum(counts.values()) / SEQ_LEN
    return flops


# ---------------------------------------------------------------------------------------------------------- Hugging Face


def name_faults(family: Family) -> list[str]:
    """Parameters without a name in HF or with the name of another, and fields of the configuration that a round trip loses."""
    names = {name: their_name(family.module, name) for name, _ in family.on_meta().named_parameters()}
    faults = [f"HF has no name for {every_layer(name)}" for name, theirs in names.items() if theirs is None]
    owners: dict[str, str] = {}
    for name, theirs in names.items():
        if theirs is not None and (owner := owners.setdefault(theirs, name)) != name:
            faults.append(f"HF gives {every_layer(name)} and {every_layer(owner)} the same name, {every_layer(theirs)}")
    back = family.module.from_hf(json.loads(json.dumps(family.module.to_hf(family.config))))
    for field in dataclasses.fields(family.config):
        before, after = getattr(family.config, field.name), getattr(back, field.name)
        if before != after and field.name != "mup_base_dim":  # changes no result of the model
            faults.append(f"from_hf(to_hf(config)).{field.name} is {after!r}, and was {before!r}")
    return list(dict.fromkeys(faults))


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def shape_faults(family: Family) -> list[str]:
    """Parameters and stored buffers whose name or shape differs in transformers' model of this configuration."""
    with torch.device("meta"):
        theirs = tensors_of_files(_transformers_model(family))
    faults, named = [], set()
    stored = stored_tensors_of(model := family.on_meta())
    again = stored_again(family, tied_names(model))
    for name, tensor in (stored | {name: stored[first] for name, first in again.items()}).items():
        their = str(their_name(family.module, name))
        for part in each_expert(their, tensor.shape):
            counterpart = theirs.get(part.name)
            named.add(part.name)
            shape = part.shape(tensor.shape[1:] if "{e}" in their else tensor.shape)
            if counterpart is None:
                faults.append(f"HF: transformers' model has no {every_layer(part.name)}, for {every_layer(name)}")
            elif counterpart.shape != shape:
                faults.append(f"{every_layer(name)} is {shape} here, {tuple(counterpart.shape)} in transformers' model")
    faults += [f"HF leaves out {every_layer(name)} of transformers' model" for name in theirs if name not in named]
    return list(dict.fromkeys(faults))


@torch.no_grad()
def logit_faults(family: Family) -> list[str]:
    """With the same weights, in float32, transformers' model of this configuration must give the same logits."""
    generator = torch.Generator().manual_seed(0)
    theirs, ours = _transformers_model(family).float().eval(), family.build().eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.1, generator=generator).add_(parameter.ndim == 1)
    weights, (distributions, _) = tensors_of_files(theirs), match_initial(ours, family)
    for names in tied_names(ours).items():  # theirs has a tensor for each, as an export has
        of_name, of_first = (weights.get(their_name(family.module, name) or "") for name in names)
        if of_name is not None and of_first is not None:
            of_name.copy_(of_first)
    for name, buffer in ours.named_buffers():
        fill(buffer, name, distributions[name], 0)
    for name, tensor in stored_tensors_of(ours).items():
        their = their_name(family.module, name) or ""
        parts = [part.view(weights[part.name]) for part in each_expert(their, tensor.shape)]
        tensor.copy_(torch.stack(parts) if "{e}" in their else parts[0])
    tokens = torch.randint(family.config.vocab_size, (2, SEQ_LEN), generator=generator)
    logits = ours.head(ours(tokens, SeqInfo(torch.arange(SEQ_LEN).expand(2, SEQ_LEN))))
    expected = theirs(tokens).logits
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    if difference < LOGITS:
        return []
    return [f"logits differ from those of transformers' model by {difference:.1e} of the largest"]


def stored_tensors_of(ours: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the model; a tied parameter once."""
    return {name.removeprefix("model."): tensor for name, tensor in model_tensors(ours).items()}


def tensors_of_files(theirs: Any) -> dict[str, Tensor]:
    """What transformers' model stores, by the names in files. In memory it stacks experts, and joins two of their matrices."""
    from transformers.core_model_loading import revert_weight_conversion

    stored = theirs.state_dict()  # without buffers that are not in files, and with tied parameters twice
    own = dict(theirs.named_parameters()) | {name: buffer for name, buffer in theirs.named_buffers() if name in stored}
    own = {name: tensor.detach() for name, tensor in own.items()}
    return dict(revert_weight_conversion(theirs, own))


def _transformers_model(family: Family) -> nn.Module:
    silence_imports()
    import transformers  # optional, and its import takes seconds

    transformers.logging.set_verbosity_error()
    values = dict(family.module.to_hf(family.config))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
