"""An independent oracle: the same weights in transformers' models give the same logits, gradients and training."""

import importlib
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.attention import SeqInfo
from tests.distributed.scenarios import config_of
from tests.hf_folders import CASES, of_files
from titanlite.hf.folder import each_expert, their_name
from titanlite.verify.compare import relative_difference
from titanlite.verify.facts import stored_tensors_of, tensors_of_files

# Every special feature of every family: tied and untied, scaled RoPE, biases, windows shorter than the sequence, capped scores.
MODELS = [
    *CASES,
    *(("tests.tiny_qwen3", "plain"), ("tests.tiny_qwen3", "biased and tied"), ("tests.tiny_gemma3", "untied")),
    *(("tests.tiny_olmo2", "tied"), ("tests.tiny_olmoe", "normalised"), ("tests.tiny_deepseek_v3", "yarn")),
]
OF_EACH_FAMILY = [*{name: (name, flavor) for name, flavor in reversed(MODELS)}.values()]  # its first flavor
every_model = pytest.mark.parametrize(("name", "flavor"), MODELS)


def their_model(name: str, flavor: str) -> nn.Module:
    module = importlib.import_module(name)
    ids = {"eos_token_id": 0, "pad_token_id": None}  # the embedding of a padding token would get no gradient
    config = AutoConfig.for_model(**module.to_hf(module.FLAVORS[flavor]), **ids)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def both_models(name: str, flavor: str) -> tuple[nn.Module, nn.Module]:
    module = importlib.import_module(name)
    torch.manual_seed(0)
    theirs = their_model(name, flavor)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1 and key.endswith("norm.weight") and "gemma" not in name)
        for key, buffer in theirs.named_buffers():
            if key in theirs.state_dict():  # biases of routers
                buffer.normal_(std=0.1)
    ours, weights = module.Model(module.FLAVORS[flavor]), tensors_of_files(theirs)
    named = stored_tensors_of(ours).items()
    ours.load_state_dict({key: of_files(module, key, tensor, weights) for key, tensor in named}, strict=False)
    return ours, theirs


def random_tokens() -> Tensor:
    return torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(1))


@every_model
def test_logits_and_gradients_equal_those_of_transformers(name, flavor):
    ours, theirs = both_models(name, flavor)
    module = importlib.import_module(name)
    tokens = random_tokens()
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    hidden = ours(tokens, SeqInfo(torch.arange(64).expand(2, 64)))
    found, expected = ours.head(hidden), theirs(tokens, labels=tokens)
    assert expected.logits.std() > 0.1
    difference = ((found - expected.logits).abs().max() / expected.logits.abs().max()).item()
    loss = ours.head(hidden, labels) / 126
    assert difference < 1e-5 and abs(loss.item() / expected.loss.item() - 1) < 1e-6
    loss.backward()
    expected.loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad  # the gradients, by the names of weights in files
    gradients = tensors_of_files(theirs)
    differences = {key: relative_difference(p.grad, of_files(module, key, p, gradients)) for key, p in ours.named_parameters()}
    print(f"{name} {flavor}: logits differ by {difference:.1e}, gradients by {max(differences.values()):.1e}")
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize(
    ("name", "flavor", "changes"),
    [
        ("tests.tiny", "scaled", {"rope_scaling": None}),
        *(
            ("tests.tiny_gemma3", "plain", changes)
            for changes in ({"window": 64}, {"rope_factor": 1.0}, {"local_rope_theta": 500.0}, {"query_scalar": 16})
        ),
        ("tests.tiny_gemma3", "two", {"attention_softcap": None}),
        ("tests.tiny_deepseek_v3", "yarn", {"rope_scaling": None}),
        *(
            ("tests.tiny_deepseek_v3", "plain", changes)
            for changes in ({"interleaved": False}, {"groups": 1, "top_groups": 1}, {"scale": 1.0})
        ),
    ],
)
def test_each_special_feature_has_an_effect_in_these_comparisons(name, flavor, changes):
    special, _ = both_models(name, flavor)
    module = importlib.import_module(name)
    plain = module.Model(type(special.config)(**{**vars(special.config), **changes}))
    plain.load_state_dict(special.state_dict())
    tokens, seq = random_tokens(), SeqInfo(torch.arange(64).expand(2, 64))
    assert (special(tokens, seq) - plain(tokens, seq)).abs().max() > 1e-2


@torch.no_grad()
def give(weights: Mapping[str, Tensor], module: ModuleType, theirs: nn.Module) -> None:
    """Writes our weights to transformers' model, which concatenates the first and the third matrix of each expert."""
    parameters = dict(theirs.named_parameters())
    for name, weight in weights.items():
        if "{e}" not in (their := their_name(module, name)):
            (part,) = each_expert(their.replace("block_sparse_moe", "mlp"), weight.shape)
            part.view(parameters[part.name]).copy_(weight)
    for name in weights:
        if name.endswith("experts.w2") and "{e}" in their_name(module, name):
            w1, w2, w3 = (weights[name.replace("w2", key)] for key in ("w1", "w2", "w3"))
            experts = theirs.get_submodule(f"model.layers.{name.split('.')[1]}.mlp.experts")
            experts.gate_up_proj.copy_(torch.cat([w1, w3], dim=1))
            experts.down_proj.copy_(w2)


@pytest.mark.parametrize(("name", "flavor"), OF_EACH_FAMILY)
def test_ten_steps_equal_a_plain_adamw_loop_around_transformers(pools, name, flavor):
    module = importlib.import_module(name)
    config = config_of(
        {}, flavor, model={"name": module.__name__}, training={"steps": 10, "max_norm": 0.5}, lr_scheduler={"warmup_steps": 3}
    )
    ours = pools[1].run("tests.distributed.scenarios:trajectory", degrees={}, config=config)[0][0]
    theirs = their_model(name, flavor)
    give(ours.weights, module, theirs)
    is_matrix = {p: p.ndim > 1 and not name.endswith("bias") for name, p in theirs.named_parameters()}  # some are stacked
    matrices, others = ([p for p, found in is_matrix.items() if found == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step, tokens in enumerate(ours.batches, 1):
        logits = theirs(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (min(step / 3, 1.0) if step <= 3 else 1 - (step - 3) / 8)
        optimizer.step()
        optimizer.zero_grad()
    worst = [max(abs(a / b - 1) for a, b in zip(*pair, strict=True)) for pair in ((ours.losses, losses), (ours.norms, norms))]
    print(f"{name} {flavor}: losses of ten steps differ by {worst[0]:.1e}, gradient norms by {worst[1]:.1e}")
    assert worst[0] < 1e-5 and worst[1] < 1e-4, worst
    assert max(norms) > 0.5, "clipping was never at work"
