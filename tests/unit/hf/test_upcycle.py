"""Upcycling: the MoE model computes the same as the dense model, and a model that cannot be upcycled is refused by name."""

from pathlib import Path

import pytest
import torch

from models.attention import SeqInfo
from tests import hf_folders
from titanlite.checkpoint.whole import Stored
from titanlite.ground.errors import UserError
from titanlite.registry.family import Family, load_family
from titanlite.tools import import_hf
from titanlite.tools.import_hf import model_section, target_of
from titanlite.tools.open_model import recognize
from titanlite.tools.upcycle import Upcycling

EXPERTS = 4


def logits(family: Family, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = family.module.Model(family.config)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model.head(model(tokens, SeqInfo(torch.arange(tokens.shape[1]).expand_as(tokens))))


def weights_of(checkpoint: Path, family: Family) -> dict[str, torch.Tensor]:
    stored = Stored(checkpoint)
    return {name: stored.read(f"model.{name}").float() for name, _ in family.on_meta().named_parameters()}


@pytest.mark.parametrize(
    ("name", "flavor", "mixture", "top_k"),
    [("tests.tiny", "scaled", "mixtral", 2), ("tests.tiny_qwen3", "tied", "qwen3_moe", EXPERTS)],
)
def test_the_moe_model_equals_the_dense_model_and_its_model_section(tmp_path, name, flavor, mixture, top_k):
    source = hf_folders.write(tmp_path / "source", name, flavor)
    import_hf.import_hf(source, tmp_path / "dense")
    upcycling = Upcycling(EXPERTS, top_k, 0)
    import_hf.import_hf(source, tmp_path / "mixture", upcycling=upcycling)
    dense, target = recognize(source), target_of(source, "", upcycling)
    section = model_section(target, source)
    named = load_family(section["name"], section["flavor"], section["hf_assets_path"], section["overrides"])
    assert target.name == mixture and named.config == target.family.config
    assert (named.config.n_experts, named.config.top_k) == (EXPERTS, top_k)
    tokens = torch.randint(dense.family.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    ours = weights_of(tmp_path / "mixture", named)
    expected = logits(dense.family, weights_of(tmp_path / "dense", dense.family), tokens)
    assert expected.std() > 0.01
    torch.testing.assert_close(logits(named, ours, tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    router = ours["layers.0.ffn.router.weight"]
    assert router.std() == pytest.approx(0.02, rel=0.3) and len(router.unique(dim=0)) == EXPERTS
    torch.manual_seed(0)
    for weight in (weight for each, weight in ours.items() if each.endswith("router.weight")):
        weight.normal_()  # for any routing
    torch.testing.assert_close(logits(named, ours, tokens), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "flavor", "word"),
    [
        ("tests.tiny_olmo2", "plain", "olmo2 has no MoE family; there are: llama3 -> mixtral, qwen3 -> qwen3_moe"),
        ("tests.tiny_qwen3", "biased", "qkv_bias = True: qwen3_moe has no such dimension"),
    ],
)
def test_a_dense_family_without_an_moe_family_is_refused(tmp_path, name, flavor, word):
    with pytest.raises(UserError, match=word):
        target_of(hf_folders.write(tmp_path / "source", name, flavor), "", Upcycling(EXPERTS, 2, 0))
