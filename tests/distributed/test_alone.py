"""One process casts parameters where they are used, instead of FSDP2: the same results, no more memory, for every model."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.recompute import kept_bytes
from models import llama3
from models.blocks import RMSNorm
from models.head import IGNORE, Head
from tests.distributed.scenarios import CPU, MODES, config_of, first_microbatch, mesh_of
from titanlite.loop.loss import summed_loss
from titanlite.loop.step import build_model
from titanlite.parallel import parallelize as order
from titanlite.registry.family import Family, load_family

HERE = "tests.distributed.test_alone"
BFLOAT16 = {"mixed_precision_param": "bfloat16"}


def built(flavor: str, fsdp: bool, module: Any = None, **sections: Any) -> tuple[nn.Module, Any]:
    config = config_of({}, flavor, training=BFLOAT16, **sections)
    family = load_family("tests.tiny", flavor)
    if module is not None:
        styles = family.module.sharding(family.config) | ({"norm": "replicate"} if module is WithKeywords else {})
        own = {"Model": module, "sharding": lambda _: styles}
        family = Family(SimpleNamespace(**vars(family.module) | own), family.config)
    with mock.patch.object(order, "needs_fsdp", lambda *_: fsdp):
        model = build_model(family, config, mesh_of({}), CPU)
    assert isinstance(model, FSDPModule) == fsdp
    return model, first_microbatch(config, mesh_of({}))


def step(fsdp: bool, flavor: str = "plain", module: Any = None, **sections: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch._dynamo.reset()
    model, batch = built(flavor, fsdp, module, **sections)
    loss = summed_loss(model, batch)
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}


def bytes_between_passes(fsdp: bool, keep_casts: bool = False, **sections: Any) -> int:
    torch._dynamo.reset()
    cast = order.cast_where_used
    keeping = {"side_effect": lambda *args, again, **more: cast(*args, again=again and not keep_casts, **more)}
    with mock.patch.object(order, "cast_where_used", **keeping):
        model, batch = built("deep", fsdp, **sections)
    return kept_bytes(model, batch.inputs())


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        *((mode, None) for mode in ("none", "full", "full by chunks", "per operation")),
        pytest.param("none", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_no_more_is_kept_for_the_backward_pass_than_with_fsdp(pools, mode, backend):
    sections = {"activation_checkpoint": MODES[mode], "compile": {"enable": backend is not None, "backend": backend or "eager"}}
    ours, theirs = (pools[1].run(f"{HERE}:bytes_between_passes", fsdp=fsdp, **sections)[0] for fsdp in (False, True))
    print(f"{mode}, {backend}: {ours:,} bytes, with FSDP2 {theirs:,}")
    assert ours <= theirs


def test_cast_parameters_are_not_kept_for_the_backward_pass(pools):
    less, more = (pools[1].run(f"{HERE}:bytes_between_passes", fsdp=False, keep_casts=keep)[0] for keep in (False, True))
    assert less < 0.95 * more, (less, more)


class OwnHead(nn.Module):
    """A head as a fork may write it, without regard to master weights."""

    def __init__(self, config: llama3.Config):
        super().__init__()
        self.norm, self.output = RMSNorm(config.dim, config.norm_eps), nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.output(self.norm(hidden))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE)


class DerivedHead(Head):
    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        return OwnHead.forward(self, hidden, labels)


class WithOwnHead(llama3.Model):
    def __init__(self, config: llama3.Config):
        super().__init__(config)
        self.head = OwnHead(config)
        self.tie_weights()


class WithDerivedHead(llama3.Model):
    def __init__(self, config: llama3.Config):
        super().__init__(config)
        self.head = DerivedHead(RMSNorm(config.dim, config.norm_eps), config.dim, config.vocab_size)
        self.tie_weights()


class WithKeywords(llama3.Model):
    """It calls its blocks with keyword arguments, and has a parameter outside of blocks."""

    def __init__(self, config: llama3.Config):
        super().__init__(config)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, seq: Any) -> Tensor:
        x = self.norm(self.embed(x))
        c = self.config
        rope = llama3.rotation(seq, c.head_dim, c.rope_theta, c.rope_scaling)
        for layer in self.layers.values():
            x = layer(x, rope=rope, seq=seq)
        return x


class WithTwoNames(llama3.Model):
    """Some of its modules have two names, within a block or outside of blocks."""

    def __init__(self, config: llama3.Config):
        super().__init__(config)
        for layer in self.layers.values():
            layer.ffn_norm = layer.attention_norm
        self.gates = nn.ModuleList(layer.ffn.w1 for layer in self.layers.values())


@pytest.mark.parametrize("flavor", ["plain", "tied"])
@pytest.mark.parametrize("module", [None, WithOwnHead, WithDerivedHead, WithKeywords, WithTwoNames])
def test_every_kind_of_model_equals_fsdp_in_bfloat16(pools, flavor, module):
    ours, theirs = (pools[1].run(f"{HERE}:step", fsdp=fsdp, flavor=flavor, module=module)[0] for fsdp in (False, True))
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-4)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        assert gradient.dtype == torch.float32
        assert (gradient - theirs[1][name]).norm() <= 0.02 * theirs[1][name].norm(), name
