"""A run or a command is refused exactly where it exceeds a family's LIMITS."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from models.decoder import Limits
from tests import tiny
from titanlite.config.read import Faults
from titanlite.config.schema import Config, Model
from titanlite.inference.generate import Sampling, generate, score
from titanlite.loop.checks import check
from titanlite.registry import limits
from titanlite.registry.family import BrokenModule, limits_of, load_family
from titanlite.tools import generate as command
from titanlite.tools import verify
from titanlite.verify import limits as verified_limits
from titanlite.verify.limits import refused_generation, refused_mesh

_TP = "parallelism.tensor_parallel_degree"
_PROMPT = {"validation": {"enable": True, "sample_prompts": ["Once"]}}
_TRUNCATE, _BEST_FIT = ({"training": {"document_policy": policy}} for policy in ("truncate", "best_fit"))


def _parallel(name: str, degree: int = 2) -> dict[str, Any]:
    return {"parallelism": {f"{name}_parallel_degree": degree}}


# what a run requires -> its keys, its ranks, and which declarations refuse it
ASKS: dict[str, tuple[dict[str, Any], int, Any]] = {
    "parallelism.pipeline_parallel_degree": (_parallel("pipeline"), 2, lambda stages, **_: not stages),
    "parallelism.context_parallel_degree": (_parallel("context"), 2, lambda causal, **_: not causal),
    f"{_TP} = 2": (_parallel("tensor"), 2, lambda tensor_parallel, **_: tensor_parallel == 1),
    f"{_TP} = 4": (_parallel("tensor", 4), 4, lambda tensor_parallel, **_: tensor_parallel in (1, 2)),
    "validation.sample_prompts": (_PROMPT, 1, lambda generates, causal, **_: not (generates and causal)),
    'training.document_policy = "truncate"': (_TRUNCATE, 1, lambda causal, **_: not causal),
    'training.document_policy = "best_fit"': (_BEST_FIT, 1, lambda causal, **_: not causal),
    "nothing": ({"training": {"document_policy": "best_fit", "document_mask": True}}, 1, lambda **_: False),
}
EVERY = [
    dict(zip(Limits._fields, values, strict=True))
    for values in itertools.product((True, False), (True, False), (True, False), (None, 1, 2, 4))
]


def declared(monkeypatch: pytest.MonkeyPatch, **of_family: Any) -> None:
    given = {name: value for name, value in of_family.items() if value is not None}
    monkeypatch.setattr(tiny, "LIMITS", given, raising=False)


def refusals(keys: dict[str, Any], ranks: int) -> list[str]:
    """The faults at a start that come from LIMITS."""
    config = Config.model_validate({"model": {"name": "tests.tiny", "flavor": "plain"}, **keys})
    with pytest.raises(Faults) as caught:  # no data, in any case
        check(config, "run.toml", ranks)
    return [fault for fault in caught.value.faults if "LIMITS" in fault]


@pytest.mark.parametrize("seed", range(3))
def test_a_start_is_refused_exactly_where_it_exceeds_the_familys_limits(monkeypatch, seed):
    for of_family in random.Random(seed).sample(EVERY, 4):
        declared(monkeypatch, **of_family)
        for key, (keys, ranks, refuses) in ASKS.items():
            found = refusals(keys, ranks)
            assert bool(found) == bool(refuses(**of_family)), (of_family, key, found)
            assert all(fault.startswith(key) and " tests.tiny declares " in fault for fault in found), found


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"generate": False}, "LIMITS has no 'generate'; did you mean generates?"),
        ({"stages": 0}, r"LIMITS\['stages'\] = 0: must be True or False"),
        ({"tensor_parallel": 0}, r"LIMITS\['tensor_parallel'\] = 0: must be a whole number of ranks, at least 1"),
        ({"tensor_parallel": True}, "must be a whole number of ranks"),
        (("generates",), r"LIMITS = \('generates',\): must be a dict"),
    ],
)
def test_a_wrong_declaration_is_named_when_the_family_is_loaded(monkeypatch, given, fault):
    monkeypatch.setattr(tiny, "LIMITS", given, raising=False)
    with pytest.raises(BrokenModule, match=f"tests.tiny: .*{fault}"):
        load_family("tests.tiny", "plain")


def test_an_attribute_that_has_no_effect_is_named():
    module = SimpleNamespace(__name__="mine", Model=type("Model", (tiny.Model,), {"generates": False}))
    with pytest.raises(BrokenModule, match="generates has no effect"):
        limits_of(module)


@pytest.mark.parametrize("name", ["generates", "causal"])
def test_generation_is_refused_by_the_functions_and_by_the_commands_before_they_start_ranks(monkeypatch, tmp_path, name):
    declared(monkeypatch, **{name: False})
    model = load_family("tests.tiny", "plain").on_meta()
    for call in (
        lambda: generate(model, [[1]], 2, None, Sampling()),
        lambda: score(model, [([1], [2])]),
        lambda: command.model_source(SimpleNamespace(dir=tmp_path, checkpoint=None, model="tests.tiny")),
    ):
        monkeypatch.setattr(command, "checkpoints", lambda folder: [folder])
        monkeypatch.setattr(command, "family_at", lambda _source, model: load_family(model, "plain"))
        with pytest.raises(ValueError, match=f'cannot generate or score: it declares LIMITS\\["{name}"\\] = False'):
            call()


def test_check_model_fails_if_a_start_does_not_enforce_the_limits(monkeypatch):
    declared(monkeypatch, stages=False, generates=False)
    model, family = Model(name="tests.tiny", flavor="plain"), load_family("tests.tiny", "plain")
    monkeypatch.setattr(limits, "faults", lambda _config, _model: [])
    with pytest.raises(ValueError, match="and a run that needs it is not"):
        refused_mesh(model, family, {"pp": 2})
    with pytest.raises(ValueError, match=r'"generates".* is not refused'):
        refused_generation(model, family)
    monkeypatch.undo()
    declared(monkeypatch, generates=False)

    def scores(*_arguments: Any) -> list[tuple[float, bool]]:
        return [(0.0, True)]

    monkeypatch.setattr(verified_limits, "score", scores)
    with pytest.raises(ValueError, match="and scores does not refuse it"):
        refused_generation(model, load_family("tests.tiny", "plain"))


def test_verify_leaves_out_meshes_beyond_the_familys_limits(monkeypatch):
    config = Config.model_validate({"model": {"name": "tests.tiny", "flavor": "plain"}})
    every = verify._default_meshes(config)
    declared(monkeypatch, stages=False, causal=False, tensor_parallel=1)
    assert verify._default_meshes(config) == [mesh for mesh in every if not {"pp", "cp", "tp"} & {*mesh}] != every
