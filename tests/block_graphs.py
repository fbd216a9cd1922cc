"""Llamas whose blocks use results of earlier blocks, as `graph` says: "2 value 0, 3 counter 1" is two such uses.

Each use is (consuming block, way, producing block). EXPLICIT ways are arguments and results, which a pipeline sends. HIDDEN
ones leave state in Python, which a pipeline refuses.
"""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from models import llama3
from models.attention import SeqInfo, with_mask
from models.rope import rotation
from tests import tiny

__all__ = ["FLAVORS", "Config", "Model", "flops", "initial", "sharding"]

EXPLICIT = ("value", "detached", "view", "number", "unchanged", "sum", "twice")
EXPLICIT += ("integers",) * (torch.__version__ >= "2.13")  # earlier versions need a gradient for every message
HIDDEN = ("attribute", "list", "counter", "parameter", "module", "in place", "head", "again")


@dataclasses.dataclass(frozen=True)
class Config(llama3.Config):
    graph: str = ""

    def uses(self) -> list[tuple[int, str, int]]:
        words = [use.split() for use in self.graph.split(", ") if use]
        return [(int(user), " ".join(way), int(maker)) for user, *way, maker in words]


FLAVORS = {"deep": Config(**{**dataclasses.asdict(tiny.FLAVORS["deep"]), "rope_scaling": None})}
flops, sharding, initial = llama3.flops, llama3.sharding, llama3.initial


def drawn(numbers: random.Random, ways: tuple[str, ...], blocks: int = 4) -> str:
    """A random graph with one to three uses."""
    pairs = [sorted(numbers.sample(range(blocks), 2)) for _ in range(numbers.randint(1, 3))]
    return ", ".join(f"{user} {numbers.choice(ways)} {maker}" for maker, user in pairs)


class Block(llama3.Block):
    def __init__(self, config: Config, number: int, others: SimpleNamespace):
        super().__init__(config)
        self.number, self.others = number, others  # not registered: a namespace is no module
        self.uses = [(way, maker) for user, way, maker in config.uses() if user == number]
        self.serves = [way for _, way, maker in config.uses() if maker == number]

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: tuple[Tensor, Tensor], seq: SeqInfo, states: dict[int, Any], total: Tensor, left: list[Tensor]
    ) -> tuple[Tensor, Any]:
        for way, maker in self.uses:
            x = x + 0.1 * self.used(x, way, states.get(maker), total, left, self.others.blocks[maker])
        x = super().forward(x, rope, seq)
        made = torch.tanh(x)
        first, second = made.unflatten(-1, (2, -1)).unbind(2)  # (batch, seq, dim / 2) each
        if "view" not in self.serves:  # FSDP2 warns of views
            first, second = first.clone(), second.clone()
        for way in self.serves:
            self.leave(way, made, left)
        numbers = made[..., 0].abs().mul(50).long()  # (batch, seq)
        return x, {"made": (made, first, second), "numbers": numbers, "number": self.number + 2, "total": total}

    def leave(self, way: str, made: Tensor, left: list[Tensor]) -> None:
        match way:
            case "attribute":
                self.made = made
            case "list":
                left.append(made)
            case "counter":
                self.others.count += 1
            case "head":
                self.others.of_head.append(made)

    def used(self, x: Tensor, way: str, state: Any, total: Tensor, left: list[Tensor], maker: "Block") -> Tensor:
        match way:
            case "value":
                return state["made"][0]
            case "integers":
                return torch.sin(state["numbers"].float())[..., None].to(x.dtype)
            case "detached":
                return state["made"][0].detach()
            case "view":
                return torch.cat(state["made"][1:], dim=-1)
            case "number":
                return x * state["number"]
            case "unchanged":
                return state["total"]
            case "sum":
                return total
            case "attribute":
                return maker.made
            case "list":
                return left[-1]
            case "counter":
                return x * self.others.count
            case "parameter":
                return x * maker.ffn_norm.weight
            case "module":
                return self.lent(x)
            case "in place":
                return x.add_(1.0)
        return torch.zeros_like(x)


class Head(llama3.Head):
    others: SimpleNamespace

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        for made in self.others.of_head:
            hidden = hidden + 0.1 * made
        self.others.of_head.clear()
        return super().forward(hidden, labels)


class Model(llama3.Model):
    def __init__(self, config: Config):
        super().__init__(config)
        others = SimpleNamespace(blocks=[], count=0, of_head=[])
        others.blocks = [Block(config, number, others) for number in range(config.n_layers)]
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(others.blocks)})
        self.head.__class__, self.head.others = Head, others
        for user, way, maker in config.uses():
            if way == "module":
                others.blocks[user].lent = others.blocks[maker].ffn_norm

    def forward(self, x: Tensor, seq: SeqInfo) -> Tensor:
        c, ways = self.config, {way for _, way, _ in self.config.uses()}
        x = first = self.embed(x)
        seq, states, left, total = with_mask(seq), {}, [], first
        rope = rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for _ in range(1 + ("again" in ways)):
            for number, layer in enumerate(self.layers.values()):
                for _ in range(1 + (number in [user for user, way, _ in c.uses() if way == "twice"])):
                    x, states[number] = layer(x, rope, seq, states, total, left)
                if "sum" in ways:
                    total = total + states[number]["made"][0]
        return x
