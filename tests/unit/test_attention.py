"""Attention kernels: the chosen one runs, all compute the same, and what one cannot do is refused."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from models import attention as their
from models.attention import FLEX_FLASH, TILES, AttentionCore, SeqInfo, attend, block_mask, dense_mask
from tests.distributed import scenarios
from tests.flash import fault_of_flash
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.loop.loss import summed_loss
from titanlite.registry.family import family_of
from titanlite.transforms import attention_kernels as attention
from titanlite.transforms.activation_checkpoint import checkpoint_blocks, checkpoint_operations
from titanlite.transforms.attention_kernels import KERNELS, attention_sentence, choose_attention
from titanlite.transforms.attention_kernels import faults as attention_faults

CPU = torch.device("cpu")
ON_CPU = [name for name, kernel in KERNELS.items() if "cpu" in kernel.devices]
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
LENGTHS = torch.tensor([[5, 11, 16], [1, 30, 1]])


def config_of(
    name: str = "auto", model: str = "tests.tiny", flavor: str = "plain", sections: Any = None, **training: Any
) -> Config:
    keys = {"model": {"name": model, "attention": name}, "training": training, **(sections or {})}
    return scenarios.config_of({}, flavor, **keys)


def model_of(config: Config) -> nn.Module:
    family = family_of(config.model)
    torch.manual_seed(0)
    model = family.module.Model(family.config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    choose_attention(model, config, CPU)
    return model


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[operation._overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def step(config: Config, masked: bool, prepare: Any = None) -> tuple[dict[str, Tensor], Counter[str]]:
    """Loss and gradients of one batch, and the operations that ran."""
    model = model_of(config)
    if prepare:
        prepare(model)
    documents = torch.stack([torch.repeat_interleave(row) for row in LENGTHS]).int() if masked else None
    tokens = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(1))
    with Operations() as operations:
        loss = summed_loss(model, Batch(tokens, None, documents))
        loss.backward()
    found = {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}
    return found, operations.seen


def differ(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())


def by_operation(model: nn.Module) -> None:
    checkpoint_operations(model, ())


def whole_blocks(model: nn.Module) -> None:
    checkpoint_blocks(model, every=1)


# ------------------------------------------------------------------------------------------------------ what is computed


# tiles take no masks
CELLS = [("auto", None, True), ("flash", by_operation, True), ("flash", whole_blocks, True), ("math", whole_blocks, True)]
CELLS += [("auto", whole_blocks, False), ("flash", by_operation, False), ("math", None, False)]
CELLS += [("tiles", None, False), ("tiles", by_operation, False), ("tiles", whole_blocks, False)]


@pytest.mark.parametrize(("name", "prepare", "masked"), CELLS)
def test_every_cpu_kernel_computes_the_same_and_is_the_one_that_runs(name, prepare, masked):
    found, operations = step(config_of(name), masked, prepare)
    assert differ(found, step(config_of("math"), masked)[0]) < 1e-5
    layers = 2
    by_flash = name in ("auto", "flash")
    flashes = 0 if not by_flash else layers * (2 if prepare is whole_blocks else 1)  # kept by operation, not recomputed
    assert operations[FLASH] == flashes
    assert operations[f"{FLASH}_backward"] == (layers if by_flash else 0)
    assert (operations["_safe_softmax"] + operations["_softmax"] > 0) == (not by_flash)


def test_heads_are_repeated_for_a_kernel_without_grouped_queries(monkeypatch):
    """The efficient kernel exists only on CUDA; its inputs must equal grouped queries, keys and values."""
    q, k, v = torch.randn(2, 8, 32, 8), torch.randn(2, 2, 32, 8), torch.randn(2, 2, 32, 8)
    mask = dense_mask(torch.stack([torch.repeat_interleave(row) for row in LENGTHS]))
    expected = attend(q, k, v, mask, None, None, SDPBackend.MATH)
    given, real = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Tensor, **keys: Any) -> Tensor:
        given.append((args[1].shape[1], keys["enable_gqa"]))
        return real(*args, **keys)

    monkeypatch.setattr(their, "sdpa_kernel", lambda _: sdpa_kernel(SDPBackend.MATH))
    monkeypatch.setattr(their.F, "scaled_dot_product_attention", watched)
    assert torch.equal(attend(q, k, v, mask, None, None, SDPBackend.EFFICIENT_ATTENTION), expected)
    assert given == [(8, False)]


@pytest.mark.parametrize("queries", [1, 5])
def test_with_a_dense_mask_a_gpu_folds_the_queries_of_a_group_into_rows_of_one_head(queries):
    """So its fused kernel for masks, which does not support groups, gets keys and values unchanged."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads, length in ((8, queries), (2, 32), (2, 32)))
    positions = torch.tensor([3, 20])[:, None] + torch.arange(queries)  # two prompts of different lengths in one cache
    mask = (torch.arange(32) <= positions[..., None])[:, None]
    expected = attend(q, k, v, mask, 0.3, None, SDPBackend.MATH)
    torch.testing.assert_close(their._attend_by_groups(q, k, v, mask, 0.3), expected, rtol=1e-12, atol=1e-12)


def test_a_forced_kernel_uses_the_dense_form_of_flex_attentions_mask():
    window = 7
    documents = torch.stack([torch.repeat_interleave(row) for row in LENGTHS])
    q, k, v = (torch.randn(2, 4, 32, 8) for _ in range(3))
    assert torch.equal(their._dense(block_mask(documents, window)), dense_mask(documents, window))
    dense = attend(q, k, v, dense_mask(documents, window), None, None, SDPBackend.MATH)
    assert torch.equal(attend(q, k, v, block_mask(documents, window), None, None, SDPBackend.MATH), dense)


# ------------------------------------------------------------------------------------------------------------- the choice


def fake_gpu(monkeypatch: pytest.MonkeyPatch, major: int, able: set[str]) -> None:
    """A GPU of this compute capability whose checks say that these kernels can run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Thinking Machine")
    monkeypatch.setattr(attention, "_able", lambda name, *_, **__: name in able)


@pytest.mark.parametrize(
    ("major", "able", "chosen"),
    [
        (9, {"cudnn", "flash", "efficient", "math"}, "cudnn"),
        (9, {"flash", "efficient", "math"}, "flash"),
        (8, {"cudnn", "flash", "efficient", "math"}, "flash"),
        (8, {"efficient", "math"}, "efficient"),
    ],
)
def test_a_gpu_gets_the_first_kernel_in_order_that_can_run(monkeypatch, major, able, chosen):
    fake_gpu(monkeypatch, major, able)
    model, config = model_of(config_of()), config_of()
    choose_attention(model, config, torch.device("cuda"))
    assert all(layer.attention.backends == (KERNELS[chosen].backend, None) for layer in model.layers.values())
    assert attention_sentence(model, config).startswith(f"{chosen}, and FlexAttention")


COMPILED = {"compile": {"enable": True}}
OVER_RANKS = {
    method: COMPILED | {"parallelism": {"context_parallel_degree": 2, "context_parallel_method": method}}
    for method in ("ulysses", "gather")
}


def with_flash4(monkeypatch: pytest.MonkeyPatch, attend: Any, version: str, before_2_13: bool) -> None:
    """A Hopper GPU on which FlashAttention 4 is installed, and computes what `attend` says; tensors are on the CPU."""
    fake_gpu(monkeypatch, 9, {"cudnn"})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    installed = attention._version_of
    monkeypatch.setattr(attention, "_version_of", lambda name: version or installed(f"not-{name}"))
    monkeypatch.setattr(attention.torch_private, "BEFORE_2_13", before_2_13)
    monkeypatch.setattr(attention, "attend", attend)
    attention._flash4_fault.cache_clear()


def kernel_for_masks(config: Config) -> tuple[Any, str]:
    """The kernel for masks in a model's modules, and its line in the start's table."""
    model = model_of(config_of())
    choose_attention(model, config, torch.device("cuda"))
    (kernel,) = {layer.attention.backends[1] for layer in model.layers.values()}
    return kernel, attention_sentence(model, config)


def right(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, backend: Any, **_: Any) -> Tensor:
    return attend(q, k, v, mask, None, None, SDPBackend.MATH)


def doubled_gradients(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, backend: Any, **_: Any) -> Tensor:
    doubled = 2 * v - v.detach()  # the same value
    return right(q, k, doubled if backend == FLEX_FLASH else v, mask=mask, backend=backend)


def no_numbers(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, backend: Any, **_: Any) -> Tensor:
    return right(q, k, v, mask=mask, backend=backend) * (float("nan") if backend == FLEX_FLASH else 1)


def cannot(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, backend: Any, **_: Any) -> Tensor:
    raise RuntimeError("no kernel for SM 70\nand more lines")


# what FlashAttention 4 computes, the reason for the kernel, and what is special about the run
FLASH4: list[tuple[Any, str, dict[str, Any]]] = [
    (right, "4.0, which was tried", {}),
    (doubled_gradients, "4.0 differs from it by 100.0%", {}),
    (no_numbers, "4.0 differs from it by nan%", {}),
    (cannot, "4.0 failed: RuntimeError: no kernel for SM 70", {}),
    (right, "flash-attn-4 is not installed", {"version": ""}),
    (right, "needs PyTorch 2.13", {"before_2_13": True}),
    (right, "queries are a part of a sequence", {"sections": OVER_RANKS["gather"]}),
    (right, "", {"document_mask": False}),
]


@pytest.mark.parametrize(("does", "reason", "special"), FLASH4)
def test_masks_are_for_flash_attention_4_where_it_computes_what_triton_does(monkeypatch, does, reason, special):
    run = {"mixed_precision_param": "bfloat16", "document_mask": True, **special}
    with_flash4(monkeypatch, does, run.pop("version", "4.0"), run.pop("before_2_13", False))
    kernel, says = kernel_for_masks(config_of(**run))
    assert kernel == (FLEX_FLASH if "was tried" in reason else None) and reason in says
    assert attention._flash4_fault.cache_info().misses == ("4.0" in reason), "it is tried where nothing else decides"


def test_flex_attention_gets_the_chosen_kernel(monkeypatch):
    asked = []

    def flex(*tensors: Tensor, kernel_options: Any = None, **_: Any) -> Tensor:
        asked.append(kernel_options)
        return tensors[0]

    monkeypatch.setattr(their, "_compiled_flex_attention", lambda: flex)
    q, mask = torch.randn(2, 4, 32, 8), block_mask(torch.zeros(2, 32))
    for backend in (FLEX_FLASH, None):
        attend(q, q, q, mask, None, None, backend)
    assert asked == [{"BACKEND": "FLASH"}, None]


@pytest.mark.parametrize(("length", "scale"), [(1, None), (127, 0.3), (128, None), (300, 0.3)])
def test_tiles_equal_the_formula_at_every_length(length, scale):
    parts, results = [torch.randn(2, heads, length, 16, dtype=torch.float64) for heads in (6, 2, 2)], []
    for backend in (TILES, SDPBackend.MATH):
        q, k, v = (part.clone().requires_grad_() for part in parts)
        result = attend(q, k, v, None, scale, None, backend)
        (result * torch.linspace(-1, 1, length)[:, None]).sum().backward()
        results.append([result.detach(), q.grad, k.grad, v.grad])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)  # scores are float32


@pytest.mark.skipif(bool(fault_of_flash()), reason=fault_of_flash())
def test_tiles_keep_16_bits_and_are_as_exact_as_flash():
    shapes = [(2, heads, 200, 32) for heads in (8, 4, 4, 8)]
    *parts, gradient = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    parts[0] *= 4  # scores with a standard deviation of 4, which 16 bits would round by a hundredth
    kept: list[torch.dtype] = []

    def results(backend: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v = (part.bfloat16().to(dtype).requires_grad_() for part in parts)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
            result = attend(q, k, v, None, None, None, backend)
        gradients = torch.autograd.grad(result, (q, k, v), gradient.bfloat16().to(dtype))
        return dict(zip(["result", "q", "k", "v"], [result.detach(), *gradients], strict=True))

    tiles = results(TILES, torch.bfloat16)
    assert set(kept) == {torch.bfloat16}
    exact, flash = results(SDPBackend.MATH, torch.float64), results(SDPBackend.FLASH_ATTENTION, torch.bfloat16)
    for name, value in exact.items():
        assert differ({name: tiles[name]}, {name: value}) < 2 * differ({name: flash[name]}, {name: value}), name


@pytest.mark.parametrize(
    ("seq_len", "precision", "sections", "backend"),
    [
        (512, "bfloat16", COMPILED, TILES),
        (512, "bfloat16", OVER_RANKS["ulysses"], TILES),
        (512, "bfloat16", OVER_RANKS["gather"], None),  # tiles take no mask
        (513, "bfloat16", COMPILED, None),
        (512, "float32", COMPILED, None),
        (512, "bfloat16", {"compile": {"enable": True, "backend": "eager"}}, None),
    ],
)
def test_a_cpu_uses_tiles_where_they_are_faster(seq_len, precision, sections, backend):
    config = config_of(sections=sections, seq_len=seq_len, mixed_precision_param=precision)
    model = model_of(config)
    assert all(layer.attention.backends == (backend, None) for layer in model.layers.values())
    assert attention_sentence(model, config) == (backend or "flash")


def wide_core(value_dim: int = 6, **options: Any) -> tuple[AttentionCore, list[Tensor]]:
    """A core of 4 heads of 8, 2 for keys and values, with values of another width, and its inputs."""
    torch.manual_seed(0)
    core = AttentionCore(4, 2, 8, value_dim, **options)
    return core, [torch.randn(3, 16, heads, width) for heads, width in ((4, 8), (2, 8), (2, value_dim))]


def test_the_kernel_of_a_core_is_chosen():
    core, _ = wide_core()
    choose_attention(core, config_of("math"), CPU)
    assert core.backends == (SDPBackend.MATH, SDPBackend.MATH)


def refused(config: Config) -> list[str]:
    family = family_of(config.model)
    return list(attention_faults(config, family, family.on_meta()))


def test_a_kernel_that_a_models_attention_does_not_take_is_refused_before_the_start(monkeypatch):
    """Both were refused by each rank, after `titanlite check` had passed them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(config_of("math", "tests.tiny_deepseek_v3")) == []
    (fault,) = refused(config_of("flash", "tests.tiny_deepseek_v3"))
    assert 'model.attention = "flash"' in fault and "has 12 and 20" in fault
    config = config_of("math")
    family = family_of(config.model)
    model = family.on_meta()
    for layer in model.layers.values():
        layer.attention = nn.Identity()
    (fault,) = attention_faults(config, family, model)
    assert 'model.attention = "math"' in fault and "AttentionCore" in fault


def test_tiles_take_no_masks_and_run_only_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(config_of("tiles")) == []
    (fault,) = refused(config_of("tiles", document_mask=True))
    assert "training.document_mask = true" in fault and 'use "flash", "math" or "auto"' in fault
    (fault,) = refused(config_of("tiles", "tests.tiny_gemma3"))
    assert "the window of tests.tiny_gemma3 plain" in fault
    fake_gpu(monkeypatch, 9, set())
    (fault,) = refused(config_of("tiles"))
    assert 'model.attention = "tiles": is not for GPUs; there are "cudnn"' in fault


HALF = {"mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if "cuda" in kernel.devices])
def test_on_a_gpu_a_forced_kernel_is_refused_where_it_cannot_run(monkeypatch, name):
    fake_gpu(monkeypatch, 9, set())
    masks, halves = name in ("efficient", "math"), name in ("cudnn", "flash")
    assert refused(config_of(name, **HALF)) == []
    for config, expected, fine in (
        (config_of(name), 'training.mixed_precision_param = "float32"', not halves),
        (config_of(name, document_mask=True, **HALF), "training.document_mask = true", masks),
    ):
        found = refused(config)
        assert len(found) == (not fine), found
        assert all(expected in fault and f'model.attention = "{name}"' in fault for fault in found)
    capped = refused(config_of(name, "tests.tiny_gemma3", "two", **HALF))
    assert any("the capped scores" in fault for fault in capped) == (name != "math")


def test_capped_scores_are_known_by_the_attention_of_a_fork():
    """They were known by `attention_softcap` in Config; under another name, a forced kernel was ignored."""
    config = config_of("flash", **HALF)
    family = family_of(config.model)
    model = family.on_meta()
    model.layers["0"].attention.softcap = 30.0
    assert ["the capped scores" in fault for fault in attention_faults(config, family, model)] == [True]


def expected_of(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, written out."""
    k, v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (core.scale or 8**-0.5)
    if core.softcap is not None:
        scores = core.softcap * torch.tanh(scores / core.softcap)
    scores = scores.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("backend", [None, TILES, SDPBackend.MATH])
def test_a_core_has_no_projections_and_takes_values_of_another_width(options, backend):
    core, inputs = wide_core(**options)
    assert list(core.parameters()) == [] and not hasattr(core, "wq")
    if backend is not None and "softcap" not in options:
        core.backends = (backend, None)
    torch.testing.assert_close(core.core(*inputs, SeqInfo(torch.arange(16).expand(3, 16))), expected_of(core, *inputs))
