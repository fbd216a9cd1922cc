"""The output head: its chunked loss is the plain cross entropy, gradients included, and never holds all logits at once."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.blocks import RMSNorm
from models.head import IGNORE, Head, Sizes, chunk_of

_BATCH, _SEQ, _DIM, _VOCABULARY, _EPS = 3, 10, 16, 72, 1e-5
_TOKENS = _BATCH * _SEQ


def _head(chunk: int = _TOKENS, seed: int = 0) -> Head:
    head = Head(RMSNorm(_DIM, _EPS), _DIM, _VOCABULARY)
    head.sizes = Sizes(chunk * _VOCABULARY, 5 * _DIM)
    torch.manual_seed(seed)
    with torch.no_grad():
        head.norm.weight.normal_(1.0, 0.1)
        head.output.weight.normal_()
    return head


def _inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Hidden states and labels, about a fifth of which do not count, including the first and the last of a row."""
    torch.manual_seed(seed)
    labels = torch.randint(_VOCABULARY, (_BATCH, _SEQ))
    labels[torch.rand(_BATCH, _SEQ) < 0.2] = IGNORE
    labels[0, 0] = labels[1, -1] = IGNORE
    labels[0, 1], labels[0, 2] = 0, _VOCABULARY - 1
    return torch.randn(_BATCH, _SEQ, _DIM, requires_grad=True), labels


def _run(head: Head, hidden: Tensor, labels: Tensor, scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of hidden, projection and norm."""
    loss = head(hidden, labels)
    (loss * scale).backward()
    return loss.detach(), [hidden.grad, head.output.weight.grad, head.norm.weight.grad]


def _reference(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """The same in float64 by the textbook."""
    hidden = hidden.detach().double().requires_grad_()
    weight, norm = (p.detach().double().requires_grad_() for p in (head.output.weight, head.norm.weight))
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + _EPS).rsqrt() * norm
    logits, labels = (normed @ weight.T).flatten(0, 1), labels.flatten()
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    of_all = logits.logsumexp(-1).square()[labels != IGNORE].sum()
    of_label = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100, label_smoothing=smoothing)
    loss = of_label + z_loss * of_all
    (loss * scale).backward()
    return loss.detach(), [hidden.grad, weight.grad, norm.grad]


def _assert_equal(found: tuple[Tensor, list[Tensor]], wanted: tuple[Tensor, list[Tensor]], tolerance: float) -> None:
    for mine, theirs in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        assert (mine.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


class _Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen += [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


@pytest.mark.parametrize(
    ("chunk", "scale", "softcap", "z_loss", "compiled"),
    [
        (1, 1.0, None, 0.0, False),
        (7, 1 / 24, None, 0.0, False),
        (7, 1.0, 5.0, 1e-2, False),
        (29, 1.0, 5.0, 0.0, False),
        (30, 1 / 24, None, 1e-2, False),
        (1000, 1.0, None, 0.0, False),
        pytest.param(7, 1 / 24, None, 0.0, True, marks=pytest.mark.slow),
        pytest.param(7, 1.0, 5.0, 1e-2, True, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_equal_cross_entropy_with_z_loss_and_softcap(chunk, scale, softcap, z_loss, compiled):
    head, (hidden, labels) = _head(chunk), _inputs()
    head.softcap, head.z_loss = softcap, z_loss
    if compiled:
        head.kernels = type(head.kernels)(*(torch.compile(kernel, fullgraph=True) for kernel in head.kernels))
    found = _run(head, hidden, labels, scale)
    assert (found[0].dtype, found[0].shape) == (torch.float32, ())
    _assert_equal(found, _reference(head, hidden, labels, scale, softcap, z_loss), tolerance=5e-6)


def test_in_float16_a_loss_scale_keeps_gradients_of_a_large_vocabulary_normal_numbers():
    """Each of Llama's 128,256 softmax values is about 8e-6, and float16's smallest normal number is 6.1e-5."""
    vocabulary, scale = 128_256, 2.0**10
    torch.manual_seed(0)
    weight, hidden = torch.randn(vocabulary, _DIM) * 0.1, torch.randn(1, 6, _DIM)
    labels = torch.arange(6)[None]

    def error(with_scale: bool) -> float:
        """The error of the weight's gradient, in vocabulary rows that are not labels."""
        head = Head(torch.nn.Identity(), _DIM, vocabulary)
        head.output.weight.data = weight.half().float()
        head.scale = torch.tensor(scale) if with_scale else None
        (head(hidden.half(), labels) * scale).backward()
        exact = hidden.half().double()[0]
        softmax = (exact @ weight.half().double().T).softmax(-1)
        wanted = (softmax.T @ exact)[6:]
        return ((head.output.weight.grad[6:] / scale - wanted).norm() / wanted.norm()).item()

    assert error(with_scale=True) < 5e-4
    assert error(with_scale=False) > 4 * error(with_scale=True)


@pytest.mark.parametrize("frozen", ["output", "norm"])
def test_a_frozen_part_gets_no_gradient_and_the_others_do(frozen):
    head, (hidden, labels) = _head(7), _inputs()
    wanted = _reference(head, hidden, labels)[1][0]
    getattr(head, frozen).weight.requires_grad_(False)
    _, gradients = _run(head, hidden, labels)
    assert getattr(head, frozen).weight.grad is None
    torch.testing.assert_close(gradients[0].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_exist_one_chunk_at_a_time_forward_and_backward(chunk):
    head, (hidden, labels) = _head(chunk), _inputs()
    with _Shapes() as made:
        head(hidden, labels).backward()
    weight = {(_VOCABULARY, _DIM), (_DIM, _VOCABULARY)}
    wide = [shape for shape in made.seen if _VOCABULARY in shape and shape not in weight]
    assert chunk * _VOCABULARY // 2 < max(math.prod(shape) for shape in wide) <= chunk * _VOCABULARY
    assert max(math.prod(shape) for shape in made.seen) < _TOKENS * _VOCABULARY


@pytest.mark.parametrize("chunk", [7, 30])
def test_a_float32_weight_gets_a_gradient_that_is_not_rounded_to_bfloat16(chunk):
    head, (hidden, labels) = _head(chunk), _inputs()
    half = hidden.detach().bfloat16().requires_grad_()
    head.norm.bfloat16()
    _, (_, gradient, _) = _run(head, half, labels)
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float()) or chunk == _TOKENS  # one chunk's matmul is bfloat16
    _assert_equal((hidden.sum(), [gradient]), (hidden.sum().double(), [_reference(head, hidden, labels)[1][1]]), 0.02)


@pytest.mark.parametrize("chunk", [7, 30])
def test_a_gpu_accumulates_each_matmul_into_the_weights_gradient_once(monkeypatch, chunk):
    """The CPU has no kernel for float32 sums of bfloat16 matmuls. The first matmul must not read the gradient, which is
    uninitialized.
    """

    def mm(left: Tensor, right: Tensor, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        assert out.dtype == (out_dtype or left.dtype)
        return out.copy_(left.float() @ right.float())

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total and total.is_contiguous() and out_dtype == torch.float32
        return total.add_(left.float() @ right.float())

    head, (hidden, labels) = _head(chunk), _inputs()
    head.sizes = Sizes(chunk * _VOCABULARY, None)  # as on CUDA
    head.norm.bfloat16()
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "empty_like", lambda x, **keys: torch.full_like(x, torch.nan, **keys))
    _, (_, gradient, _) = _run(head, hidden.detach().bfloat16().requires_grad_(), labels)
    monkeypatch.undo()
    assert gradient.dtype == torch.float32
    _assert_equal((hidden.sum(), [gradient]), (hidden.sum().double(), [_reference(head, hidden, labels)[1][1]]), 0.02)


@pytest.mark.parametrize("most, size", [(7, 6), (10, 10), (29, 15), (30, 30), (1, 1), (1000, 30)])
def test_chunks_are_equal_where_that_costs_little(most, size):
    assert chunk_of(_TOKENS, _VOCABULARY, Sizes(most * _VOCABULARY, 1)) == size
    assert chunk_of(31, _VOCABULARY, Sizes(7 * _VOCABULARY, 1)) == 7  # a prime number of tokens has no equal chunks


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Label smoothing by its formula, with a tenth of the loss over all tokens."""
    log_probabilities = logits.log_softmax(dim=-1)
    wanted = log_probabilities.gather(1, labels[:, None])[:, 0]
    return -(0.9 * wanted + 0.1 * log_probabilities.mean(dim=-1))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("softcap, z_loss", [(None, 0.0), (5.0, 1e-2)])
def test_another_loss_is_summed_over_labels_and_has_its_own_gradients_in_chunks(compiled, softcap, z_loss):
    (head, plain), (hidden, labels) = (_head(28), _head(28)), _inputs()
    plain.softcap = softcap
    head.softcap, head.z_loss, head.loss = softcap, z_loss, _smoothed
    if compiled:
        head.loss = torch.compile(head.loss)
    expected = _reference(head, hidden, labels, softcap=softcap, z_loss=z_loss, smoothing=0.1)
    _assert_equal(_run(head, hidden, labels), expected, tolerance=5e-6)
    with torch.no_grad():  # validation
        assert torch.equal(head(hidden, labels), plain(hidden, labels))


WRONG_LOSSES = {
    "returns a tensor of shape": lambda logits, labels: F.cross_entropy(logits, labels),
    "hides that from autograd": lambda logits, labels: F.cross_entropy(logits.detach(), labels, reduction="none"),
}


@pytest.mark.parametrize("fault", WRONG_LOSSES)
def test_a_loss_that_is_not_per_token_is_refused(fault):
    head, (hidden, labels) = _head(28), _inputs()
    head.loss = WRONG_LOSSES[fault]
    with pytest.raises(ValueError, match=f"loss .*{fault}|loss {fault}"):
        head(hidden, labels)


def test_the_gradient_of_an_almost_certain_label_keeps_its_precision_in_bfloat16():
    head = Head(RMSNorm(2, _EPS), 2, 2)
    with torch.no_grad():
        head.norm.weight.fill_(1.0)
        head.output.weight.copy_(torch.tensor([[4.0, 0.0], [-4.0, 0.0]]))
    hidden = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16, requires_grad=True)
    head.bfloat16()(hidden, torch.tensor([[0]])).backward()
    # softmax rounds to 1 in bfloat16, and 1 - softmax would be 0; it is 1 / (1 + e^8)
    assert head.output.weight.grad[0, 0].item() == pytest.approx(-1 / (1 + math.exp(8)), rel=0.02)
