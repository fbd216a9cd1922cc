"""What check-model finds in a model on the meta device, and in its map to Hugging Face's format."""

import functools
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models import llama3
from models.blocks import Constant
from tests import tiny
from titanlite.config.read import Faults
from titanlite.config.schema import Config
from titanlite.loop import checks
from titanlite.loop.checks import check
from titanlite.registry.family import Family
from titanlite.verify import facts
from titanlite.verify.small_runs import guarded, takes_documents

# ------------------------------------------------------------------------------------------------------------ Hugging Face


def changed(flavor: str = "plain", **parts: object) -> Family:
    """The tiny Llama with other parts in its module."""
    every = {name: getattr(tiny, name) for name in (*tiny.__all__,)}
    return Family(SimpleNamespace(**{**every, **parts}), tiny.FLAVORS[flavor])


def test_another_shape_is_reported():
    (fault, *_) = facts.shape_faults(changed(to_hf=lambda c: {**tiny.to_hf(c), "vocab_size": 500}))
    assert fault == "embed.weight is (512, 64) here, (500, 64) in transformers' model"


def test_a_map_that_swaps_matrices_of_one_shape_is_found_by_the_logits():
    first, third = "layers.{i}.ffn.w1.weight", "layers.{i}.ffn.w3.weight"
    wrong = changed(HF={**tiny.HF, first: tiny.HF[third], third: tiny.HF[first]})
    assert facts.name_faults(wrong) == facts.shape_faults(wrong) == []
    assert facts.logit_faults(wrong)[0].startswith("logits differ from those of transformers' model by ")


# -------------------------------------------------------------------------------------------------------------- on meta


def test_tensors_that_are_neither_parameter_nor_buffer_and_parameters_elsewhere_are_named():
    class Model(llama3.Model):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.layers.values():
                layer.table = torch.ones(3)
            self.head.norm.weight = torch.nn.Parameter(torch.ones(64, device="cpu", dtype=torch.float64))

    assert facts.construction_faults(changed(Model=Model)) == [
        "head.norm.weight is torch.float64 on cpu, and must be float32 on meta",
        "layers.*.table is a tensor but no parameter, and is lost on meta: compute it in forward",
    ]


def test_what_a_checkpoint_keeps_of_the_dimensions_is_the_same_in_every_process(monkeypatch):
    """The address of a function, or the order of a set of texts, refused every resume and every second node."""

    def with_fields(**fields: object) -> Family:
        kind = make_dataclass("Own", fields, bases=(llama3.Config,), kw_only=True, frozen=True)
        return Family(changed().module, kind(**vars(tiny.FLAVORS["plain"]), **fields))

    sets = {"kinds": frozenset("ba"), "few": frozenset({12, 5}), "by": {"x": {3, 1}}}
    kept = with_fields(act=F.silu, approximate=F.gelu, norm=nn.LayerNorm, **sets)
    names = {"act": "torch.nn.functional.silu", "approximate": repr(F.gelu), "by": {"x": "{1, 3}"}}
    names |= {"norm": repr(nn.LayerNorm), "kinds": "frozenset({'a', 'b'})", "few": repr(frozenset({12, 5}))}  # as in 0.3
    assert kept.dimensions().items() >= names.items()

    changing = with_fields(act=functools.partial(F.silu, inplace=True), table={"x": [lambda x: x]}, gate=object())
    (fault,) = guarded(facts.construction_faults, changing)
    assert [f"Config.{name}" in fault for name in ("act", "gate", "table")] == [True, True, False]
    monkeypatch.setattr(checks, "family_of", lambda keys: changing)
    with pytest.raises(Faults, match=r"Config\.act"):
        check(Config(), "run.toml", 1)


def test_a_model_that_indexes_by_a_buffer_has_its_values_when_packed_rows_are_tried():
    class Model(llama3.Model):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("phase", torch.zeros(1, dtype=torch.long))

        def forward(self, x, seq):
            return super().forward(x, seq) * torch.ones(2)[self.phase]

    indexing = changed(Model=Model, initial=lambda config: {"phase": Constant(1.0), **tiny.initial(config)})
    torch.use_deterministic_algorithms(True)  # fills memory without values with the largest integer
    try:
        assert takes_documents(indexing)
    finally:
        torch.use_deterministic_algorithms(False)
