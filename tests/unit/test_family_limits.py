"""A run or a command is refused exactly where it exceeds a family's LIMITS."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiny
from titanlite.config.read import Faults
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.inference.generate import Sampling, generate, score
from titanlite.loop.checks import check
from titanlite.registry.family import BrokenModule, load_family
from titanlite.tools import generate as command
from titanlite.tools import verify

PP, CP, TP = (f"parallelism.{name}_parallel_degree" for name in ("pipeline", "context", "tensor"))
PROMPTS, POLICY = "validation.sample_prompts", "training.document_policy"


def asks(tensor_parallel: int, training: dict[str, Any], prompts: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of a run on stages, context-parallel and tensor-parallel ranks."""
    degrees = {"pipeline_parallel_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": tensor_parallel}
    return {"parallelism": degrees, "training": training, "validation": {"enable": True, "sample_prompts": [*prompts]}}


def declared(monkeypatch: pytest.MonkeyPatch, **of_family: Any) -> None:
    monkeypatch.setattr(tiny, "LIMITS", of_family, raising=False)


def refusals(keys: dict[str, Any], ranks: int) -> list[str]:
    """The keys that a start refuses because of LIMITS."""
    config = Config.model_validate({"model": {"name": "tests.tiny", "flavor": "plain"}, **keys})
    with pytest.raises(Faults) as caught:  # no data, in any case
        check(config, "run.toml", ranks)
    return [re.split("[ :]", fault)[0] for fault in caught.value.faults if " tests.tiny declares LIMITS" in fault]


@pytest.mark.parametrize(
    ("declares", "on_four", "on_two_with_prompts"),
    [
        ({}, [], []),
        ({"stages": False}, [PP], [PP]),
        ({"causal": False}, [CP, POLICY], [CP, PROMPTS, POLICY]),
        ({"generates": False}, [], [PROMPTS]),
        ({"tensor_parallel": 1}, [TP], [TP]),
        ({"tensor_parallel": 2}, [TP], []),
        ({"stages": False, "causal": False, "generates": False}, [CP, PP, POLICY], [CP, PP, PROMPTS, POLICY]),
    ],
)
def test_a_start_is_refused_exactly_where_it_exceeds_the_familys_limits(monkeypatch, declares, on_four, on_two_with_prompts):
    """POLICY: unless a mask hides the padding, which is here for two ranks without prompts."""
    declared(monkeypatch, **declares)
    assert refusals(asks(4, {"document_policy": "truncate"}), 16) == on_four
    assert refusals(asks(2, {"document_policy": "best_fit"}, ["Once"]), 8) == on_two_with_prompts
    masked = asks(2, {"document_policy": "best_fit", "document_mask": True})
    assert refusals(masked, 8) == [key for key in on_two_with_prompts if key not in (PROMPTS, POLICY)]


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


@pytest.mark.parametrize("name", ["generates", "causal"])
def test_the_commands_that_generate_or_score_refuse_a_family_that_cannot_before_they_start_ranks(monkeypatch, tmp_path, name):
    """`generate` and `score` refuse it too."""
    declared(monkeypatch, **{name: False})
    monkeypatch.setattr(command, "checkpoints", lambda folder: [folder])
    monkeypatch.setattr(command, "family_at", lambda _source, model, _assets: load_family(model, "plain"))
    with pytest.raises(ValueError, match=f'cannot generate or score: it declares LIMITS\\["{name}"\\] = False'):
        command.model_source(SimpleNamespace(dir=tmp_path, checkpoint=None, tokenizer=None, model="tests.tiny"))
    model = load_family("tests.tiny", "plain").on_meta()
    for call in (lambda: generate(model, [[0]], 1, (), Sampling()), lambda: score(model, [([0], [0])])):
        with pytest.raises(UserError, match=f'declares LIMITS\\["{name}"\\] = False'):
            call()


@pytest.mark.parametrize(
    ("declares", "tp", "fault"),
    [
        ({"tensor_parallel": 1}, 2, '--tp 2: tests.tiny declares LIMITS["tensor_parallel"] = 1'),
        ({}, 8, "--tp 8: does not divide n_kv_heads = 4"),  # it divides the rows of their matrices
    ],
)
def test_the_commands_that_split_a_model_refuse_what_a_run_refuses(monkeypatch, tmp_path, declares, tp, fault):
    declared(monkeypatch, **declares)
    monkeypatch.setattr(command, "checkpoints", lambda folder: [folder])
    monkeypatch.setattr(command, "family_at", lambda _source, model, _assets: load_family(model, "plain"))
    with pytest.raises(ValueError, match=re.escape(fault)):
        command.model_source(SimpleNamespace(dir=tmp_path, checkpoint=None, tokenizer=None, model="tests.tiny", tp=tp))


def test_verify_leaves_out_meshes_that_a_run_refuses_and_prints_why(monkeypatch, capsys):
    config = Config.model_validate({"model": {"name": "tests.tiny", "flavor": "large"}, "training": {"seq_len": 64}})
    every = [mesh for _, mesh in verify.checked("run.toml", [], config)]
    declared(monkeypatch, stages=False, causal=False, tensor_parallel=1)
    possible = [mesh for _, mesh in verify.checked("run.toml", [], config)]
    assert possible == [mesh for mesh in every if not {"pp", "cp", "tp"} & {*mesh}] != every
    assert f'pp=2 is left out: {PP} = 2: tests.tiny declares LIMITS["stages"]' in capsys.readouterr().out
    with pytest.raises(Faults, match="pipeline_parallel_degree = 2"):
        verify.checked("run.toml", [{}, {"pp": 2}], config)
