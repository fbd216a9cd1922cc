"""The interface between titanlite and every model: what the `Model` of a family or a fork offers. llama3.py shows all of it."""

from typing import Any

from torch import nn

from models.head import Head


class Decoder(nn.Module):
    """A model of which titanlite uses these attributes only, and `model.head(model(x, seq), labels)`: see `SeqInfo`, `Head`.

    A pipeline stage has no `embed`, some of the layers, or no `head`. A fork may have an embedding or a head of its own class:
    the head then has `norm` and `output` and is called as `Head` is.
    """

    config: Any  # the family's Config
    embed: nn.Embedding | None
    layers: nn.ModuleDict  # blocks by global index, "0", "1", ...; each block is one unit of FSDP, compile and recomputation
    head: Head | None

    def tie_weights(self) -> None:
        """Makes embedding and output projection one parameter if `config.tied_embeddings` is True."""
        if getattr(self.config, "tied_embeddings", False) and self.embed is not None and self.head is not None:
            self.head.output.weight = self.embed.weight
