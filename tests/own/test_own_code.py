"""metrics.extra and hooks.modules: their effect on every mesh, what is refused, and the code as part of a run."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from tests.distributed.pool import WorkerFailure
from tests.distributed.scenarios import CPU, config_of, first_microbatch, full_run, mesh_of, trajectory
from tests.distributed.test_resume import ONE, TWO_BY_TWO, Degrees, reports, resumes_once, run, run_config, stored
from tests.distributed.test_variants import FLOAT8, STAGES, rounded
from tests.own import watching
from tests.own.parts import head_entropy
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.ground.errors import UserError
from titanlite.loop.loss import to_microbatch
from titanlite.loop.own_code import OwnCode, faults
from titanlite.loop.step import build_model
from titanlite.optim.build import build_optimizer
from titanlite.parallel.fsdp import evaluating
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of
from titanlite.registry.own import source_of_parts
from titanlite.tools.replay import check_trust
from titanlite.tools.verify import _record as record_of_verify

METRICS = {"extra": [f"tests.own.parts:{name}" for name in ("mean_square", "logit_entropy", "head_entropy")]}


def with_own_code(metrics: dict[str, Any] | None = None, hooks: list[str] | None = None) -> Config:
    return config_of(ONE, metrics=metrics or {}, hooks={"modules": hooks or []})


def watched_run(degrees: Degrees, folder: Path) -> list[str]:
    """The calls of a run's hooks, on each rank. The family normalizes queries, so that heads differ from the first step on."""
    keys = {"checkpoint": {"interval": 2}, "training": {"local_batch_size": 4}, "hooks": {"modules": ["tests.own.watching"]}}
    config = run_config(degrees, folder, 4, model={"name": "tests.tiny_qwen3"}, **keys)
    full_run(degrees, config.model_copy(update={"metrics": config.metrics.model_copy(update={**METRICS, "log_freq": 2})}))
    return watching.CALLS


@pytest.mark.slow
def test_metrics_and_hooks_work_on_every_mesh(pools, tmp_path):
    found: dict[str, list[dict[str, Any]]] = {}
    for name, degrees in {"one": ONE, "2 x 2": TWO_BY_TWO, "cp 2": {"cp": 2}, "stages": STAGES}.items():
        calls = pools[ranks_of(degrees)].run(f"{__name__}:watched_run", degrees=degrees, folder=tmp_path / name)
        assert calls == [calls[0]] * ranks_of(degrees)
        assert calls[0] == [
            *("after_building True", "before_step 1", "after_step 1", "at_report 1 True", "before_step 2", "after_step 2"),
            *("at_report 2 True", "at_save 2 step-00000002", "before_step 3", "after_step 3", "before_step 4", "after_step 4"),
            *("at_report 4 True", "at_save 4 step-00000004"),
        ]
        assert (stored(tmp_path / name, 4)["model.layers.0.ffn_norm.weight"] == 0.75).all()
        found[name] = reports(tmp_path / name)
        assert [report["extra/calls"] for report in found[name]] == [4, 7, 13]
        assert all(report["extra/not_finite"] is None and report["extra/nothing"] is None for report in found[name])
    everywhere = ("extra/mean_square", "extra/head_entropy")
    for name in ("2 x 2", "cp 2", "stages"):
        keys = everywhere if name == "stages" else (*everywhere, "extra/logit_entropy")
        for report, of_one in zip(found[name], found["one"], strict=True):
            expected = {key: value for key, value in of_one.items() if key.startswith(keys)}
            assert {key: report[key] for key in expected} == pytest.approx(expected, rel=1e-5), name
    assert "extra/mean_square/layers.1.ffn.w2.weight" in found["one"][0]
    assert "extra/logit_entropy" not in found["stages"][0]  # no stage can run on its own
    assert 1 < found["one"][0]["extra/logit_entropy"] < 6.24  # log 512
    of_heads = [value for key, value in found["one"][0].items() if key.startswith("extra/head_entropy")]
    assert len(of_heads) == 16 and len({round(value, 4) for value in of_heads}) > 12


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


def test_a_run_whose_hooks_freeze_parameters_and_run_the_model_resumes_bit_for_bit(pools, tmp_path):
    """The load, which comes before the hook, wanted moments that the save, after it, had left out. The resume comes after the
    step from which norms are trained."""
    found = resumes_once(
        pools, {"dp_shard": 2}, tmp_path, optimizer={"ema_decay": 0.9}, hooks={"modules": ["tests.own.freezing"]}
    )
    assert not found["optimizer.embed.weight.exp_avg"].any() and found["optimizer.head.output.weight.exp_avg"].any()
    assert torch.equal(found["ema.embed.weight"], found["model.embed.weight"])
    assert found["optimizer.layers.0.ffn_norm.weight.exp_avg"].any()


LATER: tuple[tuple[Degrees, dict[str, Any]], ...] = (
    ({"dp_shard": 2}, {"training": {"mixed_precision_param": "bfloat16"}}),
    (STAGES, {**rounded("compensated"), "training": {**rounded("compensated")["training"], "local_batch_size": 4}}),
)


@pytest.mark.parametrize(("degrees", "keys"), LATER)
def test_what_a_hook_trains_later_is_reduced_in_the_precision_of_the_rest(pools, tmp_path, degrees, keys):
    """FSDP2 chose it at its first pass, from parameters that were trained then. In a pipeline, a run ended where a hook trained
    bfloat16 parameters later."""
    for name, mesh in (("one", ONE), ("mesh", degrees)):
        run(pools, mesh, tmp_path / name, 2, hooks={"modules": ["tests.own.unfreezing"]}, **keys)
    one, found = (reports(tmp_path / name)[-1]["grad_norm"] for name in ("one", "mesh"))
    assert found == pytest.approx(one, rel=0.02)


def test_a_hook_masks_accumulated_gradients_on_a_mesh_as_on_one_process(pools, tmp_path):
    keys = {"hooks": {"modules": ["tests.own.masking"]}, "training": {"local_batch_size": 2}}
    for name, degrees in (("one", ONE), ("mesh", {"dp_shard": 2})):
        run(pools, degrees, tmp_path / name, 2, **keys)
    one, found = (stored(tmp_path / name, 2)["optimizer.embed.weight.exp_avg"] for name in ("one", "mesh"))
    assert torch.allclose(found, one, rtol=1e-4, atol=1e-8)
    assert one[::2].any() and not found[1::2].any()


def test_a_hook_freezes_a_part_of_each_block_with_replicas_and_accumulation_as_in_one_process(pools, tmp_path):
    """The parts of a block that are reduced were counted before a hook froze some."""
    keys = {"hooks": {"modules": ["tests.own.freezing"]}, "training": {"local_batch_size": 1, "global_batch_size": 4}}
    for name, degrees in (("one", ONE), ("replicas", {"dp_replicate": 2})):
        run(pools, degrees, tmp_path / name, 3, **keys)
    one, replicas = (reports(tmp_path / name)[-1]["grad_norm"] for name in ("one", "replicas"))
    assert replicas == pytest.approx(one, rel=1e-5)


HOOKS = ["after_building(model, config)", *(f"{when}_step(step, model, optimizer)" for when in ("before", "after"))]


@pytest.mark.parametrize("arguments", HOOKS)
def test_a_hook_that_unfreezes_what_the_optimizer_does_not_have_is_refused(arguments, own_module):
    own_module(f"def {arguments}:\n    model.requires_grad_(True)\n")
    config, model = with_own_code(hooks=["own_code"]), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer, own_code = build_optimizer(model, config.optimizer), OwnCode(config)
    with pytest.raises(UserError, match=r"^hooks\.modules: .* bias, which \[\[optimizer\.groups\]\]"):
        own_code.after_building(model, config, optimizer)
        for hook in ("before_step", "after_step"):
            own_code.at_step(hook, 1, model, optimizer)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_gradient_hook_of_a_sharded_parameter_is_refused(sharded, own_module, group_of_one):
    """FSDP2 never called it: on a mesh, everything was trained that it had masked on one process."""
    text = "def mask(gradient):\n    return gradient * 0\n\n\ndef {}:\n    model.weight.register_hook(mask)\n"
    model = torch.nn.Linear(2, 2)
    if sharded:
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,))))
    for arguments in HOOKS[:2]:
        own_module(text.format(arguments))
        own_code = OwnCode(config := with_own_code(hooks=["own_code"]))
        message = (
            r"^hooks\.modules: weight\.register_hook\(mask\) .* use register_post_accumulate_grad_hook.*own_code.py, line 1"
        )
        with pytest.raises(UserError, match=message) if sharded else contextlib.nullcontext():
            optimizer = build_optimizer(model, config.optimizer)
            own_code.after_building(model, config, optimizer)
            own_code.at_step("before_step", 1, model, optimizer)


def test_weights_that_a_hook_sets_to_zero_move_again_with_remainders(pools, tmp_path):
    run(pools, {"dp_shard": 2}, tmp_path, 2, hooks={"modules": ["tests.own.changing"]}, **rounded("compensated"))
    assert stored(tmp_path, 2)["model.layers.0.ffn.w1.weight"].all()


def test_weights_that_a_hook_sets_to_zero_at_the_start_have_no_remainder(own_module):
    own_module("def after_building(model, config):\n    model.weight.data[0] = 0\n")
    config, model = with_own_code(hooks=["own_code"]), torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, config.optimizer.model_copy(update={"rounding": "compensated"}))
    optimizer.state[model.weight]["remainder"].fill_(-3)
    OwnCode(config).after_building(model, config, optimizer)
    assert optimizer.state[model.weight]["remainder"].tolist() == [[0, 0], [-3, -3]]


def test_float8_gathers_the_weights_that_a_hook_has_left_as_a_resume_does(pools, tmp_path):
    pytest.importorskip("torchao", reason="needs torchao")
    keys = {"hooks": {"modules": ["tests.own.changing"]}, "checkpoint": {"interval": 1}, **FLOAT8}
    for folder, ends in (("whole", [2]), ("parts", [1, 2])):
        for steps in ends:
            run(pools, {"dp_shard": 2}, tmp_path / folder, steps, **keys)
        # a class of torchao's among the tensors would make the checkpoint unreadable where torchao is not imported
        files = [*(tmp_path / folder).rglob("*.distcp")]
        assert files and not any(b"torchao" in file.read_bytes() for file in files)
    whole, parts = (reports(tmp_path / folder)[-1] for folder in ("whole", "parts"))
    assert (parts["loss"], parts["grad_norm"]) == (whole["loss"], whole["grad_norm"])


def test_a_run_with_metrics_trains_as_one_without(pools, tmp_path):
    """Tied: the metric runs a part of the unit of embedding and head, which PyTorch 2.11 then did not gather in step 2."""
    for folder, own in (("with", {"extra": ["tests.own.parts:head_entropy"]}), ("without", {})):
        config = run_config({"dp_shard": 2}, tmp_path / folder, 3, flavor="tied")
        config = config.model_copy(update={"metrics": config.metrics.model_copy(update=own)})
        pools[2].run("tests.distributed.scenarios:full_run", degrees={"dp_shard": 2}, config=config)
    found, plain = reports(tmp_path / "with"), reports(tmp_path / "without")
    assert [(each["loss"], each["grad_norm"]) for each in found] == [(each["loss"], each["grad_norm"]) for each in plain]
    assert not any(key.startswith("extra") for key in plain[0])


def followed(config: Config) -> list[str]:
    """The hook calls by `verify` and `replay`."""
    trajectory({}, config)
    return watching.CALLS


def test_verify_and_replay_call_the_hooks_that_change_training(pools):
    config = config_of(ONE, training={"steps": 2}, hooks={"modules": ["tests.own.watching"]})
    (calls,) = pools[1].run(f"{__name__}:followed", config=config)
    assert calls == ["after_building True", "before_step 1", "after_step 1", "before_step 2", "after_step 2"]


def with_noise(config: Config) -> tuple[set[str], set[str]]:
    """Which parameters have a gradient where `verify` trains, and where it measures rounding."""
    recorded = record_of_verify(torch.device("cpu"), config, {}, True)
    return {*recorded.gradients}, {*(recorded.noise or {})}


def test_verify_measures_rounding_of_the_model_that_hooks_have_changed(pools):
    model, hooks = {"name": "llama3", "flavor": "debug"}, {"modules": ["tests.own.freezing"]}
    config = config_of(ONE, training={"steps": 1}, model=model, hooks=hooks)
    ((trained, measured),) = pools[1].run(f"{__name__}:with_noise", config=config)
    assert trained == measured and "embed.weight" not in trained


# ------------------------------------------------------------------------------------------------------------ refusals


HOOK, METRIC = {"hooks": ["own_code"]}, "def f(model, microbatches, rows=1): pass\n"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no hook": ("def report(step): pass\n", HOOK, "has none of the functions after_building, .*own_code.py"),
    "another misspelt hook": ("\ndef before_steps(step): pass\n", HOOK, "before_steps is no hook; did you mean before_step"),
    "a misspelt hook": ("\ndef after_steps(step): pass\n", HOOK, "after_steps is no hook; did you mean after_step.*line 2"),
    "other arguments of a hook": ("def at_save(step): pass\n", HOOK, "at_save must take step, folder: too many .*, line 1"),
    "a misspelt option": (METRIC, {"metrics": {"extra_options": {"f": {"row": 1}}}}, "extra_options.f.row: .* did you mean"),
    "options of nothing": (METRIC, {"metrics": {"extra_options": {"g": {}}}}, "extra_options.g: "),
    "two of one name": (
        "def mean_square(model, microbatches): pass\n",
        {"metrics": {"extra": ["tests.own.parts:mean_square", "own_code:mean_square"]}},
        'two functions have the name "mean_square"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_hooks_and_metrics_are_refused_before_the_start(case, own_module):
    text, keys, words = REFUSED[case]
    own_module(text)
    metrics = {"extra": ["own_code:f"], **keys["metrics"]} if "metrics" in keys else {}
    with pytest.raises(UserError, match=f"^(hooks|metrics).*{words}"):
        faults(with_own_code(metrics, keys.get("hooks")))


RESULTS = {
    "raises": ("return 1 / 0", r"fails \(.*own_code.py, line 2\): ZeroDivisionError"),
    "a triple": ("return {'loss': (1, 2, 3)}", r"returns .*; must be .*line 1\)"),
}


def values_of(metrics: dict[str, Any], hooks: list[str]) -> dict[str, float | None]:
    """What metrics and hooks add to a report."""
    config = with_own_code(metrics, hooks)
    model = build_model(family_of(config.model), config, mesh_of(ONE), CPU)
    part = first_microbatch(config, mesh_of(ONE))
    batch = Batch(*(None if each is None else each[None] for each in part))
    return OwnCode(config).values(1, {"loss": 1.0}, model, batch)


@pytest.mark.parametrize("name", RESULTS)
def test_a_wrong_result_is_one_message_with_file_and_line(name, own_module, group_of_one):
    text, words = RESULTS[name]
    own_module(f"def f(model, microbatches):\n    {text}\n")
    with pytest.raises(UserError, match=f'^metrics.extra = "own_code:f": {words}'):
        values_of({"extra": ["own_code:f"]}, ["tests.own.watching"])


def test_a_hook_gets_the_numbers_that_were_added_before_it(own_module, group_of_one):
    """A hook that sends reports to Weights & Biases sent them without those of metrics.extra."""
    own_module(
        "def f(model, microbatches):\n    return {'a': 1.0}\n\n\ndef at_report(step, values):\n    return {'a': len(values)}\n"
    )
    hooks = ["tests.own.watching", "own_code"]
    with pytest.raises(UserError, match=r'^hooks\.modules = "own_code": at_report: returns "a", as another function does'):
        values_of({"extra": ["own_code:f"]}, hooks)
    own_module("def at_report(step, values):\n    return {'b': len(values), 'c': values['extra/mean_square/embed.weight']}\n")
    values = values_of({"extra": ["tests.own.parts:mean_square"]}, hooks)
    assert values["extra/b"] == len(values) - 1 and values["extra/c"] == values["extra/mean_square/embed.weight"] > 0


def test_a_hook_that_raises_ends_the_run_with_its_line(own_module):
    own_module("\ndef after_step(step, model, optimizer):\n    raise KeyError(step)\n")
    with pytest.raises(
        UserError, match=r'^hooks.modules = "own_code": after_step: fails \(.*own_code.py, line 3\): KeyError\(7\)'
    ):
        OwnCode(with_own_code(hooks=["own_code"])).call("after_step", 7, None, None)


def test_hooks_that_a_module_imports_or_makes_are_called(own_module):
    own_module(
        "from functools import partial\n\nfrom tests.own.watching import CALLS, at_save\n\n\n"
        "def record(calls, step, model, optimizer):\n    calls.append(f'after_step {step}')\n\n\n"
        "after_step = partial(record, CALLS)\n"
    )
    code = OwnCode(with_own_code(hooks=["own_code"]))
    watching.CALLS.clear()
    code.call("at_save", 2, Path("step-00000002"))
    code.call("after_step", 7, None, None)
    assert watching.CALLS == ["at_save 2 step-00000002", "after_step 7"]


# ------------------------------------------------------------------------------------------------------ code of the run


def test_hooks_belong_to_the_code_of_a_run_and_metrics_only_to_its_provenance():
    config = with_own_code({"extra": ["tests.own.parts:mean_square"]}, ["tests.own.watching"])
    assert "tests.own.watching" in source_of_parts(config)
    assert "tests.own.parts" not in source_of_parts(config)
    assert {"tests.own.parts", "tests.own.watching"} <= source_of_parts(config, reports=True).keys()
    with pytest.raises(UserError, match=r"no code that a file names is run; .* --own tests.own.watching"):
        check_trust(config, Path("run"), [])
    check_trust(config, Path("run"), ["tests.own.watching"])


def test_a_resume_with_other_hooks_is_refused(pools, tmp_path):
    run(pools, ONE, tmp_path, 2)
    with pytest.raises(WorkerFailure, match=r"hooks.modules = \['tests.own.watching'\], was \[\]"):
        run(pools, ONE, tmp_path, 4, hooks={"modules": ["tests.own.watching"]})
