"""A step in which no token is a label: every optimizer skips it, whatever its momentum, and its loss is None, not 0."""

import math

import pytest
import torch
from torch import Tensor

from tests.distributed.scenarios import CPU, config_of, mesh_of, rank_batches
from titanlite.config.schema import Config
from titanlite.data.timeline import Timeline
from titanlite.loop.divergence import Spikes, Steps, is_bad
from titanlite.loop.resume import Progress
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.state import run_tensors
from titanlite.registry.family import load_family

HERE = "tests.distributed.test_no_labels"
BFLOAT16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}


def state_after(degrees: dict[str, int], config: Config, model: str, left_out: bool) -> tuple[dict[str, Tensor], list]:
    """This rank's parameters, buffers and moments after four steps, the third without labels or left out; (loss, norm) each."""
    mesh = mesh_of(degrees)
    decoder, optimizer, scale = begin_training(load_family(model, "plain"), config, mesh, CPU)
    source, steps = rank_batches(config, mesh), Steps(mesh)
    for number in range(1, 5):
        batch = next(source)
        counted = torch.full_like(batch.tokens, number != 3, dtype=torch.bool)
        if number == 3 and left_out:
            continue
        loss = forward_backward(decoder, batch._replace(counted=counted), mesh, scale)
        steps.add(number, 0, loss, update(decoder, optimizer, 1e-2, 1.0, scale, loss.labels))
    tensors = run_tensors(decoder, optimizer, None)
    return {name: getattr(t, "_local_tensor", t).detach().clone() for name, t in tensors.items()}, steps.read()


def compare(degrees: dict[str, int], config: Config, model: str) -> tuple[list, list[str]]:
    (found, steps), (expected, _) = (state_after(degrees, config, model, left_out) for left_out in (False, True))
    return steps, [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(
    ("model", "degrees", "sections"),
    [
        ("tests.tiny", {}, {}),
        ("tests.tiny", {"dp_shard": 2}, {"optimizer": {"implementation": "foreach"}}),
        ("tests.tiny", {"pp": 2}, {"optimizer": {"implementation": "for-loop", "name": "Adam"}}),
        ("tests.tiny", {}, {"optimizer": {"implementation": "for-loop", "name": "Muon"}}),
        ("tests.tiny", {}, {"optimizer": {"implementation": "for-loop"}, "training": BFLOAT16}),
        ("tests.tiny", {}, {"training": {"mixed_precision_param": "float16"}}),
        ("tests.tiny_moe", {"dp_shard": 2}, {"moe": {"balance_loss": 0.1, "bias_update_speed": 0.01}}),
    ],
    ids=["fused", "foreach, sharded", "for-loop, stages", "Muon", "bfloat16", "float16", "MoE with a balance loss"],
)
def test_a_step_without_labels_leaves_no_trace_and_has_no_loss(pools, model, degrees, sections):
    config = config_of(degrees, accumulation=2, **sections)
    ranks = pools[math.prod(degrees.values())].run(f"{HERE}:compare", degrees=degrees, config=config, model=model)
    for steps, different in ranks:
        assert different == []
        assert [step.loss is None for step in steps] == [False, False, True, False]
        assert all(math.isfinite(step.norm) for step in steps) and not any(is_bad(step, False) for step in steps)
    steps = ranks[0][0]
    mean = Progress(0, Timeline([])).with_losses(steps, 10).loss_mean
    assert mean == pytest.approx(sum(step.loss for step in steps if step.loss is not None) / 3)
    assert Spikes(4, 10.0).find(steps) == []
