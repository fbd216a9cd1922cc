"""P1 with documents: neither mesh, nor checkpointing, nor compilation changes what a token sees."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex

from models import attention, llama3
from models.attention import SeqInfo, block_mask
from tests.distributed.pool import Pool
from tests.distributed.scenarios import CPU, GLOBAL_BATCH, GRAPHS, MODES, config_of, mesh_of
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.loop.loss import count_labels, summed_loss
from titanlite.loop.step import build_model
from titanlite.parallel.mesh import LOSS_DIMENSIONS, data_degree, data_rank, sum_over
from titanlite.registry.family import load_family
from titanlite.verify.compare import whole

HERE = "tests.distributed.test_document_mask"
MESHES = {
    "shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "context 2": {"cp": 2},
    "context 2 x tp 2": {"cp": 2, "tp": 2},
}
STEPS = 3


class Found(NamedTuple):
    """What some steps gave, the weights being left as they are."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]  # of each step, whole
    graphs: int  # that were compiled for it


def global_batch(step: int, seq: int) -> Batch:
    """Other documents at every step, of 1 to 33 tokens; the last eighth of every second row is padding."""
    random = torch.Generator().manual_seed(step)
    starts = torch.rand(GLOBAL_BATCH, seq + 1, generator=random) < torch.linspace(0, 0.6, GLOBAL_BATCH)[:, None]
    starts[:, 0] = True
    padding = torch.zeros_like(starts)
    padding[::2, -seq // 8 :] = True
    starts = (starts & ~padding) | (padding & ~padding.roll(1, dims=1))
    tokens = torch.randint(512, starts.shape, generator=random)
    return Batch(tokens, ~starts & ~padding, starts.cumsum(1)[:, :-1].int())


def steps(degrees: dict[str, int], config: Config, flex_attention: bool = False) -> Found | None:
    """Losses and gradients of some steps on a mesh; rank 0 returns them."""
    torch._dynamo.reset()
    counters.clear()
    mesh = mesh_of(degrees)
    model = build_model(load_family(config.model.name, config.model.flavor), config, mesh, CPU)
    part = GLOBAL_BATCH // data_degree(mesh)
    losses, gradients = [], []
    with pytest.MonkeyPatch.context() as patch:
        if flex_attention:
            _use_flex_attention(patch)
        for step in range(STEPS):
            rows = slice(data_rank(mesh) * part, (data_rank(mesh) + 1) * part)
            batch = Batch(*(tensor[rows] for tensor in global_batch(step, config.training.seq_len)))
            model.zero_grad()
            loss = summed_loss(model, batch) / count_labels(batch, mesh).clamp(min=1)
            loss.backward()
            losses.append(sum_over(LOSS_DIMENSIONS, loss.detach(), mesh).item())
            gradients.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    return Found(losses, gradients, counters["stats"]["unique_graphs"]) if dist.get_rank() == 0 else None


def _use_flex_attention(patch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, with the plain implementation, which goes backward on a CPU when nobody asks whether it may."""
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")

    def with_block_mask(seq: SeqInfo) -> SeqInfo:
        return seq._replace(mask=block_mask(seq.documents, positions=seq.split and seq.split.positions))

    patch.setattr(llama3, "with_mask", with_block_mask)
    patch.setattr(flex, "_validate_device", lambda *tensors: None)
    patch.setattr(attention, "_compiled_flex_attention", lambda: compiled)


@pytest.fixture(scope="module")
def one_process(pools: dict[int, Pool]) -> Found:
    """The reference: one process, nothing compiled, nothing computed twice."""
    return run(pools, {}, "none", None)


def run(pools: dict[int, Pool], degrees: dict[str, int], mode: str, backend: str | None, **options: bool) -> Found:
    config = config_of(
        degrees,
        activation_checkpoint=MODES[mode],
        compile={"enable": backend is not None, "backend": backend or "inductor"},
    )
    return pools[math.prod(degrees.values())].run(f"{HERE}:steps", degrees=degrees, config=config, **options)[0]


def assert_equal_within_rounding(found: Found, reference: Found, record_property) -> None:
    worst = {}
    for step, (gradients, expected) in enumerate(zip(found.gradients, reference.gradients, strict=True)):
        for name, gradient in expected.items():
            worst[step, name] = ((gradients[name] - gradient).norm() / gradient.norm()).item()
    place = max(worst, key=worst.__getitem__)
    record_property("worst", f"{worst[place]:.1e} {place}")
    print(f"worst gradient {worst[place]:.1e}, {place}")
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(found.losses, reference.losses, strict=True))
    assert worst[place] < 1e-5, place


@pytest.mark.parametrize(
    ("mesh", "mode", "backend"),
    [
        pytest.param("tp 2", "full", None, marks=pytest.mark.slow),
        ("shard 2 x tp 2", "per operation", None),
        pytest.param("shard 2", "per operation", "aot_eager", marks=pytest.mark.slow),
        ("tp 2", "budget", "aot_eager"),
        ("context 2", "per operation", None),
        pytest.param("context 2 x tp 2", "none", "aot_eager", marks=pytest.mark.slow),
        pytest.param("shard 2 x tp 2", "none", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_flex_attention_goes_through_meshes_checkpointing_and_compiler(
    pools, one_process, mesh, mode, backend, record_property
):
    found = run(pools, MESHES[mesh], mode, backend, flex_attention=True)
    assert_equal_within_rounding(found, one_process, record_property)
    assert found.graphs == (GRAPHS if backend else 1)  # by itself, FlexAttention alone is compiled
