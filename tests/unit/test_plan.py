"""Predicted traffic, FLOPs and memory of steps on simulated ranks, and their extrapolation over layers and microbatches."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from models import attention
from models.decoder import Decoder
from tests import tiny, tiny_hybrid
from tests.distributed.scenarios import MODES
from tests.repetitions import campaign_but
from tests.traffic_cases import ADAPTERS, BOTH, CASES, EXPECTED, FLOAT8_GATHERS, HALF, LATE, SHARD, TP, Case
from titanlite.config.schema import Config
from titanlite.ground.torch_private import FakeTensorMode
from titanlite.plan.layers import Layers
from titanlite.plan.moments import PHASES
from titanlite.plan.predict import Prediction, predict
from titanlite.plan.record import Allocations, ring_bytes
from titanlite.plan.report import limits
from titanlite.plan.shape import ExpertShape, Layer, Matrix, Shape
from titanlite.plan.step import Setup, Update, _kernels_of, measure_update, simulated_ranks
from titanlite.plan.time import Choice, Job, device_named, step
from titanlite.registry.family import Family, family_names, family_of, load_family


def predicted(case: Case) -> Prediction:
    return predict(case.config(), case.ranks, "cpu")


@pytest.mark.parametrize("name", campaign_but(["shard 2, accumulation, reduced once"], EXPECTED, EXPECTED))
def test_a_step_sends_what_its_shapes_require(name):
    """EXPECTED was computed from shapes and degrees, by formulas that agreed with what gloo ranks sent."""
    calls, sizes = Counter(), Counter()
    for channel, traffic in predicted(CASES[name]).work.traffic.items():
        key = f"{channel.kind} {' x '.join(channel.over)} {channel.ranks}"
        calls[key] += traffic.calls
        sizes[key] += traffic.size
    assert {key: (calls[key], sizes[key]) for key in calls} == EXPECTED[name]


SPECTRAL = {"optimizer": {"name": "tests.own.parts:SpectralDescent", "weight_decay": 0.0}}  # sends matrices in buckets
SEVEN = {
    "shard 2, two microbatches, reduced once": Case(SHARD, "seven", accumulation=2, parallelism=LATE),
    "tp 2, adapters, every second layer": Case(TP, "seven", reduced="every second layer", others=ADAPTERS),
    "2 x 2, own optimizer of whole matrices": Case(BOTH, "seven", others=SPECTRAL),
    "2 x 2, two MTP modules": Case(BOTH, "seven", accumulation=2, training={"predict_further": 2}),
    "shard 2, gathers in float8": Case(SHARD, "seven", others=FLOAT8_GATHERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVEN)
def test_a_few_layers_give_what_all_layers_give(name, monkeypatch):
    if "float8" in name:
        pytest.importorskip("torchao", reason="needs torchao")
    monkeypatch.setitem(tiny.FLAVORS, "seven", dataclasses.replace(tiny.FLAVORS["plain"], n_layers=7))
    extrapolated = predicted(SEVEN[name])
    monkeypatch.setattr(Layers, "of", every_layer_of)
    whole = predicted(SEVEN[name])
    assert extrapolated.work == whole.work
    assert extrapolated.during("update")[:3] == whole.during("update")[:3]
    for phase in PHASES:
        assert extrapolated.during(phase).total == pytest.approx(whole.during(phase).total, rel=0.01), phase
    assert extrapolated.memory.total == pytest.approx(whole.memory.total, rel=0.01)


def test_one_process_keeps_the_activations_that_a_rank_of_a_mesh_keeps():
    """One process casts parameters itself, and keeps masters instead of their casts; it once mistook activations for casts."""
    alone, sharded = (predicted(Case(mesh, "deep", training=HALF)).during("loss").activations for mesh in ({}, SHARD))
    assert alone == pytest.approx(2 * sharded, rel=0.01)  # each of two ranks has half of the batch


def every_layer_of(model: Decoder, family: Family, config: Config) -> Layers:
    """Layers that all are run."""
    names = tuple(model.layers)
    return Layers(names, {name: name for name in names}, [[name] for name in names])


def hybrid(pattern: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    monkeypatch.setitem(tiny_hybrid.FLAVORS, "mixed", tiny_hybrid.Config(pattern))
    return predicted(case._replace(name="tests.tiny_hybrid", flavor="mixed"))


HYBRIDS = {
    "aaaalllllmmmm": Case({}),
    "mlamlamlamlal": Case(SHARD, accumulation=2),
    "llllammmmaaal": Case(BOTH, parallelism={"fsdp_prefetch": 2}),
    "wwawwawwawwawwa": Case(SHARD, reduced="every second layer"),
}


@pytest.mark.parametrize("pattern", campaign_but((), ["mlamlamlamlal"], HYBRIDS))
def test_a_hybrid_with_any_order_of_layers_equals_all_its_layers(pattern, monkeypatch):
    few = hybrid(pattern, HYBRIDS[pattern], monkeypatch)
    monkeypatch.setattr(Layers, "of", every_layer_of)
    whole = hybrid(pattern, HYBRIDS[pattern], monkeypatch)
    assert few.work == whole.work
    assert few.during("update")[:3] == whole.during("update")[:3]
    assert [each.name for each in few.moments] == [each.name for each in whole.moments]
    for some, every in zip(few.moments, whole.moments, strict=True):
        assert some.memory.activations == every.memory.activations
        assert some.memory.total == pytest.approx(every.memory.total, rel=0.01)
        assert min(some.memory) >= 0


@pytest.mark.parametrize(
    ("pattern", "ahead", "few"),
    [("a", 1, "a"), ("aaaaaaa", 2, "aaaaa"), ("mlamlamla", 1, "mlamla"), ("wwwawwwa", 1, "wwawwwa")],
)
def test_layers_that_differ_or_have_other_neighbors_are_run(pattern, ahead, few, monkeypatch):
    monkeypatch.setitem(tiny_hybrid.FLAVORS, "mixed", tiny_hybrid.Config(pattern))
    config = Case({}, "mixed", name="tests.tiny_hybrid", parallelism={"fsdp_prefetch": ahead}).config()
    family = family_of(config.model)
    layers = Layers.of(family.on_meta(), family, config)
    assert "".join(pattern[int(name)] for name in layers.few) == few
    assert sum(layers.times(name) for name in layers.few) == len(pattern)


def test_flops_are_those_of_the_family_and_recomputation_adds_a_forward_pass():
    config = Case({}).config()
    shape, tokens = tiny.FLAVORS["plain"], config.training.global_batch_size * config.training.seq_len
    flops = family_of(config.model).module.flops(shape, config.training.seq_len).palm * tokens
    # the attention kernel recomputes its scores in the backward pass
    scores = 2 * tokens * config.training.seq_len * shape.n_heads * shape.head_dim * shape.n_layers
    assert predicted(Case({})).work.flops == flops + scores
    layers = flops / 3 - 2 * tokens * shape.dim * shape.vocab_size  # one forward pass, without the head
    again = config.model_copy(update={"activation_checkpoint": type(config.activation_checkpoint)(**MODES["full"])})
    # recomputation stops when it has everything needed, which excludes the last matmul of a layer
    last = 2 * tokens * shape.ffn_dim * shape.dim * shape.n_layers
    assert predict(again, 1).work.flops == flops + scores + layers - last


def test_the_model_of_time_recomputes_the_matmuls_that_are_recomputed():
    """By the FLOPs of a step's operations."""
    case = Case({}, "deep")
    config = case.config()
    family = family_of(config.model)
    ((layer, depth),) = Shape.of(family, family.on_meta(), config.training.seq_len).layers
    tokens = config.training.global_batch_size * config.training.seq_len
    without, again = (predicted(case._replace(reduced=reduced)).work.flops for reduced in ("none", "per operation"))
    repeated = layer.recomputed(tiny.FLAVORS["deep"].dim, "selective")
    assert again - without == pytest.approx(2 * tokens * depth * layer.dense_parameters * repeated)


FORKS = [f"tests.forks.right.{path.stem}" for path in sorted(Path("tests/forks/right").glob("[!_]*.py"))]


def shape_of(name: str) -> Shape:
    family = load_family(name, "plain" if "." in name else "debug")
    return Shape.of(family, family.on_meta(), 512)


@pytest.mark.parametrize("name", [*family_names(), *FORKS])
def test_the_model_of_time_sees_every_large_matmul_of_a_family_or_fork(name):
    """Of a token's FLOPs less than 1%, such as those of a small router, is of no linear layer, experts or attention."""
    family, shape = load_family(name, "plain" if "." in name else "debug"), shape_of(name)
    assert shape.others < 0.01 * family.module.flops(family.config, 1).causal


def test_the_model_of_time_takes_a_fork_as_it_runs():
    """Blocks that run twice, a router of a class that no family has, and latent attention, whose keys each head has."""
    ((once, _),), ((twice, _),) = shape_of(tiny.__name__).layers, shape_of("tests.forks.right.looped").layers
    assert twice.multiplied(64) == 2 * once.multiplied(64) and twice.dense_parameters == once.dense_parameters
    assert shape_of("tests.forks.right.own_router").layers[0][0].experts == ExpertShape(8, 1, 96)
    assert (once.keys, twice.keys, shape_of("tests.forks.right.latent_attention").layers[0][0].keys) == (64, 128, 8 * (20 + 12))
    of = Job(shape_of(tiny.__name__)._replace(others=0.0), device_named("h100"), 8, 512, 64)
    more = of._replace(shape=of.shape._replace(others=1e9))
    added = step(more, Choice()).matmuls - step(of, Choice()).matmuls
    assert added == pytest.approx(64 * 512 * 1e9 / (of.peak * of.device.matmul))


LAYER = Layer(
    (Matrix(6144, 4096, "column"), Matrix(4096, 4096, "row"), Matrix(28672, 4096, "column"), Matrix(4096, 14336, "row")),
    None,
    2048,
)


def test_the_model_of_time_repeats_the_collectives_of_tensor_parallelism_that_are_repeated():
    """By the calls of a step. In a pass of a layer, tensor parallelism has four collectives."""
    of = Job(Shape(((LAYER, 4),), 4096, 128_256, 2 * 4096 * 128_256, 1e9), device_named("h100"), 8, 8192, 64)
    of_a_pass = tiny.FLAVORS["plain"].n_layers * 4
    calls, seconds = {}, {}
    for mode, reduced in (("none", "none"), ("selective", "per operation"), ("full", "full")):
        traffic = predicted(Case(TP, reduced=reduced)).work.traffic
        calls[mode] = sum(each.calls for key, each in traffic.items() if key.over == ("tp",) and key.kind != "all-reduce")
        seconds[mode] = step(of, Choice(dp_shard=4, tp=2, recompute=mode)).tp
    for mode in ("selective", "full"):
        repeated = (calls[mode] - calls["none"]) / of_a_pass
        assert seconds[mode] / seconds["none"] == pytest.approx(1 + repeated / 2), mode


MORE: tuple[dict[str, object], ...] = ({}, {"sequence_chunks": 4}, {"offload": True})


@pytest.mark.slow
def test_sequence_parts_and_offloading_save_the_expected_memory(monkeypatch):
    """The inputs of four blocks, 8 x 256 tokens of 64 float32 features each, leave the device."""
    monkeypatch.setitem(tiny.FLAVORS, "wide", dataclasses.replace(tiny.FLAVORS["deep"], ffn_dim=2048))
    config, size = Case({}, "wide", training={"seq_len": 256}).config(), 8 * 256 * 64 * 4
    kinds = (config.activation_checkpoint.model_copy(update={"mode": "full"} | more) for more in MORE)
    full, chunked, offloaded = (predict(config.model_copy(update={"activation_checkpoint": kind}), 1, "cpu") for kind in kinds)
    kept = [each.during("loss").activations for each in (full, chunked, offloaded)]
    assert kept == [4 * size, 4 * size, 0] and (full.host, offloaded.host) == (0, 4 * size)
    assert chunked.during("backward").working < full.during("backward").working
    assert offloaded.memory.total <= full.memory.total


def test_of_a_pipeline_the_host_keeps_the_inputs_of_all_microbatches_that_wait_for_their_backward_pass():
    """Two blocks of each of four microbatches of float32 features, since GPipe runs all forward passes first."""
    keys = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}
    config = Case({}, "deep", accumulation=4, parallelism=keys).config()
    kept = config.activation_checkpoint.model_copy(update={"mode": "full", "offload": True})
    size = config.training.local_batch_size * config.training.seq_len * 64 * 4
    assert predict(config.model_copy(update={"activation_checkpoint": kept}), 2, "cpu").host == 2 * 4 * size


@pytest.mark.parametrize(("kind", "sent"), [("all-gather", 600), ("reduce-scatter", 600), ("all-reduce", 1200), ("send", 600)])
def test_what_a_rank_sends_is_that_of_a_ring(kind, sent):
    assert ring_bytes(kind, 800, 4) == sent


def test_a_measured_size_does_not_depend_on_earlier_allocations():
    """Garbage that is collected late, a tensor that a thread frees late, and one whose memory FSDP2 allocates again."""
    with Allocations() as watch:
        late, again, kept = (torch.ones(1000) for _ in range(3))
        again.untyped_storage().resize_(0)
        watch.begin()
        assert watch.live() == 0
        del late
        again.untyped_storage().resize_(4000)
        new = kept + 1
    assert watch.live() == 8000 and watch.peaks == {"": 8000}, new.shape


def test_full_shapes_from_which_dtensor_derives_placements_are_no_memory():
    """PyTorch 2.11 derives those of an update in each step, and 120 GiB were predicted for 8B."""
    with simulated_ranks(64):
        mesh, allocations = init_device_mesh("cpu", (64,)), Allocations()
        with FakeTensorMode(), allocations:
            shards = DTensor.from_local(torch.empty(10, 13), mesh, [Shard(0)], run_check=False)
            allocations.begin()
            allocations.enter("product")
            product = shards * 3.25
            allocations.enter("after it")
    assert product.shape == (640, 13)
    assert max(allocations.peaks.values()) <= 2 * 4 * 10 * 13, allocations.peaks


def test_attention_on_a_gpu_holds_neither_scores_nor_a_mask():
    """On a CPU, capped scores exist for all pairs of tokens, and the mask of a window."""
    config = Config.model_validate(
        {
            "model": {"name": "tests.tiny_gemma3", "flavor": "two"},
            "training": {"seq_len": 1024, "local_batch_size": 1, "mixed_precision_param": "float32"},
        }
    )
    of_cpu, of_gpu = (predict(config, 1, device).memory.total for device in ("cpu", "cuda"))
    assert of_gpu < of_cpu / 4  # 32 and 365 MB; with scores it would be 359


def test_in_float32_attention_on_a_gpu_keeps_keys_and_values_for_each_head_of_the_queries():
    """The memory-efficient kernel has no grouped queries; cuDNN and FlashAttention compute in 16 bits."""
    config, saved = Config(), list[tuple[torch.dtype, torch.Size]]()
    setup = Setup(family_of(config.model), config, None, "cuda", "balanced", False)  # type: ignore[arg-type]
    hooks = saved_tensors_hooks(lambda each: saved.append((each.dtype, each.shape)), lambda each: each)
    for dtype in (torch.bfloat16, torch.float32):
        with FakeTensorMode(), _kernels_of(setup), hooks:
            q, k, v = (torch.zeros(1, heads, 64, 16, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
            attention.attend(q, k, v, None, None, None)
    # queries and result, and keys and values
    assert [saved.count((dtype, (1, 8, 64, 16))) for dtype in (torch.bfloat16, torch.float32)] == [2, 4]
    forced = Config.model_validate({"model": {"attention": "efficient"}})
    assert [line for line in limits(forced) if line not in limits(config)] == [
        'model.attention = "efficient": masks, and in 16 bits repeated keys and values, are left out'
    ]


@pytest.mark.parametrize("words", [{}, {"weight": torch.ones(8)}, {"weight": torch.ones(8), "eps": 1e-6}])
def test_a_gpus_norm_takes_the_arguments_of_pytorchs(words):
    """A fork's norm without a weight, or with keywords, ended estimate with a TypeError."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    expected = F.rms_norm(x, (8,), **words)
    config = Config()
    setup = Setup(family_of(config.model), config, None, "cuda", "balanced", False)  # type: ignore[arg-type]
    with _kernels_of(setup):
        found = F.rms_norm(x, (8,), **words)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found.sum().backward()
    assert x.grad is not None


def test_attention_on_a_gpu_is_alike_for_both_methods_of_context_parallelism():
    """A CPU computes the parts of the keys that a rank needs, and repeats them for each head of the queries."""
    found = {}
    for method in ("gather", "ulysses"):
        keys = {"context_parallel_method": method}
        config = Case({"cp": 2}, training={"seq_len": 512, "local_batch_size": 1}, parallelism=keys).config()
        found[method] = predict(config, 2, "cuda")
    assert found["gather"].work.flops == found["ulysses"].work.flops
    assert found["gather"].memory.total < 1.2 * found["ulysses"].memory.total


def test_a_compiled_kernel_of_an_optimizer_has_no_temporaries(monkeypatch):
    """The update of a large matrix alone would need more than the passes of 16 tokens."""
    keys = {"training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16", "seq_len": 16, "local_batch_size": 1}}
    working, updates = {}, []

    def kept(*args: Any) -> Update:
        updates.append(measure_update(*args))
        return updates[-1]

    monkeypatch.setattr("titanlite.plan.predict.measure_update", kept)
    for implementation in ("fused", "for-loop"):
        config = {"model": {"name": "tests.tiny", "flavor": "large"}, "optimizer": {"implementation": implementation}, **keys}
        working[implementation] = predict(Config.model_validate(config), 1).memory.working
        if implementation == "fused":  # not what it reads and writes either: parameters, gradients and moments are there before
            assert all(update.working < update.state / 10 for update in updates), updates
    assert working["fused"] < working["for-loop"] / 2
