"""An independent oracle: the same weights in transformers' Llama give the same logits, gradients and training."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.blocks import SeqInfo
from tests.distributed.scenarios import config_of
from tests.tiny import FLAVORS, HF, Model, from_hf, to_hf

FLAVOR_NAMES = ["plain", "tied", "scaled"]  # untied, tied, RoPE scaling active


def their_name(name: str) -> str:
    parts = name.split(".")
    number = parts[1] if parts[0] == "layers" else ""
    pattern = name if not number else name.replace(f"layers.{number}.", "layers.{i}.")
    return HF[pattern].replace("{i}", number)


def their_model(flavor: str) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**to_hf(FLAVORS[flavor]), attn_implementation="eager")).float()


def both_models(flavor: str) -> tuple[Model, LlamaForCausalLM]:
    torch.manual_seed(0)
    theirs = their_model(flavor)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    ours, weights = Model(FLAVORS[flavor]), dict(theirs.named_parameters())
    ours.load_state_dict({name: weights[their_name(name)] for name, _ in ours.named_parameters()}, strict=False)
    return ours, theirs


def random_tokens(flavor: str) -> Tensor:
    return torch.randint(FLAVORS[flavor].vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flavor", FLAVOR_NAMES)
def test_logits_equal_those_of_transformers(flavor):
    ours, theirs = both_models(flavor)
    tokens = random_tokens(flavor)
    found = ours.head(ours(tokens, SeqInfo(torch.arange(64).expand(2, 64))))
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{flavor}: logits differ by {difference:.1e}")
    assert difference < 1e-5


@pytest.mark.parametrize("flavor", FLAVOR_NAMES)
def test_gradients_equal_those_of_transformers(flavor):
    ours, theirs = both_models(flavor)
    tokens = random_tokens(flavor)
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    loss = ours.head(ours(tokens, SeqInfo(torch.arange(64).expand(2, 64))), labels) / 126
    loss.backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    differences = {
        name: ((p.grad - gradients[their_name(name)]).norm() / gradients[their_name(name)].norm()).item()
        for name, p in ours.named_parameters()
    }
    print(f"{flavor}: gradients differ by {max(differences.values()):.1e}")
    assert max(differences.values()) < 1e-4, differences


def test_rope_scaling_is_active_in_the_scaled_flavour():
    scaled, _ = both_models("scaled")
    plain = Model(FLAVORS["plain"])
    plain.load_state_dict(scaled.state_dict())
    tokens, seq = random_tokens("plain"), SeqInfo(torch.arange(64).expand(2, 64))
    assert (scaled(tokens, seq) - plain(tokens, seq)).abs().max() > 1e-2


@pytest.mark.parametrize("flavor", FLAVOR_NAMES)
def test_ten_steps_equal_a_plain_adamw_loop_around_transformers(pools, flavor):
    config = config_of({}, flavor, training={"steps": 10, "max_norm": 0.5}, lr_scheduler={"warmup_steps": 3})
    ours = pools[1].run("tests.distributed.scenarios:trajectory", degrees={}, config=config)[0][0]
    theirs = their_model(flavor)
    theirs.load_state_dict({their_name(name): weight for name, weight in ours.weights.items()}, strict=False)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for step, tokens in enumerate(ours.batches, 1):
        logits = theirs(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (min(step / 3, 1.0) if step <= 3 else 1 - (step - 4) / 7)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(ours.losses[step - 1] / loss.item() - 1) < 1e-5, f"loss of step {step}"
        assert abs(ours.norms[step - 1] / norm.item() - 1) < 1e-4, f"gradient norm of step {step}"
    assert norm > 0.5, "clipping was never at work"


@pytest.mark.parametrize("flavor", FLAVOR_NAMES)
def test_a_configuration_survives_the_way_to_transformers_and_back(flavor):
    assert from_hf(LlamaConfig(**to_hf(FLAVORS[flavor])).to_dict()) == FLAVORS[flavor]
