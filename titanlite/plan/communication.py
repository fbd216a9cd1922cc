"""What the ranks send each other in one step, reckoned from shapes and degrees: every collective and its bytes.

Counted are `forward_backward` and `update` of titanlite/train.py in eager mode; reports, validation and checkpoints come on
top, each once in many steps. tests/distributed/test_communication.py holds every line against what PyTorch counts.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from models.attention import SeqInfo
from models.head import SIZES, Head, chunk_of
from titanlite.config.schema import Config
from titanlite.parallel.mesh import DATA_DIMENSIONS
from titanlite.parallel.tensor import STYLES, styles_of
from titanlite.transforms.dtypes import DTYPES
from titanlite.transforms.meta import on_meta
from titanlite.transforms.registry import Family

_FP32, _INT64 = 4, 8  # bytes
# Whether the backward pass of a unit of several modules ends with each of them, as in PyTorch 2.13, or once, as in 2.11.
_ENDS_TWICE = hasattr(FSDPState, "_force_complete_incomplete_states")


class Transfer(NamedTuple):
    """Equal collectives of one step, each over a group that rank 0 is in."""

    what: str
    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    over: tuple[str, ...]  # the dimensions of the mesh that the group spans
    ranks: int  # of the group
    count: int
    size: int  # bytes of the whole tensor: what is gathered, or what each rank adds to the sum

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in the whole step, where the group is a ring: (ranks - 1) parts, twice for an all-reduce."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return round(self.count * self.size * rounds * (self.ranks - 1) / self.ranks)


class _Unit(NamedTuple):
    """Parameters that FSDP2 gathers together."""

    what: str
    values: int  # of a rank after tensor parallelism, padded to equal numbers of rows
    reduced: list[int]  # those of each reduction of gradients
    gathers: int  # whole gathers in one microbatch
    partial_gathers: int  # those within `fsdp_reshard_after_forward` ranks


def traffic(config: Config, family: Family, degrees: dict[str, int], device_type: str = "cuda") -> list[Transfer]:
    """All collectives of one step, those of no traffic left out. degrees: see `mesh.resolve_degrees`; device_type: "cuda" or
    "cpu", which differ in the number of chunks of the loss.

    Of an unevenly split vocabulary it is rank 0, which has the largest part. Raises ValueError where modules talk between
    ranks by themselves: adapters, float8, a fork's own head and the "features" of a sharding table, under tensor parallelism;
    float8 gathers and Muon on any mesh.
    """
    model = on_meta(family, config)
    styles = styles_of(model, family)[0]
    if degrees["tp"] > 1 and not isinstance(model.head, Head):
        raise ValueError(f"what the head of {config.model.name} says between tensor-parallel ranks is its own affair")
    if degrees["tp"] > 1 and (config.lora.enable or "features" in styles.values()):
        raise ValueError("modules that talk between tensor-parallel ranks by themselves are not reckoned with")
    if config.optimizer.name == "Muon" and math.prod(degrees.values()) > 1:
        raise ValueError("what Muon exchanges, to have every matrix whole on one rank, is not reckoned with")
    if config.float8.enable and (degrees["tp"] > 1 or config.float8.enable_fsdp_float8_all_gather):
        raise ValueError("gathers in float8, and the scales that tensor-parallel ranks agree on, are not reckoned with")
    parts = degrees["dp_replicate"] * degrees["dp_shard"]
    microbatches = config.global_batch(parts) // (config.training.local_batch_size * parts)
    found = [
        *_of_data_parallel(config, model, styles, degrees, microbatches),
        *_of_tensor_parallel(config, family, model, styles, degrees["tp"], microbatches, device_type),
        *(Transfer("number of labels", "all-reduce", (name,), degrees[name], 1, _INT64) for name in DATA_DIMENSIONS),
        Transfer("gradient's norm", "all-reduce", (*DATA_DIMENSIONS, "tp"), math.prod(degrees.values()), 1, _FP32),
    ]
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.count]


# ---------------------------------------------------------------------------------------------------------- data parallel


def _of_data_parallel(
    config: Config, model: nn.Module, styles: dict[str, str], degrees: dict[str, int], microbatches: int
) -> Iterator[Transfer]:
    """FSDP2: gathers in the forward and backward passes, and the gradients' reductions."""
    shard, replicas = degrees["dp_shard"], degrees["dp_replicate"]
    param = DTYPES[config.training.mixed_precision_param].itemsize
    reduce = DTYPES[config.training.mixed_precision_reduce].itemsize
    reductions = microbatches if config.parallelism.reduce_every_microbatch else 1
    reshard = config.parallelism.fsdp_reshard_after_forward
    for unit in _units(config, model, styles, degrees):
        gathered = shard * unit.values * param
        yield Transfer(f"{unit.what}: parameters", "all-gather", ("dp_shard",), shard, unit.gathers * microbatches, gathered)
        if unit.partial_gathers:
            count = unit.partial_gathers * microbatches
            yield Transfer(f"{unit.what}: parameters again", "all-gather", ("dp_shard",), int(reshard), count, gathered)
        for values in unit.reduced:
            kept = values * reduce
            yield Transfer(f"{unit.what}: gradients", "reduce-scatter", ("dp_shard",), shard, reductions, shard * kept)
            yield Transfer(f"{unit.what}: gradients", "all-reduce", ("dp_replicate",), replicas, reductions, kept)


def _units(config: Config, model: nn.Module, styles: dict[str, str], degrees: dict[str, int]) -> Iterator[_Unit]:
    """The units of `parallelize.apply_fsdp`, and how often each is gathered."""
    reshard = config.parallelism.fsdp_reshard_after_forward
    within = isinstance(reshard, int)
    again = reshard != "never"  # a block's parameters are freed after its forward pass
    head_again = again and reshard != "default"

    def values(prefix: str, module: nn.Module) -> int:
        return sum(_padded(f"{prefix}.{name}", each, styles, degrees) for name, each in module.named_parameters())

    def unit(what: str, held: int, again: bool) -> _Unit:
        return _Unit(what, held, [held], 1 if within else 1 + again, int(again and within))

    for name, block in model.layers.items():
        yield unit("blocks", values(f"layers.{name}", block), again)
    if model.head.output.weight is model.embed.weight:
        # Gathered for the embedding, and where it is freed after the loss again for the head's backward pass.
        norm, weight = values("head.norm", model.head.norm), values("embed", model.embed)
        gathers, reduced = 1 if within else 1 + head_again, [norm + weight]
        if _ENDS_TWICE:
            # With the head's backward pass the norm's gradient is reduced, and what there is already of the other; with that of
            # the embedding, for which a unit that was freed is gathered once more, the rest.
            gathers += head_again
            reduced = [norm if config.parallelism.reduce_every_microbatch else norm + weight, weight]
        yield _Unit("embedding and head", norm + weight, reduced, gathers, int(head_again and within))
    else:
        embedding = values("embed", model.embed)
        yield _Unit("embedding", embedding, [embedding], 1, 0)  # its backward pass needs no weight
        yield unit("head", values("head", model.head), head_again)


def _padded(name: str, parameter: nn.Parameter, styles: dict[str, str], degrees: dict[str, int]) -> int:
    """Values of a parameter that one rank holds: split by tensor parallelism, then by rows, padded to equal numbers of rows."""
    shape = list(parameter.shape)
    style = STYLES[styles[name.rpartition(".")[0]]]
    placement = style.weight if parameter.ndim > 1 else style.bias
    if placement.is_shard():
        shape[placement.dim] = math.ceil(shape[placement.dim] / degrees["tp"])
    return math.ceil(shape[0] / degrees["dp_shard"]) * math.prod(shape[1:])


# --------------------------------------------------------------------------------------------------------- tensor parallel


def _of_tensor_parallel(
    config: Config, family: Family, model: nn.Module, styles: dict[str, str], tensor: int, microbatches: int, device_type: str
) -> Iterator[Transfer]:
    """Redistributions of activations and of their gradients, which are each other's reverse; the loss; whole weights."""
    if tensor == 1:
        return
    training = config.training
    param = DTYPES[training.mixed_precision_param].itemsize
    tokens = training.local_batch_size * training.seq_len
    activations = tokens * model.embed.embedding_dim * param
    gathers = list(styles.values()).count("sequence")
    sums = list(styles.values()).count("row") + 1  # the embedding's too
    gathers_again, sums_again = _recomputed(config, family, model, styles)

    def transfer(what: str, kind: Literal["all-gather", "reduce-scatter", "all-reduce"], count: int, size: int) -> Transfer:
        return Transfer(what, kind, ("tp",), tensor, count * microbatches, size)

    yield transfer("sequences", "all-gather", gathers + gathers_again, activations)
    yield transfer("sums of features", "reduce-scatter", sums + sums_again, activations)
    yield transfer("gradients of sums", "all-gather", sums, activations)
    yield transfer("gradients of sequences", "reduce-scatter", gathers, activations)
    chunk = chunk_of(tokens, model.head.vocab_size, model.head.sizes or SIZES[device_type])
    whole, rest = divmod(tokens, chunk)
    yield transfer("loss", "all-gather", whole, tensor * 2 * chunk * _FP32)
    yield transfer("loss", "all-gather", int(rest > 0), tensor * 2 * rest * _FP32)
    # Each rank's gradient of a whole weight is one summand. FSDP2 adds them up when it reduces, after accumulation in the
    # precision of the reduction, else in that of the gradient.
    once = not config.parallelism.reduce_every_microbatch
    size = DTYPES[training.mixed_precision_reduce if once else training.mixed_precision_param].itemsize
    for name, parameter in model.named_parameters():
        if styles[name.rpartition(".")[0]] in ("sequence", "replicate") and parameter.requires_grad:
            count = 1 if once else microbatches
            yield Transfer("gradients of whole weights", "all-reduce", ("tp",), tensor, count, parameter.numel() * size)


def _recomputed(config: Config, family: Family, model: nn.Module, styles: dict[str, str]) -> tuple[int, int]:
    """(gathers of sequences, sums of features) that a microbatch's backward pass does again: see activation_checkpoint.py."""
    keys = config.activation_checkpoint
    if keys.mode not in ("full", "selective"):
        return 0, 0
    first = next(iter(model.layers))
    of_block = {name: style for name, style in styles.items() if name.startswith(f"layers.{first}.")}
    gathers = list(of_block.values()).count("sequence")
    if keys.selective_ac_option == "op" and keys.mode == "selective":
        return gathers * len(model.layers), 0  # sums are kept
    blocks = len(model.layers) // (1 if keys.mode == "full" else int(keys.selective_ac_option))
    sums = list(of_block.values()).count("row")
    # Recomputation ends with the last tensor that is needed: the sum that the block ends with is none.
    sums -= of_block[_last_called(family, config, list(of_block))] == "row"
    return gathers * blocks, sums * blocks


def _last_called(family: Family, config: Config, names: list[str]) -> str:
    """Which of the first block's modules is called last."""
    model = on_meta(family, config)
    for name in list(model.layers)[1:]:
        del model.layers[name]
    called: list[str] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    model(tokens, SeqInfo(torch.arange(8, device="meta")[None]))
    return called[-1]


def lines(transfers: list[Transfer]) -> list[str]:
    """The table that `titanlite estimate` prints: equal purposes together, the largest first, in GiB."""
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for each in transfers:
        key = each.what, each.kind, f"{' x '.join(each.over)} ({each.ranks})"
        count, sent = rows.get(key, (0, 0))
        rows[key] = count + each.count, sent + each.sent
    total = sum(sent for _, sent in rows.values())
    calls = sum(count for count, _ in rows.values())
    table = [
        f"{what:<34}{kind:<16}{over:<34}{count:>7} x{sent / 2**30:>12,.3f} GiB"
        for (what, kind, over), (count, sent) in sorted(rows.items(), key=lambda row: -row[1][1])
    ]
    return [*table, f"{'total':<84}{calls:>7} x{total / 2**30:>12,.3f} GiB"]
