"""Linear layers that multiply in float8, by torchao (docs/guides/float8.md).

Weights, optimizer and checkpoints do not change: each matmul scales its two operands so that their largest values come close
to float8's maximum, casts them, multiplies, and scales back (Micikevicius et al., arXiv:2209.05433).
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.schema import Config
from titanlite.ground.errors import MachineFault
from titanlite.transforms.libraries import silence_imports
from titanlite.transforms.parameters import block_linears, every_layer, keeping_ties

MULTIPLE = 16  # every dimension of a float8 matmul is a multiple of this


def linear_layers(model: nn.Module, config: Config, styles: dict[str, str]) -> tuple[dict[str, nn.Linear], list[str]]:
    """The linear layers of the blocks that multiply in float8, by name; and the faults: a pattern of `float8.filter_fqns` that
    matches nothing, layers of sizes or slices of the tokens that float8 matmuls do not take.

    The head is excluded: small differences of its logits decide the loss. styles: of the modules in the family's sharding
    table, where tensor parallelism will split the layers; {} for their whole sizes.
    """
    every, patterns = block_linears(model), config.float8.filter_fqns
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in every)]
    faults = [f'float8.filter_fqns: "{pattern}" matches no linear layer of a block' for pattern in idle]
    chosen = {name: each for name, each in every.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    tensor = config.parallelism.tensor_parallel_degree if styles else 1
    where = f" on each of parallelism.tensor_parallel_degree = {tensor} ranks" if tensor > 1 else ""
    style_of = {each: styles.get(name) for name, each in model.named_modules()}  # by the module's first name
    for name, each in chosen.items():
        inputs = each.in_features // (tensor if style_of[each] == "row" else 1)
        outputs = each.out_features // (tensor if style_of[each] == "column" else 1)
        if inputs % MULTIPLE or outputs % MULTIPLE:
            kind = every_layer(name)
            faults.append(
                f"float8: {kind} is {inputs} x {outputs}{where}, and float8 multiplies multiples of {MULTIPLE}; "
                f'add "{kind}" to float8.filter_fqns'
            )
    rows, ranks = config.training.local_batch_size, tensor * config.parallelism.context_parallel_degree
    tokens = rows * config.training.seq_len // ranks
    sliced = dict.fromkeys(every_layer(name) for name, each in chosen.items() if style_of[each] == "replicate")
    if tensor > 1 and sliced and tokens % MULTIPLE:
        faults.append(
            f"training.local_batch_size x training.seq_len / (context_parallel_degree x tensor_parallel_degree) = {rows} x "
            f"{config.training.seq_len} / {ranks} = {tokens}: the tokens of {', '.join(sliced)} on each rank must be a "
            f"multiple of {MULTIPLE} for float8; or add these layers to float8.filter_fqns"
        )
    if not chosen:
        faults.append("float8.filter_fqns: leaves no linear layer to multiply in float8")
    return chosen, list(dict.fromkeys(faults))


def convert(model: nn.Module, config: Config) -> None:
    """Replaces these layers of a meta-device model by torchao's, whose parameters have the same names."""
    if not config.float8.enable:
        return
    layers, _ = linear_layers(model, config, {})
    silence_imports()
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    cfg = config.float8
    recipe = Float8LinearConfig.from_recipe_name(cfg.recipe_name)
    # Powers of two: the rounding of a value does not depend on the rest of its tensor, so meshes and microbatches agree.
    recipe = replace(
        recipe,
        emulate=cfg.emulate,
        enable_fsdp_float8_all_gather=cfg.enable_fsdp_float8_all_gather,
        round_scales_to_power_of_2=True,
    )
    with keeping_ties(model):  # what is gathered in float8 is a new parameter of each layer
        converted = {each: Float8Linear.from_float(each, recipe) for each in layers.values()}
        for name, each in [*model.named_modules(remove_duplicate=False)]:  # blocks may share a layer
            if each in converted:
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, converted[each])

    model.titanlite_gathers_float8 = cfg.enable_fsdp_float8_all_gather  # type: ignore[assignment]  # typed for modules


def measure_weights(model: nn.Module) -> None:
    """After an optimizer step: the scales of all weights that are gathered in float8, in one all-reduce."""
    if getattr(model, "titanlite_gathers_float8", False):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


_GATHER = "float8.enable_fsdp_float8_all_gather = true"
CONFLICTS: tuple[Conflict, ...] = (
    ("float8.enable = true", "lora.enable = true", "adapters do not multiply in float8; set one of them to false"),
    ("float8.enable = true", 'float8.emulate = false and training.mixed_precision_param != "bfloat16"', 'use "bfloat16"'),
    ("float8.enable = true", 'training.mixed_precision_param = "float16" and float8.emulate = true', 'use "bfloat16"'),
    (_GATHER, 'float8.recipe_name != "tensorwise"', 'a row has no scale before the gather; use "tensorwise"'),
    (_GATHER, "parallelism.tensor_parallel_degree > 1", "each rank would scale its own part of a weight; set it to false"),
    (_GATHER, "parallelism.cpu_offload = true", "weights on the CPU are not cast; set one of them to false"),
)


def faults(config: Config) -> Iterator[str]:
    """What float8 needs of the machine, the precision and the batch, and options that exclude it."""
    cfg = config.float8
    if not cfg.enable:
        return
    yield from conflicts(config, CONFLICTS)
    if importlib.util.find_spec("torchao") is None:
        yield "float8.enable = true: needs torchao, which is not installed: pip install 'titanlite[float8]'"
    least = (8, 9) if cfg.recipe_name == "tensorwise" else (9, 0)
    if not cfg.emulate and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= least):
        yield MachineFault(
            f'float8.recipe_name = "{cfg.recipe_name}": needs a GPU of compute capability {least[0]}.{least[1]} at least; '
            "float8.emulate = true computes the same on any device, slowly"
        )
    yield from _token_faults(config)


def shard_faults(config: Config, model: nn.Module, ranks: int) -> Iterator[str]:
    """Layers whose rows `ranks` ranks hold unequal numbers of: FSDP2 gathers float8 shards without padding."""
    every = linear_layers(model, config, {})[0] if config.float8.enable and config.float8.enable_fsdp_float8_all_gather else {}
    if uneven := dict.fromkeys(every_layer(name) for name, each in every.items() if each.out_features % ranks):
        remedy = "set it to false, or add them to float8.filter_fqns"
        degrees = "data_parallel_shard_degree x context_parallel_degree"
        yield f"{_GATHER}: {degrees} = {ranks} ranks do not divide the rows of {', '.join(uneven)}; {remedy}"


def _token_faults(config: Config) -> Iterator[str]:
    """Matmuls of weight gradients sum over tokens: those of a rank, and of each part that a feed-forward layer computes."""
    rows, ranks = config.training.local_batch_size, config.parallelism.context_parallel_degree
    length, chunks = config.training.seq_len // ranks, config.activation_checkpoint.sequence_chunks
    split = f" / context_parallel_degree = {rows} x {config.training.seq_len} / {ranks}" if ranks > 1 else ""
    rule = f"must be a multiple of {MULTIPLE} for float8"
    if rows * length % MULTIPLE:
        yield f"training.local_batch_size x training.seq_len{split} = {rows * length}: {rule}"
    elif unfit := {part for part in (length // chunks, -(-length // chunks)) if rows * part % MULTIPLE}:
        parts = " or ".join(map(str, sorted(unfit)))
        yield (
            f"activation_checkpoint.sequence_chunks = {chunks}: training.local_batch_size = {rows} x {parts} tokens of a part "
            f"{rule}; choose a divisor of the {length} tokens of a rank"
        )
