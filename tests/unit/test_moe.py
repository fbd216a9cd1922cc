"""An MoE layer on one process: compared with a loop over tokens, in one graph, with its FLOPs counted; what it excludes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from models import grouped, moe
from models.blocks import SwiGLU
from models.grouped import grouped_outer, grouped_product
from models.moe import Experts, MoE, Router
from titanlite.config.schema import Optimizer
from titanlite.optim.build import is_decayed, is_orthogonalized
from titanlite.parallel.mesh import split_dimension
from titanlite.plan.record import Recorder
from titanlite.registry.family import load_family
from titanlite.transforms.parameters import block_linears

DIM, HIDDEN, EXPERTS, TOP_K = 16, 12, 8, 3
ROUTERS = {
    "softmax": {},
    "weights as they are": {"normalised": False},
    "sigmoid": {"score": "sigmoid", "scale": 2.5, "bias": True},
    "groups": {"score": "sigmoid", "groups": 4, "top_groups": 2},
    "groups and bias": {"score": "softmax", "groups": 2, "top_groups": 1, "bias": True},
}


def mixture(shared: bool = False, **router) -> MoE:
    torch.manual_seed(0)
    layer = MoE(Router(DIM, EXPERTS, TOP_K, **router), Experts(EXPERTS, DIM, HIDDEN), SwiGLU(DIM, 20) if shared else None)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.normal_(std=0.5)
    return layer


def chosen_by_hand(router: Router, scores: list[float]) -> list[int]:
    """The experts of one token, by sorting."""
    bias = [0.0] * EXPERTS if router.bias is None else router.bias.tolist()
    biased = [score + more for score, more in zip(scores, bias, strict=True)]
    size = EXPERTS // router.groups
    groups = [sorted(biased[first : first + size])[-2:] for first in range(0, EXPERTS, size)]
    best = sorted(range(router.groups), key=lambda group: -sum(groups[group]))[: router.top_groups]
    return sorted((e for e in range(EXPERTS) if e // size in best), key=lambda e: -biased[e])[: router.top_k]


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """Each token through each of its experts."""
    router, experts, rows = layer.router, layer.experts, []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        scores = logits.softmax(0) if router.score == "softmax" else logits.sigmoid()
        chosen = chosen_by_hand(router, scores.tolist())
        weights = scores[chosen] / (scores[chosen].sum() if router.normalised else 1) * router.scale
        gated = [F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token) for e in chosen]
        rows.append(sum(weight * (experts.w2[e] @ hidden) for e, weight, hidden in zip(chosen, weights, gated, strict=True)))
    result = torch.stack(rows).view_as(x)
    return result if layer.shared is None else result + layer.shared(x)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_mixture_and_its_gradients_are_those_of_a_loop_over_tokens(router, shared):
    layer, x = mixture(shared, **ROUTERS[router]), torch.randn(2, 9, DIM, requires_grad=True)
    gradients, inputs = torch.randn(2, 9, DIM), [x, *layer.parameters()]
    found, expected = layer(x), one_by_one(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(result, inputs, gradients) for result in (found, expected))
    for gradient, by_hand in zip(ours, theirs, strict=True):
        assert (gradient - by_hand).norm() < 1e-5 * by_hand.norm()


@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "PyTorch's kernel"])
def test_a_grouped_matmul_multiplies_each_group_of_rows_by_its_matrix(monkeypatch, kernel):
    """PyTorch's kernel computes the same on a CPU, in a loop; a GPU may leave results without rows unwritten."""
    monkeypatch.setattr(grouped, "_has_kernel", lambda *_: kernel)
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10, 10, 12], dtype=torch.int32)
    rows, gradients = torch.randn(12, 8).bfloat16().requires_grad_(), torch.randn(12, 16).bfloat16()
    weights = torch.randn(5, 16, 8).bfloat16().requires_grad_()
    result = grouped_product(rows, weights, ends, True, None)
    result.backward(gradients)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        mine = slice(first, last)
        torch.testing.assert_close(result[mine], rows[mine] @ weights[expert].T)
        torch.testing.assert_close(rows.grad[mine], gradients[mine] @ weights[expert])
        torch.testing.assert_close(weights.grad[expert], gradients[mine].T @ rows[mine])
        first = last
    torch.testing.assert_close(grouped_product(gradients, weights, ends, False, None), rows.grad)


@pytest.mark.parametrize("ends", [(0, 0, 0), (0, 3, 3), (5, 5, 5)])
def test_matrices_of_experts_without_rows_have_gradients_of_zero_if_the_kernel_does_not_write_them(monkeypatch, ends):
    """An expert-parallel rank has one more row than it received, which belongs to no expert: (0, 0, 0) is a chunk without
    rows.
    """
    real = F.grouped_mm

    def as_on_blackwell(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
        result = real(left, right, offs=offs)
        if right.ndim == 2:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        else:
            result[int(offs[-1]) :] = torch.nan
        return result

    monkeypatch.setattr(grouped, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", as_on_blackwell)
    rows, weights = torch.randn(max(ends) + 1, 8).bfloat16(), torch.randn(3, 16, 8).bfloat16().requires_grad_()
    rows[-1] = torch.nan
    biases = torch.zeros(3, 16).bfloat16().requires_grad_()
    grouped_product(rows, weights, torch.tensor(ends, dtype=torch.int32), True, biases)[:-1].sum().backward()
    for number, (first, last) in enumerate(itertools.pairwise((0, *ends))):
        torch.testing.assert_close(weights.grad[number], rows[first:last].sum(0).expand(16, 8), rtol=0.02, atol=0.02)
        assert (biases.grad[number] == last - first).all()


def test_without_rows_gradients_are_zero_and_the_kernel_is_not_called():
    rows, weights = torch.randn(0, 8, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    biases = torch.randn(3, 16, requires_grad=True)
    result = grouped_product(rows, weights, torch.zeros(3, dtype=torch.int32), True, biases)
    result.sum().backward()
    assert result.shape == (0, 16) and rows.grad.shape == (0, 8)
    assert not weights.grad.any() and not biases.grad.any()
    with FakeTensorMode():
        matrices = torch.empty(3, 16, 8, dtype=torch.bfloat16, device="cuda")
        taken = [grouped._has_kernel(matrices.new_empty(count, 8), matrices) for count in (0, 1)]
    assert taken == [False, hasattr(F, "grouped_mm")]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("by_onednn", [False, True])
def test_large_matmuls_equal_float64(monkeypatch, by_onednn, transposed):
    monkeypatch.setattr(grouped, "_BY_ONEDNN", by_onednn)
    torch.manual_seed(0)
    sizes = [300, 0, 212]  # more rows than fit at a time, and none
    ends = torch.tensor(sizes).cumsum(0).int()
    rows, weights = torch.randn(512, 96), torch.randn(3, *((160, 96) if transposed else (96, 160)))
    assert sizes[2] * weights[0].numel() >= grouped._LARGE and sizes[0] > grouped._AT_A_TIME
    matrices = (weights.transpose(1, 2) if transposed else weights).double()
    parts = rows.double().split(sizes)
    expected = torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
    found = grouped_product(rows, weights, ends, transposed, None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.std()))
    gradients = [part.T @ left for part, left in zip(found.double().split(sizes), parts, strict=True)]
    expected = torch.stack(gradients)
    atol = 1e-5 * float(expected.std())
    torch.testing.assert_close(grouped_outer(found, rows, ends).double(), expected, rtol=0, atol=atol)
    assert not grouped_outer(found, rows, ends)[1].any()


def test_onednn_is_for_processors_whose_vendor_is_amd(tmp_path):
    for vendor, is_amd in (("AuthenticAMD", True), ("GenuineIntel", False)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" + "flags\t\t: avx2\n" * 1000)
        assert grouped._is_amd(tmp_path / "cpuinfo") == is_amd
    assert not grouped._is_amd(tmp_path / "absent")  # not Linux


def test_the_operations_pass_pytorchs_opcheck():
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    rows, weights = torch.randn(10, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    torch.library.opcheck(grouped_product, (rows, weights, ends, True, torch.randn(3, 6, requires_grad=True)))
    torch.library.opcheck(grouped_product, (torch.randn(10, 6), weights, ends, False, None))
    torch.library.opcheck(grouped_outer, (torch.randn(10, 6), torch.randn(10, 4), ends))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"n_experts": 4, "top_k": 5}, "top_k = 5: must be between 1 and n_experts = 4"),
        ({"n_experts": 8, "top_k": 2, "groups": 3}, "groups = 3: must divide n_experts = 8"),
        ({"n_experts": 8, "top_k": 2, "groups": 4, "top_groups": 5}, "at least top_groups = 5"),
        ({"n_experts": 8, "top_k": 5, "groups": 4, "top_groups": 2}, "2 of them must hold top_k = 5"),
        ({"n_experts": 8, "top_k": 1, "groups": 8, "top_groups": 2}, "each at least 2"),
    ],
)
def test_an_invalid_top_k_or_group_setting_is_refused(values, word):
    with pytest.raises(ValueError, match=word):
        moe.check_choice(**values)


# ----------------------------------------------------------------------------------------------- with the rest of titanlite


def test_muon_takes_stacks_of_experts_without_biases_and_float8_converts_no_part_of_an_moe_layer():
    model = load_family("tests.tiny_gpt_oss", "plain").on_meta()
    muon = {name for name, p in model.named_parameters() if is_orthogonalized(name, p, Optimizer(name="Muon"))}
    assert "layers.0.attention.wq.weight" in muon
    assert {name.rpartition(".")[2] for name in muon if "experts" in name} == {"w1", "w2", "w3"}
    convolution = torch.empty(8, 1, 4, device="meta")
    assert not is_orthogonalized("layers.0.attention.conv.weight", convolution, Optimizer(name="Muon")), (
        "a convolution's is no stack of matrices"
    )
    assert not any("ffn" in name for name in block_linears(model))
    decayed = {name.rpartition(".")[2] for name, p in model.named_parameters() if is_decayed(name, p, Optimizer())}
    assert decayed & {"w1", "w2", "w3", "w1_bias", "w2_bias", "w3_bias"} == {"w1", "w2", "w3"}, "stacked biases are none"


def test_fsdp_shards_within_experts_only_if_it_divides_their_rows_but_not_their_number():
    assert split_dimension((8, 96, 64), 8) == split_dimension((8, 96, 64), 2) == 0
    assert split_dimension((8, 96, 64), 16) == split_dimension((3, 96, 64), 2) == 1
    assert split_dimension((8, 90, 64), 16) == split_dimension((512, 64), 3) == split_dimension((8, 96, 64), 1) == 0


def test_flops_are_counted_by_pytorch_and_by_predictions():
    layer, x = mixture(), torch.randn(2, 9, DIM, requires_grad=True)
    forward = 2 * 18 * DIM * (EXPERTS + 3 * TOP_K * HIDDEN)
    with FlopCounterMode(display=False) as counter, Recorder({}) as recorder:
        layer(x).sum().backward()
    assert counter.get_total_flops() == recorder.work().flops == 3 * forward
    assert layer.active_parameters() == forward / 2 / 18


def test_a_bfloat16_router_has_the_logits_and_gradients_of_float32(monkeypatch):
    """The CUDA path, except for the one kernel that a CPU lacks: products of bfloat16 numbers are exact in float32 too."""
    calls = []
    monkeypatch.setattr(moe, "_wide_mm", lambda left, right: calls.append(left.dtype) or left.float() @ right.float())
    torch.manual_seed(0)
    x, weight = torch.randn(512, 256).bfloat16(), (torch.randn(64, 256) / 16).bfloat16()
    gradients, found, exact = torch.randn(512, 64), [], []
    for results, function in ((found, moe._WideLinear.apply), (exact, lambda x, weight: F.linear(x.float(), weight.float()))):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        logits = function(*leaves)
        results += [logits.detach(), *torch.autograd.grad(logits, leaves, gradients)]
    assert calls == [torch.bfloat16] * 3, "one matmul forward and two backward, none of them of float32 numbers"
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(found[0], exact[0], rtol=1e-6, atol=1e-5)
    for mine, float32 in zip(found[1:], exact[1:], strict=True):
        # gradients end in bfloat16: all but those near the middle of two of its numbers are equal bit for bit; with
        # the gradient of the logits in plain bfloat16, 42% are not
        assert (mine == float32).float().mean() > 0.99


def test_a_router_on_a_cpu_and_one_in_float32_multiply_in_float32(monkeypatch):
    monkeypatch.setattr(moe, "_wide_mm", lambda left, right: pytest.fail("a CPU has no such kernel"))
    x, weight, bias = torch.randn(7, 16).bfloat16(), torch.randn(8, 16).bfloat16(), torch.randn(8).bfloat16()
    assert torch.equal(moe._wide_linear(x, weight, bias), F.linear(x.float(), weight.float(), bias.float()))
    assert torch.equal(moe._wide_linear(x.float(), weight.float(), None), F.linear(x.float(), weight.float()))
