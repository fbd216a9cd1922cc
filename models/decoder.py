"""The interface between titanlite and every model."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.head import Head


class Limits(NamedTuple):
    """What a family cannot do. Its file says so in `LIMITS`, such as {"generates": False} (docs/reference/family.md)."""

    causal: bool = True  # False: the result of a token depends on later tokens
    generates: bool = True  # False: some layer has a memory of earlier tokens that it does not keep in seq.cache
    stages: bool = True  # False: the blocks need more of each other than the hidden states that pipeline stages pass on
    tensor_parallel: int | None = None  # the most ranks of tensor parallelism; None: any number that divides the sizes


class Decoder(nn.Module):
    """The base of every family's Model: the attributes that titanlite uses, and `model.head(model(tokens, seq), labels)`.

    A fork may use classes of its own: another embedding module; a head that has `norm` and `output` and is called like `Head`;
    a Model that only has the attributes of a Decoder. A rank of a pipeline has some of the layers, and perhaps no embed or
    head. Its `forward` is still called with tokens, and finds something in the place of each block of another rank.
    """

    config: Any  # the family's Config
    embed: Any  # nn.Embedding, or None
    layers: nn.ModuleDict  # blocks by global index, "0", "1", ...; each block is one unit of FSDP, compile and recomputation
    head: Head | None
    further: nn.ModuleDict  # only with training.predict_further: the Further modules of models/further.py
    tensor_parallel: int = 1  # ranks that a layer is split over; a forward pass needs a multiple of as many tokens
    context: tuple[DeviceMesh, Literal["gather", "ulysses"]] | None = None  # ranks that a sequence is split over, and how
    teacher: Any = None  # titanlite.loop.distillation.Teacher, a second model that is not trained
    pipeline: Any = None  # titanlite.parallel.pipeline.Pipeline, where other ranks have the other blocks
    limits = Limits()  # of the family's file, where titanlite builds the model; so is lr_scale
    lr_scale: Mapping[str, float] = {}  # factors on the rate by patterns of parameter names

    def tie_weights(self) -> None:
        """Makes embedding and output projection one parameter if `config.tied_embeddings` is True."""
        if getattr(self.config, "tied_embeddings", False) and self.embed is not None and self.head is not None:
            self.head.output.weight = self.embed.weight
