"""titanlite check-model: rounding is never a fault, however large relative to a gradient, and no fault passes as rounding."""

import re

import pytest
import torch

from tests.end_to_end import test_check_model
from tests.end_to_end.test_check_model import command, failed, table
from titanlite.config.schema import Model
from titanlite.parallel.mesh import DEGREES
from titanlite.registry.family import load_family
from titanlite.tools import check_model
from titanlite.verify.compare import compare, meshes_of
from titanlite.verify.rounding import settle
from titanlite.verify.small_runs import describe, gradients_small, train_small
from titanlite.verify.table import COMPILED, RECOMPUTED, TRAINED, Row

pooled = test_check_model.pooled
TP = {"tp": 2}


def on(pools, function, fork: str, degrees: dict[str, int]):
    """The result of a function of small_runs on a mesh."""
    words = Model(name=fork, flavor="plain"), {}, degrees
    ranks = 2 if degrees else 1
    return pools[ranks].run(f"{test_check_model.__name__}:call", called=function.__name__, arguments=words)[0]


def test_every_mesh_dimension_that_a_run_can_split_has_a_row():
    model = load_family("tests.tiny_moe", "plain").on_meta()
    assert {name for degrees in meshes_of(model).values() for name in degrees} == set(DEGREES)


@pytest.mark.slow
def test_a_right_fork_whose_gradients_cancel_passes_and_its_tolerances_are_printed(pooled):
    """test_verify.py compares its meshes."""
    rows = table("tests.forks.cancelling", TRAINED, RECOMPUTED, COMPILED)
    assert {row.verdict for row in rows.values()} == {"passed"}
    (text,) = rows[TRAINED].texts
    assert re.search(r"layers.\d.mix.weight \d\.\de-0[34] \(tolerance \d\.\de-03\)", text)


@pytest.mark.parametrize("fork", ["tests.forks.cancelling", "tests.forks.scale_free"])
def test_a_fault_of_one_percent_of_any_gradient_fails_where_gradients_cancel(pools, fork):
    alone, split = (on(pools, train_small, fork, degrees).trajectory for degrees in ({}, TP))
    wide_alone, wide_split = (on(pools, gradients_small, fork, degrees) for degrees in ({}, TP))
    assert not compare(split, alone._replace(noise=None)).equal, "without its noise the right fork fails"
    assert all(gradient.dtype == torch.float64 for gradient in wide_split.values())
    assert settle(split, alone, wide_split, wide_alone).equal
    for name in alone.gradients:
        wrong = split._replace(gradients={**split.gradients, name: split.gradients[name] * 1.01})
        found = compare(wrong, alone)
        if found.undecided:
            found = settle(wrong, alone, {**wide_split, name: wide_split[name] * 1.01}, wide_alone)
        if name == "factor.weight":  # its gradient is only rounding, and so is 1% of it
            continue
        assert not found.equal and not found.undecided, name
        assert name in [difference.where for difference in found.excessive]


@pytest.mark.slow
def test_a_gradient_of_only_rounding_is_decided_in_float64(pooled):
    rows = table("tests.forks.scale_free", COMPILED, "tp 2", "shard 2")
    assert {row.verdict for row in rows.values()} == {"passed"}
    assert any("factor.weight" in text and "in float64 it does not" in text for row in rows.values() for text in row.texts)


@pytest.mark.slow
def test_a_difference_that_float64_cannot_decide_has_its_own_exit_code(pooled, monkeypatch, capsys):
    rows = table("tests.forks.float32_only", COMPILED, "tp 2", "shard 2")
    undecided = [row for row in rows.values() if row.verdict == "undecided"]
    assert undecided and failed(rows) == {}
    assert "the model does not run in float64" in undecided[0].texts[0] and "the kernel takes float32" in undecided[0].texts[0]
    monkeypatch.setattr(check_model, "rows_of", lambda *_: iter([Row("tp 2", "undecided", ["x"]), Row("HF", "not run", ["y"])]))
    assert command(monkeypatch, "tests.tiny") == 3
    assert capsys.readouterr().out.splitlines()[-1] == "1 undecided"


def test_if_gradients_are_not_summed_over_ranks_those_of_the_last_layer_are_listed(pools):
    alone, split = (on(pools, train_small, "tests.forks.missing_partial", degrees).trajectory for degrees in ({}, TP))
    first, *rest = describe(compare(split, alone))
    assert first.startswith("the gradient of layers.1.factor.weight differs by ")
    assert rest == ["and 1 more, which may follow from this"]
