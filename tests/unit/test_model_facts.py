"""What check-model finds of a model on the meta device, and of its map to Hugging Face's format."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from models import llama3
from models.blocks import Flops
from tests import tiny
from titanlite.registry.family import Family
from titanlite.verify import facts, table

# ------------------------------------------------------------------------------------------------------------ Hugging Face


def changed(flavor: str = "plain", **parts: object) -> Family:
    """The tiny Llama with other parts in its module."""
    every = {name: getattr(tiny, name) for name in (*tiny.__all__,)}
    return Family(SimpleNamespace(**{**every, **parts}), tiny.FLAVORS[flavor])


@pytest.mark.parametrize("flavor", tiny.FLAVORS)
def test_a_sound_map_passes(flavor):
    for finds in (facts.name_faults, facts.shape_faults, facts.logit_faults):
        assert finds(changed(flavor)) == []


def test_two_parameters_of_one_name_are_told():
    same = {**tiny.HF, "layers.{i}.ffn.w3.weight": tiny.HF["layers.{i}.ffn.w1.weight"]}
    (fault,) = facts.name_faults(changed(HF=same))
    assert fault.startswith("HF gives layers.*.ffn.w3.weight and layers.*.ffn.w1.weight the same name, ")


def test_a_dimension_that_does_not_come_back_is_told():
    def from_hf(json):
        return dataclasses.replace(tiny.from_hf(json), norm_eps=1e-6)

    assert facts.name_faults(changed(from_hf=from_hf)) == ["from_hf(to_hf(config)).norm_eps is 1e-06, and was 1e-05"]


def test_what_transformers_has_besides_is_told():
    (fault, *more) = facts.shape_faults(changed(to_hf=lambda c: {**tiny.to_hf(c), "attention_bias": True}))
    assert fault == "HF leaves out model.layers.*.self_attn.q_proj.bias of transformers' model"
    assert len(more) == 3


def test_another_shape_is_told():
    (fault, *_) = facts.shape_faults(changed(to_hf=lambda c: {**tiny.to_hf(c), "vocab_size": 500}))
    assert fault == "embed.weight is (512, 64) here, (500, 64) in transformers' model"


def test_a_map_that_exchanges_matrices_of_one_shape_is_told_by_the_logits():
    first, third = "layers.{i}.ffn.w1.weight", "layers.{i}.ffn.w3.weight"
    wrong = changed(HF={**tiny.HF, first: tiny.HF[third], third: tiny.HF[first]})
    assert facts.name_faults(wrong) == facts.shape_faults(wrong) == []
    assert facts.logit_faults(wrong)[0].startswith("logits differ from those of transformers' model by ")


# -------------------------------------------------------------------------------------------------------------- on meta


def test_flops_that_are_no_flops_are_told():
    faults = facts.flops_faults(changed(flops=lambda config, seq_len: Flops(causal=2.0, palm=1.0)))
    assert [fault.partition("): ")[2].partition(":")[0] for fault in faults] == [
        "causal 2 is more than palm 1",
        "for one token causal 2 and palm 1 must be equal",
        "palm says 1 a token, PyTorch counts 614,400",
    ]


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


def test_what_only_some_flavors_have_is_told_with_their_names():
    families = {flavor: changed(flavor) for flavor in ("plain", "tied", "uneven")}
    faults = table.over_flavors(families, lambda family: [f"{family.config.vocab_size}", "every"])
    assert faults == ["plain, tied: 512", "every", "uneven: 515"]
