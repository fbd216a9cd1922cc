"""From a batch to the loss: one function for every pass over data.

A step's loss is the sum of the cross entropies of all its labels, over all ranks and microbatches, divided by their number, so
that neither the mesh nor accumulation changes it. With training.predict_further, the mean loss of each MTP module over its
own labels is added, times predict_further_weight / predict_further.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.attention import SeqInfo
from models.blocks import positions_in_documents
from models.decoder import Decoder
from models.further import further_of, run_with_arguments
from models.head import IGNORE, Head, token_loss_fault
from models.rope import DynamicScaling
from models.split import split_sequence
from titanlite.config.conflicts import Conflict, conflicts
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.parallel.mesh import DATA_DIMENSIONS, sum_over
from titanlite.parallel.pipeline import Microbatch
from titanlite.registry import own
from titanlite.registry.family import Family, location_of
from titanlite.transforms.meta import on_meta, without_memory

_PROBED = 3  # tokens for which a check calls a loss of the user's own


class StepLoss(NamedTuple):
    """A rank's share of a step's loss, on its device."""

    share: Tensor  # () float32; the shares of all data-parallel ranks sum to the loss
    labels: Tensor | None  # () float32, the labels of the global batch; None: every token is one
    further: Tensor  # () float32; the shares of all data-parallel ranks sum to the mean loss of the MTP modules; 0 without them


def count_labels(batch: Batch, mesh: DeviceMesh) -> Tensor:
    """The number of labels of the global batch, of which `batch` is this rank's part; () float32. 0 for some chats, or padding.

    Stays on the device, without a host sync.
    """
    return sum_over(DATA_DIMENSIONS, (batch.labels() != IGNORE).sum(), mesh).float()


def count_further(batch: Batch, mesh: DeviceMesh, depths: int) -> Tensor:
    """The number of labels of each MTP module, (depths,) float32."""
    counts = [(batch.further(depth)[1] != IGNORE).sum() for depth in range(1, depths + 1)]
    return sum_over(DATA_DIMENSIONS, torch.stack(counts), mesh).float()


def summed_loss(model: Decoder, batch: Batch) -> Tensor:
    """Sum of the cross entropies of one microbatch, (batch, seq) labels; () float32. Of split sequences, this rank's part."""
    assert model.head is not None, "a pipeline stage without head has no loss"
    inputs, labels, seq = part = to_microbatch(model, batch)
    if model.teacher is None or not torch.is_grad_enabled():
        return model.head(model(inputs, seq), labels)
    known = model.teacher.read(part)  # first, while no activations are kept
    hidden = model(inputs, seq)
    with model.teacher.outputs(known) as outputs:
        return model.head(hidden, labels, outputs)


def summed_loss_with_further(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """`summed_loss` of one microbatch, and the same of each MTP module for its own labels, (depths,) float32."""
    assert model.head is not None
    depths = further_of(model)
    inputs, labels, seq = to_microbatch(model, batch)
    hidden, args, kwargs = run_with_arguments(model, inputs, seq)
    # shifted before the sequence is split, whose neighbors other ranks have
    parts = [
        [whole if seq.split is None else whole[:, seq.split.positions] for whole in batch.further(depth)]
        for depth in range(1, len(depths) + 1)
    ]
    # Embedding before head: where they are tied, FSDP2 frees their parameters once both have run.
    embedded, states = [model.embed(tokens) for tokens, _ in parts], [hidden]
    for each, following in zip(depths.values(), embedded, strict=True):
        states.append(each(states[-1], following, *args, **kwargs))
    every = [labels, *(of_depth for _, of_depth in parts)]
    own, *further = [model.head(state, of_depth) for state, of_depth in zip(states, every, strict=True)]
    return own, torch.stack(further)


def summed_losses(model: Decoder, batches: Sequence[Batch]) -> Tensor:
    """`summed_loss` of each microbatch of a step, (microbatches,) float32, without gradients; 0 on ranks without the head."""
    if model.pipeline is not None:
        return model.pipeline.evaluate([to_microbatch(model, batch) for batch in batches])
    return torch.stack([summed_loss(model, batch) for batch in batches])


def to_microbatch(model: Decoder, batch: Batch) -> Microbatch:
    """What a forward pass of a microbatch needs; of split sequences, this rank's part."""
    inputs, labels = batch.inputs(), batch.labels()
    seq = sequence_of(inputs, batch.documents)
    if model.context is not None:  # last: labels, positions and documents depend on neighboring tokens
        split = split_sequence(*model.context, inputs.shape[1], inputs.device)
        inputs, labels, positions = (whole[:, split.positions] for whole in (inputs, labels, seq.positions))
        seq = seq._replace(positions=positions, split=split)
    return Microbatch(inputs, labels, seq)


def sequence_of(inputs: Tensor, documents: Tensor | None) -> SeqInfo:
    """What a model must know of its inputs, (batch, seq): positions begin at 0 in each row, or in each document of a row."""
    if documents is None:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    else:
        positions = positions_in_documents(documents)
    return SeqInfo(positions, documents)


_FURTHER = "training.predict_further > 0"
_CONFLICTS: tuple[Conflict, ...] = (
    (_FURTHER, "parallelism.pipeline_parallel_degree > 1", "no stage has the embedding and the head; set one of them back"),
    (_FURTHER, "lora.enable = true", "MTP modules begin random, and LoRA trains adapters alone; set one of them back"),
    (_FURTHER, "distillation.teacher is set", "a teacher has no logits for later tokens; set one of them back"),
)


def _further_faults(config: Config, family: Family, model: Decoder) -> Iterator[str]:
    """Options that MTP modules exclude, and models whose last block cannot be repeated."""
    yield from conflicts(config, _CONFLICTS)
    cfg = config.training
    key = f"training.predict_further = {cfg.predict_further}"
    if cfg.predict_further >= cfg.seq_len:
        yield f"{key}: must be less than training.seq_len = {cfg.seq_len}; no row has such a token"
    if cfg.predict_further and not (model.limits.stages and model.limits.causal):
        yield f"{key}: LIMITS of {config.model.name} say that its blocks need more than earlier hidden states; set it to 0"
    if cfg.predict_further and getattr(model.config, "mup_base_dim", None) is not None:
        yield f"{key}: model.overrides.mup_base_dim has no rate for what it adds; set one of them back"
    if cfg.predict_further and (reason := _no_continuation(config, family)):
        yield f"{key}: {reason}; set it to 0"


def _no_continuation(config: Config, family: Family) -> str:
    """Why MTP modules cannot continue from a model's last block; "" if they can, or where a forward pass depends on data."""
    model, outputs = on_meta(family, config), list[Any]()
    for name in [*further_of(model)][1:]:  # all are alike
        del model.further[name]
    [*model.layers.values()][-1].register_forward_hook(lambda _module, _args, out: outputs.append(out))
    with without_memory(model, batch=1, seq_len=16) as (tokens, seq):
        try:
            hidden, args, kwargs = run_with_arguments(model, tokens, seq)
        except Exception:  # the user's module can raise anything; a run names it
            return ""
        if not isinstance(outputs[-1], Tensor):
            return f"the last block of {config.model.name} does not return hidden states alone"
        if outputs[-1] is not hidden:
            return f"{config.model.name} changes what its last block returns, and not what that of an MTP module does"
        try:
            for each in further_of(model).values():
                each(hidden, model.embed(tokens), *args, **kwargs)
        except Exception as error:
            return f"an MTP module of {config.model.name} fails ({location_of(error)}): {error!r}"
    return ""


def faults(config: Config, family: Family, model: Decoder) -> Iterator[str]:
    """Options that exclude MTP modules; a z-loss that the head does not compute; a RoPE scaling by the length of the text."""
    yield from _further_faults(config, family, model)
    if config.training.z_loss and (reason := loss_elsewhere(config, family)):
        yield f"training.z_loss = {config.training.z_loss:g}: {reason}; set it to 0"
    for name in [field.name for field in fields(model.config)]:
        if isinstance(getattr(model.config, name), DynamicScaling):
            yield (
                f'model: {config.model.title} has {name} with rope_type = "dynamic", which depends on the length of the '
                "current text, so the loss of a document would depend on what is packed beside it; it is for generation and "
                f'evaluation: to train, set model.overrides.{name} to "none" or to another rope_type, such as "yarn"'
            )
    yield from _own_faults(config, family, model)


def loss_elsewhere(config: Config, family: Family) -> str:
    """Why [training] and [distillation] cannot change the loss of a model: another code than that of Head computes it, perhaps
    in a class made from Head. "" if they can."""
    model, called = family.on_meta(), list[bool]()
    elsewhere = f"the head of {config.model.name} does not compute its loss by models.head.Head"
    if not isinstance(model.head, Head):
        return elsewhere
    if type(model.head).forward is Head.forward:
        return ""
    kernels = getattr(model.head, "kernels", None)
    if kernels is None:
        return elsewhere

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        called.append(True)
        return kernels.logsumexp_and_target(*args)

    model.head.kernels = kernels._replace(logsumexp_and_target=watched)
    with without_memory(model, batch=1, seq_len=2) as (tokens, seq):
        try:
            model.head(model(tokens, seq), tokens)
        except Exception:  # the user's module can raise anything; a run names it
            return ""
    return "" if called else elsewhere


def _own_faults(config: Config, family: Family, model: Decoder) -> Iterator[str]:
    """A loss of the user's own that gives no differentiable loss of each token. Raises UserError where it cannot be called."""
    cfg = config.training
    if ":" not in cfg.loss:
        return
    key = f'training.loss = "{cfg.loss}"'
    if reason := loss_elsewhere(config, family):
        yield f"{key}: {reason}"
        return
    loss = own.token_loss(config)
    assert loss is not None and model.head is not None
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(_PROBED, model.head.vocab_size, generator=draw).requires_grad_()
    labels = torch.arange(_PROBED) % model.head.vocab_size
    of_teacher = {"teacher_logits": torch.randn(logits.shape, generator=draw)} if config.distillation.teacher else {}
    with own.calling(f"{key}: fails"):
        losses = loss(logits, labels, **of_teacher)
        fault = token_loss_fault(losses, labels)
    if not fault and not losses.isfinite().all():
        fault = f"returns {losses.tolist()} for logits of a normal distribution"
    if fault:
        yield str(own.fault_of("training.loss", cfg.loss, fault))
