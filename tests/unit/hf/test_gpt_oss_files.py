"""gpt-oss's folders: tensors that are joined and transposed there, in bfloat16 or MXFP4."""

import torch
from torch import Tensor

from models.attention import SeqInfo
from tests.hf_folders import read, tensors_of, their_model
from tests.quantized_files import MXFP4, from_mxfp4, write
from titanlite.hf.export import items_of
from titanlite.hf.folder import find_weights, their_names
from titanlite.registry.family import load_family

NAME, EXPERTS = "tests.tiny_gpt_oss", "layers.1.ffn.experts"


def quantized(source, folder) -> dict[str, Tensor]:
    """Writes a folder like another, with random bytes as the experts' matrices -> the values of all of its tensors."""
    generator, stored, values = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in tensors_of(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values[name] = from_mxfp4(blocks, scales)
    write(folder, source, stored, MXFP4)
    return values


def test_mxfp4_weights_are_their_values_and_give_transformers_logits(sources, tmp_path):
    values = quantized(sources(NAME, "plain"), tmp_path / "mxfp4")
    ours = read(tmp_path / "mxfp4", NAME, "plain")
    there = "model.layers.1.mlp.experts"
    both, down = values[f"{there}.gate_up_proj"], values[f"{there}.down_proj"]
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w1"), both[..., ::2].transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w3"), both[..., 1::2].transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w2"), down.transpose(1, 2))
    assert torch.equal(ours.get_parameter(f"{EXPERTS}.w3_bias"), values[f"{there}.gate_up_proj_bias"][:, 1::2].float())
    theirs = their_model(load_family(NAME, "plain"))
    theirs.load_state_dict({name: tensor.float() for name, tensor in values.items()})
    tokens = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = ours.head(ours(tokens, SeqInfo(torch.arange(48).expand(2, 48))))
        expected = theirs(tokens).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_any_slice_of_a_part_is_that_of_the_whole(sources):
    family = load_family(NAME, "plain")
    weights = find_weights(sources(NAME, "plain"), family, family.on_meta())
    stored = tensors_of(sources(NAME, "plain"))
    (entry,) = weights[f"model.{EXPERTS}.w3"]
    whole = stored["model.layers.1.mlp.experts.gate_up_proj"][..., 1::2].transpose(1, 2)
    for box in ((slice(0, 8), slice(0, 32), slice(0, 64)), (slice(3, 5), slice(7, 20), slice(1, 63)), (slice(7, 8),) * 3):
        assert torch.equal(entry.read(box), whole[box])


def test_parts_are_joined_to_the_tensor_that_they_are_of(sources):
    family, stored = load_family(NAME, "plain"), tensors_of(sources(NAME, "plain"))
    tensors = dict(read(sources(NAME, "plain"), NAME, "plain").named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    items = items_of(shapes, their_names(family, shapes), lambda _: torch.float32)
    assert {item.theirs for item in items} == stored.keys()
    assert all(torch.equal(item.joined(tensors), stored[item.theirs]) for item in items)
