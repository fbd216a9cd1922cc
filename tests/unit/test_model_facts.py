"""What check-model finds in a model on the meta device, and in its map to Hugging Face's format."""

from types import SimpleNamespace

import torch

from models import llama3
from tests import tiny
from titanlite.registry.family import Family
from titanlite.verify import facts

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
