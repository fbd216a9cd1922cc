"""An own metric that reads intermediate values of blocks, on every kind of mesh; it is in tests/own/parts.py."""

from typing import Any

import pytest
import torch

from tests.distributed.scenarios import CPU, config_of, first_microbatch, mesh_of
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, run_config
from tests.own.parts import head_entropy
from titanlite.loop.loss import to_microbatch
from titanlite.loop.step import build_model
from titanlite.parallel.fsdp import evaluating
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of

# Families that normalize queries and keys, so that heads differ from the first step on.
DENSE, MOE = ({"model": {"name": f"tests.{name}"}} for name in ("tiny_qwen3", "tiny_moe"))
ACCUMULATED: dict[str, Any] = {"training": {"local_batch_size": 2}}
ULYSSES: dict[str, Any] = {"parallelism": {"context_parallel_method": "ulysses"}}
CELLS: dict[str, tuple[Degrees, dict[str, Any]]] = {
    "accumulated": (ONE, DENSE | ACCUMULATED),
    "2 x 2": (TWO_BY_TWO, DENSE),
    "pp 2": ({"pp": 2}, DENSE | ACCUMULATED),
    "cp 2": ({"cp": 2}, DENSE),
    "cp 2 by heads": ({"cp": 2}, DENSE | ULYSSES),
    "ep 2": ({"dp_shard": 2, "ep": 2}, MOE),
}


def entropies(pools, folder, degrees: Degrees, keys: dict[str, Any]) -> dict[str, float]:
    """The values reported after a step."""
    config = run_config(degrees, folder, 1, checkpoint={"enable": False}, **keys)
    extra = {"extra": ["tests.own.parts:head_entropy"], "extra_options": {"head_entropy": {"every": 4}}}
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update=extra)})
    pools[ranks_of(degrees)].run("tests.distributed.scenarios:full_run", degrees=degrees, config=config)
    (report,) = reports(folder)
    return {name: value for name, value in report.items() if name.startswith("extra/")}


@pytest.mark.parametrize("cell", CELLS)
def test_the_entropy_of_each_head_is_that_of_one_process(pools, tmp_path, cell):
    degrees, keys = CELLS[cell]
    found = entropies(pools, tmp_path / "mesh", degrees, keys)
    expected = entropies(pools, tmp_path / "one", ONE, {"model": keys["model"]})
    assert len(expected) == len({round(value, 4) for value in expected.values()}) >= 16
    assert found == pytest.approx(expected, rel=1e-5)


def uniform() -> tuple[dict[str, tuple[float, int]], float]:
    """The metric of a model whose heads attend uniformly to all tokens of a document, and the expected entropy."""
    config = config_of(ONE, training={"document_mask": True})
    model = build_model(family_of(config.model), config, mesh_of(ONE), CPU)
    batch = first_microbatch(config, mesh_of(ONE))
    of_two = torch.arange(batch.inputs().shape[-1]).expand_as(batch.inputs()) // 20
    part = to_microbatch(model, batch._replace(documents=of_two.int()))
    for layer in model.layers.values():
        layer.attention.wq.weight.data.zero_()
    with evaluating(model):
        return head_entropy(model, [part], every=1), (part.seq.positions + 1.0).log().mean().item()


def test_attention_to_all_tokens_alike_has_the_entropy_of_their_number(pools):
    ((found, expected),) = pools[1].run(f"{__name__}:uniform")
    assert len(found) == 16
    assert [total / count for total, count in found.values()] == pytest.approx([expected] * 16, rel=1e-5)
