"""The attention kernel: the fastest one of the device by a rule, or the one that `model.attention` names.

A forced kernel is the only one allowed: PyTorch raises an error for inputs that it cannot take.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from models.attention import FLEX_FLASH, TILES, AttentionCore, Backend, attend, block_mask
from titanlite.config.schema import Config
from titanlite.ground import torch_private
from titanlite.ground.errors import MachineFault, UserError
from titanlite.registry.family import Family, family_of
from titanlite.transforms.dtypes import DTYPES


class Kernel(NamedTuple):
    """One value of `model.attention`."""

    backend: Backend
    devices: tuple[str, ...]
    masks: tuple[str, ...]  # the devices on which it takes a document or window mask
    takes: Callable[..., bool] | None = None  # PyTorch's check of shapes for a GPU; None: it takes all
    half: bool = False  # only 16-bit precisions


KERNELS = {
    "cudnn": Kernel(SDPBackend.CUDNN_ATTENTION, ("cuda",), (), cuda.can_use_cudnn_attention, half=True),
    # on CPUs float32 too
    "flash": Kernel(SDPBackend.FLASH_ATTENTION, ("cuda", "cpu"), ("cpu",), cuda.can_use_flash_attention, half=True),
    "efficient": Kernel(SDPBackend.EFFICIENT_ATTENTION, ("cuda",), ("cuda",), cuda.can_use_efficient_attention),
    "tiles": Kernel(TILES, ("cpu",), ()),
    "math": Kernel(SDPBackend.MATH, ("cuda", "cpu"), ("cuda", "cpu")),
}
# cuDNN's kernels are the fastest on Hopper (compute capability 9), and slower than FlashAttention's on Ampere and no faster on
# Ada (six GPUs measured in huggingface/transformers pull request 48163).
_ORDER, _ORDER_ON_HOPPER = ("flash", "efficient", "math"), ("cudnn", "flash", "efficient", "math")
# Compiled tiles are faster than the CPU's flash kernel, forward and backward pass: 2,048 tokens, 8 heads of 32, bfloat16, one
# thread, sequences of 256 and 512: 13 and 22 ms of CPU time against 31 and 53 on an EPYC, 18 and 43 against 38 and 73 on a Xeon
# with AMX (benchmarks/NOTES.md). Longer sequences have more tiles to compile, and in float32 tiles are no faster.
_LONGEST_FOR_TILES = 512
_NARROWEST_FOR_FLEX = 16  # head_dim


def choose_attention(model: nn.Module, config: Config, device: torch.device) -> None:
    """Sets the kernel of every attention module of a model. Call it before compiling.

    Raises UserError for a forced kernel that the GPU cannot run with this model's shapes.
    """
    name, precision = config.model.attention, config.training.mixed_precision_param
    for each in _modules(model):
        if name != "auto":
            if device.type == "cuda" and not _able(name, each, config, device, warn=True):
                why = f"cannot run it with head_dim = {each.head_dim} in {precision}; the warnings above say why"
                raise UserError(f'model.attention = "{name}": {torch.cuda.get_device_name(device)} {why}')
            each.backends = (KERNELS[name].backend, KERNELS[name].backend)
        elif not each.plain:
            continue  # FlexAttention caps scores and returns what sinks need, and no other kernel
        elif device.type == "cpu":
            # otherwise PyTorch chooses, and takes the math kernel where a fork needs more than flash offers
            each.backends = (TILES if _tiles_win(config) else None, None)
        else:
            order = _ORDER_ON_HOPPER if torch.cuda.get_device_capability(device)[0] == 9 else _ORDER
            chosen = next(kernel for kernel in order if _able(kernel, each, config, device, warn=False))
            each.backends = (KERNELS[chosen].backend, flex_kernel(each, config)[0])


def attention_sentence(model: nn.Module, config: Config) -> str:
    """The result of `choose_attention`, for the log."""
    modules = _modules(model)
    if not modules:
        return "the model's own"
    if config.model.attention != "auto":
        return f"{config.model.attention}, forced"
    backend = next((each.backends[0] for each in modules if each.backends[0] is not None), None)
    if backend in (None, TILES):
        return backend or ("FlexAttention" if torch.cuda.is_available() else "flash")
    name = next(name for name in _ORDER_ON_HOPPER if KERNELS[name].backend == backend)
    _, why = flex_kernel(next(each for each in modules if each.plain), config)
    flex = f"FlexAttention ({why})" if why else "FlexAttention"
    return flex if _gathers(config) else f"{name}, and {flex} where masked or capped"


def flex_kernel(attention: AttentionCore, config: Config) -> tuple[Backend | None, str]:
    """The `backend` of `attend` for masks on a GPU, and the kernel of FlexAttention with the reason; "" if there are no masks.

    FlashAttention 4's is faster than Triton's by PyTorch's measurements (benchmarks/NOTES.md), where it can run.
    """
    if not masks(config, family_of(config.model), "cuda"):
        return None, ""
    if not (version := _version_of("flash-attn-4")):
        return None, "Triton's kernel: flash-attn-4 is not installed"
    if torch_private.BEFORE_2_13:
        return None, "Triton's kernel: FlashAttention 4 needs PyTorch 2.13"
    if _gathers(config):
        return None, "Triton's kernel: queries are a part of a sequence"
    heads, precision = (attention.n_heads, attention.n_kv_heads), config.training.mixed_precision_param
    if fault := _flash4_fault(*heads, attention.head_dim, attention.value_dim, precision, torch.cuda.current_device()):
        return None, f"Triton's kernel: that of FlashAttention {version} {fault}"
    return FLEX_FLASH, f"the kernel of FlashAttention {version}, which was tried"


def faults(config: Config, family: Family, model: nn.Module) -> Iterator[str]:
    """A document mask that FlexAttention cannot apply, or a forced kernel that cannot run, before the device is known.

    A kernel that only GPUs have is checked as on a GPU.
    """
    name, device = config.model.attention, "cuda" if torch.cuda.is_available() else "cpu"
    if name == "auto":
        head_dim = getattr(family.config, "head_dim", _NARROWEST_FOR_FLEX)
        for user in flex_users(config, family, model) if device == "cuda" and head_dim < _NARROWEST_FOR_FLEX else ():
            yield f"{user}: FlexAttention has no kernel for head_dim = {head_dim}; it takes {_NARROWEST_FOR_FLEX} or more"
        return
    key, kernel = f'model.attention = "{name}"', KERNELS[name]
    if not (modules := _modules(model)):
        yield f'{key}: {config.model.name} has no AttentionCore of models/attention.py; use "auto"'
    if device not in kernel.devices:
        there = ", ".join(f'"{other}"' for other, kernel in KERNELS.items() if device in kernel.devices)
        yield MachineFault(f"{key}: is not for {'CPUs' if device == 'cpu' else 'GPUs'}; there are {there}")
    device = device if device in kernel.devices else kernel.devices[0]
    unequal = [each for each in modules if each.value_dim != each.head_dim]
    if unequal and name == "flash" and device == "cpu":
        has = f'{config.model.title} has {unequal[0].value_dim} and {unequal[0].head_dim}; use "math" or "auto"'
        yield MachineFault(f"{key}: on CPUs it needs values as wide as keys, and {has}")
    if kernel.half and device == "cuda" and config.training.mixed_precision_param == "float32":
        yield f'{key}: computes in 16 bits, and training.mixed_precision_param = "float32"; use "efficient" or "math"'
    others = ", ".join(f'"{other}"' for other, kernel in KERNELS.items() if device in kernel.masks)
    for mask in masks(config, family, device) if device not in kernel.masks else ():
        yield f'{key}: takes no mask, which {mask} makes; use {others} or "auto"'
    if name != "math" and (what := _not_plain(model)):
        yield f'{key}: does not compute {what} of {config.model.title}; use "auto" or "math"'


def masks(config: Config, family: Family, device: str) -> list[str]:
    """What makes attention need a mask besides the causal one. Where keys are gathered, only flash on CPUs needs none."""
    window = getattr(family.config, "window", None)
    makers = {
        "training.document_mask = true": config.training.document_mask,
        f"the window of {config.model.title}": window is not None and window < config.training.seq_len,
        'parallelism.context_parallel_method = "gather"': _gathers(config)
        and (device == "cuda" or config.model.attention not in ("auto", "flash")),
    }
    return [maker for maker, used in makers.items() if used]


def flex_users(config: Config, family: Family, model: nn.Module) -> list[str]:
    """What makes model.attention = "auto" use FlexAttention on a GPU."""
    what = _not_plain(model)
    return [*masks(config, family, "cuda"), *([f"{what} of {config.model.title}"] if what else [])]


def _not_plain(model: nn.Module) -> str:
    """What a model's attention has besides plain attention; "" for nothing."""
    if any(each.softcap is not None for each in _modules(model)):
        return "the capped scores"
    return "the attention sinks" if any(each.sinks is not None for each in _modules(model)) else ""


def _gathers(config: Config) -> bool:
    parallelism = config.parallelism
    return parallelism.context_parallel_degree > 1 and parallelism.context_parallel_method == "gather"


def _modules(model: nn.Module) -> list[AttentionCore]:
    return [each for each in model.modules() if isinstance(each, AttentionCore)]


def _tiles_win(config: Config) -> bool:
    """Whether tiles are faster for this training on a CPU."""
    compiled = config.compile.enable and "model" in config.compile.components and config.compile.backend == "inductor"
    narrow = config.training.mixed_precision_param == "bfloat16"
    short = config.training.seq_len <= _LONGEST_FOR_TILES
    return compiled and narrow and short and not _gathers(config)


def _able(name: str, attention: AttentionCore, config: Config, device: torch.device, warn: bool) -> bool:
    """Whether a GPU runs a kernel on the shapes of a microbatch, by PyTorch's own checks; warn: they log the reason if not."""
    takes = KERNELS[name].takes
    if takes is None:
        return True
    heads, kv_heads, head_dim, value_dim = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim
    if name == "efficient":
        kv_heads = heads  # it has no grouped queries: `attend` repeats keys and values
    training = config.training
    dtype = DTYPES[training.mixed_precision_param]
    q, k, v = (
        torch.empty(training.local_batch_size, count, training.seq_len, width, dtype=dtype, device=device, requires_grad=True)
        for count, width in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    )
    return takes(cuda.SDPAParams(q, k, v, None, 0.0, True, heads != kv_heads), debug=warn)


def _version_of(package: str) -> str:
    """The installed version of a package; "" for none."""
    return next((found.version for found in importlib.metadata.distributions(name=package)), "")


@functools.cache
def _flash4_fault(heads: int, kv_heads: int, head_dim: int, value_dim: int, precision: str, device: torch.device | int) -> str:
    """How FlashAttention 4 differs from Triton's kernel under a document mask; "" if it does not. Compiles both kernels.

    One version had gradients that were 150 times too large, with the right result (Dao-AILab/flash-attention issue 2623).
    """
    mask = block_mask((torch.arange(1024, device=device) >= 700)[None])  # blocks of all three kinds: full, partial, empty
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, gradients = (
        torch.randn(1, count, 1024, width, dtype=DTYPES[precision], device=device, generator=generator)
        for count, width in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    )

    def results(backend: Backend | None) -> list[Tensor]:
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        out = compiled(*inputs, mask=mask, scale=None, softcap=None, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradients)]

    try:
        pairs = list(zip(results(FLEX_FLASH), results(None), strict=True))
    except Exception as error:  # a package of its own, and a compiler
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    differences = torch.stack([(found.float() - sound.float()).norm() / sound.float().norm() for found, sound in pairs])
    worst = differences.max().item()  # NaN, if there is one; kernels in bfloat16 differ by 0.5%
    return "" if worst < 0.02 else f"differs from it by {worst:.1%}"
