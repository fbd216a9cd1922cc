"""What `titanlite check-model` finds out about a model without training it: tables, buffers, FLOPs, Hugging Face.

Each function takes a family with its flavour and returns what is wrong, in sentences; none is no fault.
"""

import dataclasses
import importlib.util
import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.attention import SeqInfo
from models.blocks import Constant
from titanlite.hf.folder import their_name
from titanlite.loop.checks import undivided_sizes
from titanlite.parallel.tensor import sharding_faults
from titanlite.transforms.initialize import fill, match_initial
from titanlite.transforms.registry import Family, every_layer, tie

SEQ_LEN = 32
SMALL = 20_000_000  # parameters at most of what is made in memory
LOGITS = 1e-4  # how far logits may be from those of transformers, relative to the largest


def size_of(family: Family) -> int:
    """Parameters of the model."""
    return sum(parameter.numel() for parameter in family.on_meta().parameters())


# ------------------------------------------------------------------------------------------------------- building, tables


def construction_faults(family: Family) -> list[str]:
    model = family.on_meta()
    faults = [
        f"Model lacks {part}; models/llama3.py shows it" for part in ("embed", "layers", "head") if not hasattr(model, part)
    ]
    for name, parameter in model.named_parameters():
        if not parameter.is_meta or parameter.dtype != torch.float32:
            faults.append(f"{every_layer(name)} is {parameter.dtype} on {parameter.device}, and must be float32 on meta")
    for path, module in model.named_modules():
        for key in (key for key, value in vars(module).items() if isinstance(value, Tensor)):
            faults.append(
                f"{every_layer(f'{path}.{key}')} is a tensor that is no parameter, and lost on meta: make it in forward"
            )
    return list(dict.fromkeys(faults))


def table_faults(family: Family) -> list[str]:
    return sharding_faults(family.on_meta(), family, 1)


def initial_faults(family: Family) -> list[str]:
    return match_initial(family.on_meta(), family)[1]


def undivided_faults(family: Family) -> list[str]:
    """Sizes that tensor parallelism over 2 ranks would have to split, and cannot."""
    if undivided := undivided_sizes(family, 2):
        return [f"2 ranks of tensor parallelism cannot share {', '.join(undivided)}"]
    model = family.on_meta()
    return [fault for fault in sharding_faults(model, family, 2) if fault not in sharding_faults(model, family, 1)]


def buffer_faults(family: Family) -> list[str]:
    """Buffers that the constructor computes: a model is built on meta, where that is lost, and gets what `initial` says."""
    distributions, _ = match_initial(family.on_meta(), family)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN, or with the largest integer
    try:
        buffers = dict(family.module.Model(family.config).named_buffers())
    finally:
        torch.use_deterministic_algorithms(before)
    lost = {}
    for name, buffer in buffers.items():
        empty = buffer.isnan() if buffer.is_floating_point() else buffer == _filled(buffer.dtype)
        says = distributions.get(name)
        if isinstance(says, Constant) and not (empty | (buffer == says.value)).all():
            lost[every_layer(name)] = says.value
    return [f"{name}: the constructor computes it, which is lost on meta, and initial makes it {value:g}; compute it in forward"
            for name, value in lost.items()]  # fmt: skip


def _filled(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else torch.iinfo(dtype).max


# ----------------------------------------------------------------------------------------------------------------- FLOPs


def flops_faults(family: Family) -> list[str]:
    """`flops` against what PyTorch counts: three forward passes, with attention over the whole sequence as PaLM counts it.

    A large model whose forward pass needs values, which meta tensors do not have, is not counted: the formula is that of the
    small one.
    """
    function = inspect.unwrap(family.module.flops).__code__
    place = f"flops ({function.co_filename}, line {function.co_firstlineno})"
    says, of_one = family.module.flops(family.config, SEQ_LEN), family.module.flops(family.config, 1)
    faults = []
    if says.causal > says.palm:
        faults.append(f"{place}: causal {says.causal:,.0f} is more than palm {says.palm:,.0f}")
    if of_one.causal != of_one.palm:
        faults.append(f"{place}: of one token causal {of_one.causal:,.0f} and palm {of_one.palm:,.0f} must be the same")
    try:
        counted = _count(family, torch.device("meta"))
    except Exception:
        if size_of(family) >= SMALL:
            return faults
        counted = _count(family, torch.device("cpu"))
    total = counted.pop("Global")
    if abs(says.palm - total) > 1e-6 * total:
        parts = ", ".join(f"{name} {count:,.0f}" for name, count in counted.items())
        faults.append(f"{place}: palm says {says.palm:,.0f} a token, PyTorch counts {total:,.0f}: {parts}")
    return faults


def _count(family: Family, device: torch.device) -> dict[str, float]:
    """FLOPs a token, forward and backward, of the whole ("Global"), and of the parts of all layers together."""
    with device:
        model = family.module.Model(family.config)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
        seq = SeqInfo(torch.arange(SEQ_LEN)[None])
    # the counter knows no CPU attention kernel; the plain one is made of matrix products
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model.head(model(tokens, seq))
    found: dict[str, float] = {}
    for name, counts in counter.get_flop_counts().items():
        if name.count(".") in (0, 3) and name != type(model).__name__:
            part = every_layer(name.partition(".")[2] or name)
            found[part] = found.get(part, 0) + 3 * sum(counts.values()) / SEQ_LEN
    return found


# ---------------------------------------------------------------------------------------------------------- Hugging Face


def name_faults(family: Family) -> list[str]:
    """Parameters that HF drops or gives one name, and what of the configuration does not come back."""
    names = {name: their_name(family.module, name) for name, _ in family.on_meta().named_parameters()}
    faults = [f"HF has no name for {every_layer(name)}" for name, theirs in names.items() if theirs is None]
    owners: dict[str, str] = {}
    for name, theirs in names.items():
        if theirs is not None and owners.setdefault(theirs, name) != name:
            faults.append(
                f"HF gives {every_layer(name)} and {every_layer(owners[theirs])} the same name, {every_layer(theirs)}"
            )
    back = family.module.from_hf(json.loads(json.dumps(family.module.to_hf(family.config))))
    for field in dataclasses.fields(family.config):
        ours, theirs = getattr(family.config, field.name), getattr(back, field.name)
        if ours != theirs:
            faults.append(f"from_hf(to_hf(config)).{field.name} is {theirs!r}, and was {ours!r}")
    return list(dict.fromkeys(faults))


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def shape_faults(family: Family) -> list[str]:
    """Parameters that transformers' model of this configuration has otherwise, and how many there are in all."""
    with torch.device("meta"):
        theirs = dict(_transformers_model(family).named_parameters())
    ours = dict(family.on_meta().named_parameters())
    names = {their_name(family.module, name): name for name in ours}
    faults = []
    for name, tensor in ours.items():
        wanted = theirs.get(their_name(family.module, name) or "")
        if wanted is None:
            faults.append(
                f"HF: transformers' model has no {every_layer(str(their_name(family.module, name)))}, for {every_layer(name)}"
            )
        elif wanted.shape != tensor.shape:
            faults.append(f"{every_layer(name)} is {tuple(tensor.shape)} here, {tuple(wanted.shape)} in transformers' model")
    faults += [f"HF leaves out {every_layer(name)} of transformers' model" for name in theirs if name not in names]
    if not faults and (here := size_of(family)) != (there := sum(parameter.numel() for parameter in theirs.values())):
        faults.append(f"{here:,} parameters here, {there:,} in transformers' model")
    return list(dict.fromkeys(faults))


@torch.no_grad()
def logit_faults(family: Family) -> list[str]:
    """With the same weights, in float32, transformers' model of this configuration must give the same logits."""
    generator = torch.Generator().manual_seed(0)
    theirs, ours = _transformers_model(family).float().eval(), family.module.Model(family.config).eval()
    weights = dict(theirs.named_parameters())
    for parameter in weights.values():
        parameter.normal_(std=0.1, generator=generator).add_(parameter.ndim == 1)
    distributions, _ = match_initial(ours, family)
    for name, buffer in ours.named_buffers():
        fill(buffer, name, distributions[name], 0)
    for name, parameter in ours.named_parameters():
        parameter.copy_(weights[their_name(family.module, name) or ""])
    tie(ours)
    tokens = torch.randint(family.config.vocab_size, (2, SEQ_LEN), generator=generator)
    found = ours.head(ours(tokens, SeqInfo(torch.arange(SEQ_LEN).expand(2, SEQ_LEN))))
    expected = theirs(tokens).logits
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    return (
        [] if difference < LOGITS else [f"logits differ from those of transformers' model by {difference:.1e} of the largest"]
    )


def _transformers_model(family: Family) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    values = dict(family.module.to_hf(family.config))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
