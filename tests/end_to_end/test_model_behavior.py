"""titanlite check-model, the forward pass: correct families pass; a fork with one fault fails one row, which names the
module.
"""

import pytest
import torch
from torch import nn

from models import llama3
from tests import tiny
from tests.forks.right import own_router
from titanlite.registry.family import Family, load_module
from titanlite.transforms.initialize import initialize
from titanlite.verify import behavior, small_runs
from titanlite.verify.small_runs import guarded
from titanlite.verify.table import BEHAVIOR, Check, Table

FAMILIES = ["tiny:plain", "tiny_qwen3:biased", "tiny_gemma3:two", "tiny_olmo2:plain", "tiny_gpt_oss:plain", "tiny_biased:tied",
            "tiny_dropout:plain", "forks.hybrid:plain", "forks.right.own_router:plain"]  # fmt: skip


CHECKS = {
    "causality": behavior.causality_faults,
    "documents": behavior.document_faults,
    "generate": behavior.generation_faults,
    "bfloat16": behavior.bfloat16_faults,
}
assert tuple(CHECKS) == BEHAVIOR


def rows(name: str) -> dict[str, tuple[str, list[str]]]:
    """The verdict and texts of each row."""
    module_name, _, flavor = name.partition(":")
    module = load_module(f"tests.{module_name}")
    table, family = Table(), Family(module, module.FLAVORS[flavor or "plain"])
    found = {name: table.row(Check(name, lambda check=check: check(family))) for name, check in CHECKS.items()}
    return {name: (row.verdict, row.texts) for name, row in found.items()}


def faults(name: str) -> dict[str, str]:
    return {row: texts[0] for row, (verdict, texts) in rows(f"forks.{name}").items() if verdict == "FAILED"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_right_family_passes_every_row(name):
    found = rows(name)
    refusal = ("not run", ["the model refuses a cache: linear attention has no cache"])
    assert found == {
        "causality": ("passed", []),
        "documents": ("passed", []),
        "generate": refusal if name == "forks.hybrid:plain" else ("passed", []),
        "bfloat16": ("passed", []),
    }


@pytest.mark.parametrize(
    ("fork", "row", "words"),
    [
        ("looks_ahead", "causality", "another token at position 1 changes the result of layers.1.attention by "),
        ("ignores_documents", "documents", "of a packed row changes the result of layers.1.attention by "),
        ("ignores_cache", "generate", "generate changes the result of layers.1.attention by "),
        ("overflow", "bfloat16", "in bfloat16 the result of layers.1.attention is not finite"),
    ],
)
def test_a_layer_with_one_fault_is_named(fork, row, words):
    found = faults(fork)
    assert words in found.pop(row)
    assert not found or fork == "looks_ahead"


def with_block(forward) -> Family:
    """The tiny Llama with another forward pass in its second layer."""

    class Block(llama3.Block):
        pass

    Block.forward = forward

    class Model(llama3.Model):
        def __init__(self, config):
            super().__init__(config)
            self.layers["1"].__class__ = Block

    parts = {name: getattr(tiny, name) for name in ("Config", "FLAVORS", "initial", "sharding", "flops")}
    return Family(type("module", (), {**parts, "Model": Model}), tiny.FLAVORS["plain"])


def test_a_bfloat16_error_beyond_rounding_is_named():
    def forward(self, x, rope, seq):
        # a running sum, in the precision of the activations, whose differences are used
        total = (x + 100).cumsum(1)
        return llama3.Block.forward(self, total - total.roll(1, 1).index_fill(1, torch.tensor([0]), 0) - 100, rope, seq)

    (fault,) = guarded(behavior.bfloat16_faults, with_block(forward))
    assert fault.startswith("in bfloat16 the result of layers.1 differs by ")


# ways to write a router: scores of all experts, (tokens, experts) -> weights and numbers of a token's experts
ROUTERS = {
    "topk": lambda scores: scores.softmax(-1, dtype=torch.float32).topk(2),
    "sigmoid": lambda scores: (scores.float().sigmoid() + 0.5).topk(4, sorted=False),
    "sort": lambda scores: tuple(each[:, :2] for each in scores.float().softmax(-1).sort(descending=True, stable=True)),
    "argsort": lambda scores: (scores.softmax(-1), scores.argsort(dim=-1, descending=True)),
    "above a threshold": lambda scores: _all(scores, scores.float().softmax(-1) > 0.15),
}


def _all(scores: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.float().softmax(-1) * used, torch.arange(scores.shape[1]).expand_as(scores)


def routed(monkeypatch: pytest.MonkeyPatch, route, seed: int) -> Family:
    """The fork with its own router, with this code and these random weights."""
    monkeypatch.setattr(own_router.RoutedExperts, "route", lambda self, x: route(self.router(x)))
    monkeypatch.setattr(small_runs, "initialize", lambda model, family, _, device: initialize(model, family, seed, device))
    return Family(own_router, own_router.FLAVORS["plain"])


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_that_chooses_another_expert_after_rounding_is_no_fault(monkeypatch, router):
    found = {seed: behavior.bfloat16_faults(routed(monkeypatch, ROUTERS[router], seed)) for seed in range(3)}
    assert not any(found.values()), found


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "sigmoid"])  # sigmoid(300) is 1, for all experts
def test_a_router_whose_scores_are_equal_in_bfloat16_is_a_fault(monkeypatch, router):
    (fault,) = behavior.bfloat16_faults(routed(monkeypatch, lambda scores: ROUTERS[router](scores + 300), 0))
    assert fault.startswith("in bfloat16 what distinguishes the scores by which layers.0.ffn decides differs by ")


def test_padding_that_changes_generated_text_is_named():
    def forward(self, x, rope, seq):
        if seq.cache is None:
            x = x + x.cumsum(1)
        else:  # a state that padding changes
            before = seq.cache.__dict__.setdefault("sums", {}).get(self, 0.0)
            seq.cache.sums[self] = before + x.sum(1, keepdim=True)
            x = x + before + x.cumsum(1)
        return llama3.Block.forward(self, x, rope, seq)

    (fault,) = guarded(behavior.generation_faults, with_block(forward))
    assert fault.startswith("generate changes the result of layers.1 by ")
    assert "of a text of 1 tokens" in fault or "of a text of 9 tokens" in fault


def test_a_head_whose_loss_sees_later_tokens_fails(monkeypatch):
    plain = tiny.Model.__init__

    def construct(self, config):
        plain(self, config)
        self.head.register_forward_hook(
            lambda head, arguments, result: result + arguments[0].mean() if len(arguments) == 2 else result
        )

    monkeypatch.setattr(llama3.Model, "__init__", construct)
    (fault,) = behavior.causality_faults(Family(tiny, tiny.FLAVORS["plain"]))
    assert fault.startswith("another token at position 16 changes the loss before it by ")


def test_a_refusal_of_documents_is_no_failure():
    def forward(self: nn.Module, x, rope, seq):
        if seq.documents is not None:
            raise NotImplementedError("one document per row")
        return llama3.Block.forward(self, x, rope, seq)

    family, table = with_block(forward), Table()
    for name, check in CHECKS.items():
        row = table.row(Check(name, lambda check=check: check(family)))
        if name == "documents":
            assert row[:3] == ("documents", "not run", ["the model refuses packed documents: one document per row"])
        else:
            assert row.verdict == "passed"
