"""The optimizer of a configuration, and clipping by the gradient's global norm."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.moe import Experts, Router
from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.schema import Config, Optimizer
from titanlite.ground.errors import UserError
from titanlite.ground.torch_private import foreach_div_, foreach_norm
from titanlite.optim import own
from titanlite.optim.adam_bf16 import Bfloat16Adam
from titanlite.optim.muon import Muon
from titanlite.optim.rounding import Compiler, compile_kernel
from titanlite.transforms.compile import compiler_faults
from titanlite.transforms.groups import group_of
from titanlite.transforms.parameters import in_blocks, match_scale
from titanlite.transforms.shards import local_part


def build_optimizer(
    model: nn.Module,
    cfg: Optimizer,
    compute: torch.dtype = torch.float32,
    compiler: Compiler = compile_kernel,
    group: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """The optimizer `cfg.name`, with a parameter group for each pair of rate factor and weight decay. bfloat16 parameters are
    rounded according to `cfg.rounding`. For Muon all ranks of `group` together, those that have the same layers;
    None: of the run. An optimizer of the user's own gets the group if it has such an argument.

    Every trained parameter has zero moments from the start, also one that never gets a gradient: so every checkpoint of a run
    holds the same tensors, and a new process can read them. own.py has what an optimizer of the user's own does instead.

    compute: the precision of the forward and backward passes, `training.mixed_precision_param`; Muon orthogonalizes in it.
    compiler: of titanlite's own kernels, if `cfg.implementation` is "fused".
    Where all matrices of a pipeline's stage are frozen, Muon is AdamW there.

    The model's `lr_scale` multiplies the rates of `cfg.groups`. Its factors are for AdamW; Muon takes their square roots, but
    those of routers as they are. In a matrix m times as wide and high, the spectral norm of an update grows by up to m with
    AdamW, and by sqrt(m) with Muon; in one that is m times as wide, such as a router's, by sqrt(m) with both.
    """
    trained, scale = {name: p for name, p in model.named_parameters() if p.requires_grad}, getattr(model, "lr_scale", {})
    if own.is_own(cfg):
        return own.build_own(groups_of(trained, cfg, scale), cfg, group)
    kernels = compiler if cfg.implementation == "fused" else None
    matrices = {name: p for name, p in trained.items() if is_orthogonalized(name, p, cfg)}
    rest = _adam(groups_of({name: p for name, p in trained.items() if name not in matrices}, cfg, scale), cfg, kernels)
    if not matrices:
        return rest
    precision = torch.float32 if compute == torch.float32 else torch.bfloat16
    return Muon(groups_of(matrices, cfg, scale), rest, cfg, precision, kernels, group)


def groups_of(trained: Mapping[str, Tensor], cfg: Optimizer, scale: Mapping[str, float]) -> list[dict[str, Any]]:
    """A parameter group of torch.optim, with names, for each pair of rate factor and weight decay. scale: a family's."""
    factors, _ = match_scale(scale, list(trained), "lr_scale", whole=False)
    decayed = {name for name, p in trained.items() if is_decayed(name, p, cfg)}
    found: dict[tuple[float, float], list[tuple[str, Tensor]]] = {}
    for name in sorted(trained, key=lambda name: name not in decayed):  # what is decayed first: the order of norms' sums
        group = group_of(name, cfg.groups)
        decay = (cfg.weight_decay if name in decayed else 0.0) if group.weight_decay is None else group.weight_decay
        root = is_orthogonalized(name, trained[name], cfg) and not name.endswith(".router.weight")
        factor = factors[name] ** 0.5 if root else factors[name]
        found.setdefault((group.lr * factor, decay), []).append((name, trained[name]))
    found = found or {(1.0, 0.0): []}  # Muon may leave nothing to AdamW, and torch takes an empty group
    return [{"params": pairs, "titanlite_lr_factor": factor, "weight_decay": decay} for (factor, decay), pairs in found.items()]


def _adam(groups: list[dict[str, Any]], cfg: Optimizer, compiler: Compiler | None) -> torch.optim.Optimizer:
    parameters = [p for group in groups for _, p in group["params"]]
    if any(p.dtype == torch.bfloat16 for p in parameters):
        return Bfloat16Adam(groups, cfg, compiler)
    kind = torch.optim.Adam if cfg.name == "Adam" else torch.optim.AdamW
    fused, foreach = cfg.implementation == "fused", cfg.implementation == "foreach"
    optimizer = kind(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, fused=fused, foreach=foreach)
    for p in parameters:  # as their first step does
        step = torch.zeros((), device=p.device) if fused else torch.tensor(0.0)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def is_orthogonalized(name: str, parameter: Tensor, cfg: Optimizer) -> bool:
    """Whether Muon updates a parameter: a matrix of a block, or a stack of experts, (experts, rows, columns). AdamW updates
    embedding, head, norms, biases, and other tensors of three dimensions, such as a convolution's."""
    matrices = parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)
    return cfg.name == "Muon" and matrices and in_blocks(name) and not _is_bias(name)


def is_decayed(name: str, parameter: Tensor, cfg: Optimizer) -> bool:
    """Whether weight decay applies to a parameter."""
    if cfg.decay_parameters:
        return re.search(cfg.decay_parameters, name) is not None
    return parameter.ndim >= 2 and not _is_bias(name)


def _is_bias(name: str) -> bool:
    """Whether a parameter is a bias; those of experts are stacked, (experts, features)."""
    return name.endswith("bias")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of a step, in each group times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("titanlite_lr_factor", 1.0)


@torch.no_grad()
def clip_gradients(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    multiple: Tensor | None = None,
    stages: int = 1,
    on_two: nn.Parameter | None = None,
) -> Tensor:
    """Scales the gradients down to a global L2 norm of `max_norm` at most; returns the norm before that, () float32.

    multiple: what the gradients are multiples by (`LossScale.divisor`); they and the norm are divided by it first. A fused
    optimizer receives the divisor and applies it within its step; for other optimizers the gradients are divided here.
    stages: the ranks of a pipeline, which have different parameters. on_two: the parameter that two of them have.

    Every rank sums the squares of its shards, divided by their replication factors; one all-reduce over the whole mesh gives
    the norm of the whole model's gradient. There is no host sync.
    """
    by_replication: dict[int, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                copies = replication_factor(p.grad) // stages * (2 if p is on_two else 1)
                by_replication.setdefault(copies, []).append(local_part(p.grad))
    if not by_replication:
        raise UserError("no gradient reaches any parameter: the loss does not depend on what is trained")
    total = torch.stack([_sum_of_squares(local) / n for n, local in by_replication.items()]).sum()
    dist.all_reduce(total)
    norm = total.sqrt() if multiple is None else total.sqrt() / multiple
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    if multiple is not None:
        divisor = divisor * multiple
    if optimizer.defaults["fused"]:
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
    else:
        for local in by_replication.values():
            foreach_div_(local, divisor)
    return norm


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """The sum of all squares, () float32."""
    return _of_all_at_once(tensors) if tensors[0].is_cuda else _row_by_row(tensors)


def _of_all_at_once(tensors: list[Tensor]) -> Tensor:
    """By as many operations for a hundred tensors as for one. A GPU sums a tensor in blocks."""
    return torch.stack(foreach_norm(tensors, 2, torch.float32)).square().sum()


def _row_by_row(tensors: list[Tensor]) -> Tensor:
    """One float32 sum over a matrix, as in the CPU's `_foreach_norm`, is off by 6e-4."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).flatten() for tensor in tensors]
    return torch.cat(rows).square().sum()


def replication_factor(tensor: Tensor) -> int:
    """How many ranks hold the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    factor = dist.get_world_size() // tensor.device_mesh.size()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        factor *= size if placement.is_replicate() else 1
    return factor


# ------------------------------------------------------------------------------------------------------------------ the check


_OWN, _NO_SKIP = 'optimizer.name has ":"', "an optimizer of your own does not skip a step on the device"
_NOT_FUSED = 'optimizer.implementation != "fused"'
CONFLICTS: tuple[Conflict, ...] = (
    ('optimizer.name = "Muon"', "lora.enable = true", 'it would orthogonalize frozen matrices; use "AdamW"'),
    ('optimizer.name = "Muon"', "parallelism.cpu_offload = true", 'the CPU would multiply whole matrices; use "AdamW"'),
    ('training.mixed_precision_param != "bfloat16"', 'training.dtype = "bfloat16"', "the parameters are no more precise"),
    ('training.dtype = "bfloat16"', "lora.enable = true", 'lora trains float32 beside frozen weights; set it to "float32"'),
    ('optimizer.implementation = "foreach"', 'training.dtype = "bfloat16"', 'use "fused" or "for-loop"'),
    (_NOT_FUSED, 'training.on_nonfinite = "skip" and training.dtype = "float32"', '"fused" skips a step without a host sync'),
    (_NOT_FUSED, 'training.mixed_precision_param = "float16"', '"fused" skips steps that overflow without a host sync'),
    (_OWN, 'training.dtype = "bfloat16"', 'it would round away small updates; use "float32"'),
    (_OWN, 'training.mixed_precision_param = "float16"', f'{_NO_SKIP}; use "bfloat16"'),
    (_OWN, 'training.on_nonfinite = "skip"', f'{_NO_SKIP}; use "stop" or "rollback"'),
    ("parallelism.cpu_offload = true", 'training.mixed_precision_param = "float16"', "use bfloat16, which needs no loss scale"),
)


def faults(config: Config) -> Iterator[str]:
    """Options of the optimizer that exclude each other, or that precision or machine exclude."""
    yield from conflicts(config, CONFLICTS)
    cfg, on_cpu = config.optimizer, config.parallelism.cpu_offload or not torch.cuda.is_available()
    which = 'optimizer.name = "Muon"' if cfg.name == "Muon" else 'training.dtype = "bfloat16"'
    if (config.training.dtype == "bfloat16" or cfg.name == "Muon") and cfg.implementation == "fused" and on_cpu:
        what = f'optimizer.implementation = "fused": with {which} its kernel is compiled, which'
        yield from compiler_faults(what, 'optimizer.implementation = "for-loop"')


def model_faults(cfg: Optimizer, model: nn.Module) -> Iterator[str]:
    """A model on the meta device without a matrix for Muon, or with experts and routers that it does not find; a pattern of
    optimizer.decay_parameters that is invalid, or matches nothing; what is wrong with an optimizer of the user's own."""
    if cfg.name == "Muon":
        if not any(p.requires_grad and is_orthogonalized(name, p, cfg) for name, p in model.named_parameters()):
            yield 'optimizer.name = "Muon": the model has no trained matrix in its layers; use "AdamW"'
        yield from _other_names(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    scaled = getattr(model, "lr_scale", {})
    if scaled and not any(fnmatchcase(name, pattern) for name in trained for pattern in scaled):
        yield "lr_scale: the family's table, or mup_base_dim, scales frozen parameters only; adapters have no factors in it"
    try:
        decayed = [p.requires_grad and is_decayed(name, p, cfg) for name, p in model.named_parameters()]
    except re.error as error:
        yield f"optimizer.decay_parameters = {cfg.decay_parameters!r}: not a regular expression: {error}"
        return
    if cfg.decay_parameters and not any(decayed):
        yield f"optimizer.decay_parameters = {cfg.decay_parameters!r}: matches no trained parameter's name"
    if own.is_own(cfg):
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        yield from own.faults(groups_of(parameters, cfg, {}), cfg)


def _other_names(model: nn.Module) -> Iterator[str]:
    """The first experts and the first router of a fork whose parameters Muon would take for other ones."""
    for kind, word in ((Experts, "experts"), (Router, "router")):
        named = (name for name, module in model.named_modules() if isinstance(module, kind))
        if other := next((name for name in named if name.rpartition(".")[2] != word), ""):
            yield f'optimizer.name = "Muon": it finds {kind.__name__} by the name "{word}", but {other} has another; rename it'
