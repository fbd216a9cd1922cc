"""Attention inside documents: a packed row equals its documents one by one, with any kernel."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex

from models import attention as their
from models import llama3
from models.attention import SeqInfo, block_mask
from tests.tiny import FLAVORS
from titanlite.data.batch import Batch
from titanlite.loop.loss import sequence_of, summed_loss
from titanlite.transforms.activation_checkpoint import checkpoint_blocks, checkpoint_operations

_SEQ = 32
# Two rows per case: the lengths of their documents, and the tokens of padding that follow; seq + 1 tokens in total.
ROWS = {
    "several": ([(5, 1, 13, 14), (20, 2, 1, 1, 9)], [0, 0]),
    "each token by itself": ([(1,) * 33, (1,) * 33], [0, 0]),
    "one fills the row": ([(33,), (33,)], [0, 0]),
    "one that ends where the row does, and one whose last token is only a label": ([(32, 1), (16, 17)], [0, 0]),
    "padding": ([(7, 1, 12), (32,)], [13, 1]),
}


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tiny(flavor: str = "plain") -> llama3.Model:
    model = llama3.Model(FLAVORS[flavor])
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def packed(lengths: list[tuple[int, ...]], padding: list[int], seed: int = 0) -> Batch:
    """Rows of random documents: the first token of each and padding are not labels."""
    documents, counted = [], []
    for row, fill in zip(lengths, padding, strict=True):
        numbers = [number for number, length in enumerate((*row, fill)) for _ in range(length)]
        assert len(numbers) == _SEQ + 1
        starts = list(itertools.accumulate(row, initial=0))
        documents.append(numbers[:_SEQ])
        counted.append([place not in starts and number < len(row) for place, number in enumerate(numbers)])
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(512, (len(lengths), _SEQ + 1), generator=random)
    return Batch(tokens, torch.tensor(counted), torch.tensor(documents, dtype=torch.int32))


def alone(batch: Batch, lengths: list[tuple[int, ...]]) -> list[Tensor]:
    """The tokens of each document of a packed batch."""
    return [
        batch.tokens[row, first : first + length]
        for row, row_lengths in enumerate(lengths)
        for first, length in zip(itertools.accumulate(row_lengths, initial=0), row_lengths, strict=False)
    ]


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the expected norm."""
    return ((found - expected).norm() / expected.norm()).item() if expected.norm() else found.norm().item()


def loss_and_gradients(model: nn.Module, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    losses = [summed_loss(model, batch) for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.detach() for loss in losses), {name: p.grad.clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------------------------- the mathematics


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("flavor", ["plain", "tied"])
def test_a_packed_row_gives_the_loss_and_gradients_of_its_documents_one_by_one(name, flavor):
    lengths, padding = ROWS[name]
    batch, model = packed(lengths, padding), tiny(flavor)
    loss, gradients = loss_and_gradients(model, [batch])
    documents = [Batch(tokens[None]) for tokens in alone(batch, lengths) if len(tokens) > 1]
    if not documents:  # no mask is requested
        assert loss == 0
        assert all(gradient.eq(0).all() for gradient in gradients.values())
        return
    expected_loss, expected = loss_and_gradients(model, documents)
    assert abs(loss / expected_loss - 1) < 1e-5
    assert max(distance(gradients[key], gradient) for key, gradient in expected.items()) < 1e-5


def test_positions_begin_again_in_each_document():
    # RoPE is invariant to the first position; other models are not
    seq = sequence_of(torch.zeros(2, 5), torch.tensor([[0, 0, 0, 1, 2], [0, 1, 1, 1, 1]]))
    assert seq.positions.tolist() == [[0, 1, 2, 0, 0], [0, 0, 1, 2, 3]]


def test_a_model_that_does_not_make_the_mask_is_refused(monkeypatch):
    monkeypatch.setattr(llama3, "with_mask", lambda seq: seq)
    with pytest.raises(AssertionError, match="with_mask"):
        summed_loss(tiny(), packed(*ROWS["several"]))


# ---------------------------------------------------------------------------------------------------------- FlexAttention


@pytest.mark.parametrize(("mode", "times"), [("full", 2), ("per operation", 1)])
def test_flex_attention_is_recomputed_only_where_whole_blocks_are(monkeypatch, mode, times):
    """Its plain implementation has a backward pass on a CPU, which only the public function refuses. The distributed test of
    documents compares its gradients with those of the dense mask.
    """
    implementation = importlib.import_module("torch._higher_order_ops.flex_attention")
    forwards, attention = [], implementation.math_attention
    eager = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(llama3, "with_mask", lambda seq: seq._replace(mask=block_mask(seq.documents)))
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(their, "_compiled_flex_attention", lambda: eager)
    monkeypatch.setattr(implementation, "math_attention", lambda *args: forwards.append(1) or attention(*args))
    model = tiny()
    if mode == "full":
        checkpoint_blocks(model, every=1)
    else:
        checkpoint_operations(model, ())
    for seed in range(2):  # the first batch also compiles, which calls the same function for shapes
        forwards.clear()
        loss_and_gradients(model, [packed(*ROWS["several"], seed=seed)])
    assert len(forwards) == 2 * times  # layers
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("family", "flavor", "masked"),
    [("tests.tiny_gpt_oss", "plain", 2), ("tests.tiny_gemma3", "two", 4), ("tests.tiny", "plain", 0)],
)
def test_on_a_gpu_flex_attention_skips_blocks_of_later_tokens(monkeypatch, family, flavor, masked):
    module, seq, seen = importlib.import_module(family), 300, []
    model = module.Model(module.FLAVORS[flavor])

    def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, *_: Any) -> Tensor:
        seen.append(mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(their, "attend", attended)
    monkeypatch.setattr(their, "_compiled_create_block_mask", lambda: flex.create_block_mask)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    model(torch.zeros(1, seq, dtype=torch.int64), SeqInfo(torch.arange(seq)[None]))
    masks = [mask for mask in seen if mask is not None]
    assert len(masks) == masked
    for mask in masks:
        blocks = (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist()
        assert blocks[0] == 1 and max(blocks) <= 3 and sum(blocks) <= 1 + 2 + 3
