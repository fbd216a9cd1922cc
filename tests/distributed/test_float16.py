"""float16: the loss is scaled, and steps that overflow are skipped by all ranks together. test_variants.py resumes."""

import dataclasses

import pytest
import torch

from tests.distributed.scenarios import CPU, config_of, mesh_of, rank_batches
from titanlite.loop import step as step_module
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.optim.loss_scale import FIRST, LossScale
from titanlite.registry.family import Family, load_family
from titanlite.transforms.shards import local_part
from titanlite.verify.compare import whole

HERE = "tests.distributed.test_float16"
TWO_BY_TWO, TP = {"dp_shard": 2, "tp": 2}, {"tp": 2}


def steps_with_scale(degrees: dict[str, int], first_scale: float, steps: int) -> list[tuple[float, bool, bool, float]]:
    """(scale before the step, whether its norm was finite, whether any weight changed, optimizer's step) of each step."""
    config = config_of(degrees, training={"mixed_precision_param": "float16"})
    mesh = mesh_of(degrees)
    model, optimizer, loss_scale = begin_training(load_family("tests.tiny", "plain"), config, mesh, CPU)
    source = rank_batches(config, mesh)
    loss_scale.scale.fill_(first_scale)
    happened = []
    for _ in range(steps):
        before = [local_part(p).clone() for p in model.parameters()]
        scale = loss_scale.scale.item()
        forward_backward(model, next(source), mesh, loss_scale)
        norm = update(model, optimizer, 1e-3, 1.0, loss_scale)
        changed = any(not torch.equal(local_part(p), old) for p, old in zip(model.parameters(), before, strict=True))
        count = next(iter(optimizer.state.values()))["step"].item()
        happened.append((scale, bool(norm.isfinite()), changed, count))
    return happened


@pytest.mark.parametrize("degrees", [{}, TWO_BY_TWO], ids=["one process", "2 x 2"])
def test_steps_that_overflow_are_skipped_by_all_ranks_and_halve_the_scale(pools, degrees):
    ranks = pools[4 if degrees else 1].run(f"{HERE}:steps_with_scale", degrees=degrees, first_scale=2.0**20, steps=12)
    for happened in ranks:
        assert [entry[:2] for entry in happened] == [entry[:2] for entry in ranks[0]]
        assert not happened[0][1], "the first scale was to overflow"
        assert happened[-1][1], "the scale never became small enough"
        taken = 0
        for (scale, finite, changed, count), following in zip(happened, [*happened[1:], None], strict=True):
            taken += finite
            assert changed == finite
            assert count == taken
            assert following is None or following[0] == (scale if finite else scale / 2)


def test_the_scale_doubles_after_many_good_steps():
    loss_scale = LossScale(CPU)
    for _ in range(2000):
        loss_scale.update(torch.zeros(()))
    assert loss_scale.report() == {"loss_scale": 2 * FIRST, "skipped_steps": 0}


def gradients_at(precision: str, labels: float, degrees: dict[str, int], vocabulary: int) -> dict[str, torch.Tensor]:
    """The gradients of one step, float64, as if its global batch had this many labels."""
    config = config_of(degrees, "large", training={"mixed_precision_param": precision})
    mesh, family = mesh_of(degrees), load_family("tests.tiny", "large")
    family = Family(family.module, dataclasses.replace(family.config, vocab_size=vocabulary))
    model, _, loss_scale = begin_training(family, config, mesh, CPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_module, "count_labels", lambda *_: torch.tensor(labels))
        forward_backward(model, next(rank_batches(config, mesh)), mesh, loss_scale)
    divisor = 1.0 if loss_scale is None else loss_scale.divisor.double()
    return {name: whole(p.grad).double() / divisor for name, p in model.named_parameters()}


def worst_error(labels: float, degrees: dict[str, int], vocabulary: int = 4096) -> float:
    """The largest relative error of a parameter's gradient in float16."""
    found, expected = (gradients_at(precision, labels, degrees, vocabulary) for precision in ("float16", "float32"))
    return max(((found[name] - wanted).norm() / wanted.norm()).item() for name, wanted in expected.items())


def error_of_unseen_words() -> float:
    """The error in output rows of tokens that no text contains, with a vocabulary of 131,072."""
    found, wanted = (
        gradients_at(precision, 2.0**13, {}, 2**17)["head.output.weight"][4096:] for precision in ("float16", "float32")
    )
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.slow
def test_the_head_scales_gradients_before_they_underflow_in_float16(pools):
    # A softmax is 1 / 2^17 = 7.6e-6, and the smallest normal number 6.1e-5. Without the head's scale the error is 1.9e-3.
    assert pools[1].run(f"{HERE}:error_of_unseen_words")[0] < 1e-3


def test_gradients_in_float16_are_as_exact_for_four_million_labels_as_for_eight_thousand(pools):
    errors = [pools[1].run(f"{HERE}:worst_error", labels=labels, degrees={})[0] for labels in (2.0**13, 5e5, 4e6)]
    assert max(errors) < 1.5e-3
    assert errors == pytest.approx(errors[:1] * 3, rel=1e-3)
    assert max(pools[2].run(f"{HERE}:worst_error", labels=4e6, degrees=TP)) < 1.5e-3
