"""titanlite check-model: a correct model passes every check, and the table names what is broken in a fork."""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models import llama3
from tests import tiny
from tests.distributed.pool import Pool
from titanlite.config.read import Faults
from titanlite.config.schema import Config, Model
from titanlite.ground.errors import UserError
from titanlite.launch.local_ranks import describe_error
from titanlite.loop.checks import check
from titanlite.registry.family import Family, load_module
from titanlite.tools import check_model
from titanlite.verify import facts, small_runs, whole_runs
from titanlite.verify import table as rows_module
from titanlite.verify.small_runs import Trained, damage, train_small
from titanlite.verify.table import (
    BEHAVIOR,
    BUFFERS,
    COMPILED,
    DIVIDES,
    EVERY_MESH,
    FLOPS,
    GENERATE,
    HUGGING_FACE,
    MESHES,
    RECOMPUTED,
    ROWS,
    TRAINED,
    Row,
    choose_small,
    rows_of,
)

ROOT = Path(__file__).parents[2]
FORKS = ROOT / "tests" / "forks"
TRAINING = [row for row in ROWS[ROWS.index(TRAINED) :] if row not in {*EVERY_MESH} - {*MESHES}]


def call(called: str, arguments: tuple) -> object:
    """On a rank of a pool: a function for which the command would start ranks. An error is returned as in the command."""
    torch._dynamo.reset()
    try:
        return (getattr(small_runs, called, None) or getattr(whole_runs, called))(torch.device("cpu"), *arguments)
    except Exception as error:
        return UserError(describe_error(error))


@pytest.fixture
def pooled(pools: dict[int, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a pool instead of new ones."""

    def on_ranks(count, function, *arguments, **_options):
        answers = pools[count].run(f"{__name__}:call", called=function.__name__, arguments=arguments)
        if fault := next((answer for answer in answers if isinstance(answer, UserError)), None):
            raise fault
        return answers[0]

    monkeypatch.setattr(rows_module, "on_ranks", on_ranks)


def table(name: str, *selected: str) -> dict[str, Row]:
    """These rows of a fork, or all, and the rows on which they depend, if these fail."""
    rows = {row.name: row for row in rows_of(name, load_module(name), ["plain"], "plain", selected=selected)}
    for row in rows.values():
        print(row)
    return rows


def failed(rows: dict[str, Row]) -> dict[str, list[str]]:
    return {row.name: row.texts for row in rows.values() if row.verdict == "FAILED"}


def not_run(rows: dict[str, Row]) -> list[str]:
    return [row.name for row in rows.values() if row.verdict == "not run" and row.name != HUGGING_FACE]


def line_of(fork: str, code: str) -> str:
    path = FORKS / f"{fork}.py"
    return f"{path}, line {1 + path.read_text().splitlines().index(code)}"


# ------------------------------------------------------------------------------------------------------- broken forks


@pytest.mark.parametrize(
    ("fork", "table_", "module"),
    [("missing_entry", "sharding", "layers.*.ffn_norm"), ("uninitialized", "initial", "layers.*.attention.wv.weight")],
)
def test_entries_that_a_table_lacks_are_named_and_nothing_is_trained(pooled, fork, table_, module):
    rows = table(f"tests.forks.{fork}")
    assert failed(rows) == {table_: [f"{table_}: no pattern matches {module}"]}
    assert not_run(rows) == TRAINING
    assert rows["compile"].texts == [f"needs {table_}"]


def test_values_that_a_constructor_sets_and_initial_overrides_are_named_and_equal_ones_are_not():
    rows = table("tests.forks.lost_values", *ROWS[: ROWS.index(TRAINED)])
    assert list(failed(rows)) == ["constructor"] and not_run(rows) == []
    names = [text.partition(":")[0] for text in rows["constructor"].texts]
    assert sorted(names) == ["decay", "layers.*.ffn.w2.weight", "offsets", "rates"]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "tests.tiny_biased"])
def test_values_that_pytorch_modules_set_are_no_fault_of_a_constructor(name):
    module = load_module(name)
    assert facts.constructor_faults(Family(module, next(iter(module.FLAVORS.values())))) == []


def test_parameters_that_only_the_last_pattern_matches_are_listed():
    row = table("tests.tiny", "initial")["initial"]
    assert row.verdict == "passed"
    assert row.texts[0].startswith('"*" gives Normal(') and row.texts[0].endswith("layers.*.ffn.w3.weight, head.output.weight")


def test_a_graph_break_is_reported_with_its_line(pooled):
    rows = table("tests.forks.graph_break", COMPILED)
    assert list(failed(rows)) == ["compile"]
    assert rows["compile"].texts[0].startswith(line_of("graph_break", "        if x.abs().max() > 1e4:"))


def test_a_layer_with_heads_that_two_ranks_cannot_share_is_named_and_refused_and_meshes_without_tensor_parallelism_pass(pooled):
    text = "n_kv_heads = 1 in layers.1.attention"
    rows = table("tests.forks.one_narrow_layer", DIVIDES, FLOPS, "2 x 2", "tp 2", "replicate 2")
    assert failed(rows) == {DIVIDES: [f"2 ranks of tensor parallelism cannot share {text}"]}
    assert not_run(rows) == ["2 x 2", "tp 2"] and rows["replicate 2"].verdict == "passed"
    keys = {"model": {"name": "tests.forks.one_narrow_layer", "flavor": "plain"}, "parallelism": {"tensor_parallel_degree": 2}}
    with pytest.raises(Faults, match=f"parallelism.tensor_parallel_degree = 2: does not divide {text} of "):
        check(Config.model_validate(keys), "run.toml", 2)


def test_of_flavors_that_the_command_does_not_name_only_the_trained_one_must_divide(monkeypatch):
    odd = dataclasses.replace(tiny.FLAVORS["tied"], n_kv_heads=1)
    monkeypatch.setitem(tiny.FLAVORS, "odd", odd)
    for flavors, verdict in ((["plain", "odd"], "passed"), (["odd"], "FAILED")):
        rows = rows_of("tests.tiny", tiny, flavors, "plain")
        assert next(row for row in rows if row.name == "tp 2 divides").verdict == verdict


def test_wrong_flops_are_reported_with_the_function_and_the_counted_flops():
    rows = table("tests.forks.wrong_flops", FLOPS)
    text = rows["FLOPs"].texts[0]
    assert line_of("wrong_flops", "def flops(config: Config, seq_len: int) -> Flops:") in text
    said, counted = (int(number.replace(",", "")) for number in re.findall(r"(?:says|counts) ([\d,]+\d)", text))
    assert counted - said == 6 * 2 * 64 * 96  # what the fork omits: layers, dim, ffn_dim


def test_flops_that_a_head_adds_only_to_the_loss_are_counted():
    (text,) = table("tests.forks.two_predictions", FLOPS)[FLOPS].texts
    said, counted, of_head = (int(n.replace(",", "")) for n in re.findall(r"(?:says|counts|head) ([\d,]+\d)", text))
    added = 6 * (64 * 64 + 64 * 512)  # a matrix, and a second set of logits
    assert counted - said == added and of_head == added + 6 * 64 * 512


def test_a_tensor_that_the_map_drops_is_named():
    rows = table("tests.forks.dropped_tensor", HUGGING_FACE)
    assert failed(rows) == {HUGGING_FACE: ["HF has no name for layers.*.ffn.w3.weight"]}


def test_a_wrong_style_of_the_right_shape_is_reported_by_the_parameter_with_a_wrong_gradient(pooled):
    rows = table("tests.forks.wrong_style", "tp 2", "shard 2", "context 2")
    assert list(failed(rows)) == ["tp 2"] and rows["shard 2"].verdict == "passed"
    assert re.search(r"gradient of layers\.\d\.attention\.head_scale\.weight differs by", rows["tp 2"].texts[0])
    assert "not use AttentionCore.core" in rows["context 2"].texts[0]  # the fork has a core of its own


# ------------------------------------------------------------------------------------------------------ a selection of rows


def test_selected_rows_are_those_of_the_whole_table_and_run_what_they_need_alone(pooled, monkeypatch, capsys):
    started = []
    on_ranks = rows_module.on_ranks
    monkeypatch.setattr(rows_module, "on_ranks", lambda *words, **more: started.append(words[3:5]) or on_ranks(*words, **more))
    assert command(monkeypatch, "tests.tiny:plain", "--rows", "Causality,tp2") == 0
    out = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line)[:2] for line in out[1:-2]] == [["causality", "passed"], ["tp 2", "passed"]]
    assert started == [({}, {}), ({}, {"tp": 2})]
    assert command(monkeypatch, "tests.tiny:plain", "--rows", "flops,generate,documents") == 0
    assert len(started) == 2, "nothing to train"


def test_a_row_that_a_selected_one_needs_is_shown_where_it_fails(pooled):
    rows = table("tests.forks.nonfinite", "tp 2")
    assert failed(rows) == {TRAINED: ["the result of layers.0.ffn is not finite"]}
    assert rows["tp 2"].texts == [f"needs {TRAINED}"]


def test_rows_beyond_a_familys_limits_are_neither_run_nor_failed(pooled, monkeypatch):
    monkeypatch.setattr(tiny, "LIMITS", {"generates": False, "stages": False, "tensor_parallel": 1}, raising=False)
    rows = table("tests.tiny", DIVIDES, *BEHAVIOR, "2 x 2", "tp 2", "pipeline 2", "replicate 2")
    declared = [row.name for row in rows.values() if row.verdict == "declared"]
    assert failed(rows) == {} and not_run(rows) == []
    assert declared == [DIVIDES, GENERATE, "2 x 2", "tp 2", "pipeline 2"]
    assert all(rows[name].texts[0].startswith('declares LIMITS["') for name in declared)


# ------------------------------------------------------------------------------------------------------------- other faults


def test_a_recompilation_is_reported_with_its_cause(pooled):
    (texts,) = failed(table("tests.forks.recompiling", COMPILED)).values()
    assert any("self.phase == 'step " in text and "recompiling.py:" in text for text in texts)


def test_an_error_in_the_forward_pass_is_reported_with_its_line_and_meshes_are_not_tried(pooled):
    rows = table("tests.forks.raising")
    place = line_of("raising", "        return hidden + hidden[:, :3]")
    assert failed(rows).keys() == {"FLOPs", "loss and gradients"}
    assert all(texts[0].startswith(f"{place}: RuntimeError") for texts in failed(rows).values())
    assert not_run(rows) == TRAINING[1:]


def trained(pools: dict[int, Pool], name: str, flavor: str, *more: object, ranks: int = 1) -> Trained:
    arguments = (Model(name=name, flavor=flavor), *more)
    return pools[ranks].run(f"{__name__}:call", called=train_small.__name__, arguments=arguments)[0]


def test_a_parameter_that_no_gradient_reaches_is_named_and_a_frozen_one_is_not(pools):
    found = trained(pools, "tests.tiny_odd", "unused", {}, {})
    assert found.faults == ["no gradient reaches layers.*.spare.weight: not used in the forward pass?"]
    assert trained(pools, "tests.tiny_odd", "frozen", {}, {}).faults == []


def test_gradients_that_recomputation_changes_are_named(pooled):
    texts = table("tests.forks.counting", RECOMPUTED)[RECOMPUTED].texts
    names = [f"recomputed {name}" for name in ("full", "in parts", "by operation")]
    assert list(dict.fromkeys(text.partition(":")[0] for text in texts)) == names
    assert all("the gradient of layers." in text for text in texts if not text.endswith("follow from these"))


def test_a_feed_forward_layer_that_mixes_tokens_differs_if_computed_in_parts(pooled):
    texts = table("tests.forks.token_shift", RECOMPUTED)[RECOMPUTED].texts
    assert texts and all(text.startswith("recomputed in parts: ") for text in texts)


def test_a_feed_forward_layer_that_runs_do_not_compute_in_parts_is_not_compared_so(pooled, monkeypatch):
    monkeypatch.setattr(rows_module, "unchunkable", lambda model: "its feed-forward layers are others")
    assert table("tests.forks.token_shift", RECOMPUTED)[RECOMPUTED].verdict == "passed"


def test_state_that_a_checkpoint_does_not_restore_is_named(pools, tmp_path):
    one = trained(pools, "tests.tiny", "tied", {}, {}, tmp_path / "saves")
    assert not one.faults
    assert all(weight.std() > 0.005 for weight in one.trajectory.weights.values())  # gains of 1 as well
    split = trained(pools, "tests.tiny", "tied", {}, {"dp_shard": 2}, tmp_path / "saves", 1, ranks=2)
    assert damage(split, one.stored) == []
    stored = {**one.stored, "optimizer.embed.weight.exp_avg": "something else"}
    assert damage(split, stored) == ["optimizer.embed.weight.exp_avg is not what was saved"]
    (tmp_path / "saves" / "step-00000001" / "manifest.json").unlink()
    again = trained(pools, "tests.tiny", "tied", {}, {"dp_shard": 2}, tmp_path / "saves", 1, ranks=2)
    assert "manifest.json: is missing" in str(again)


def test_buffers_that_change_differently_on_a_mesh_or_by_recomputation_or_that_checkpoints_lack_are_named(pooled, monkeypatch):
    monkeypatch.setattr(rows_module, "meshes_of", lambda _: ("tp 2", "shard 2"))
    monkeypatch.setattr(rows_module, "RECOMPUTATION", {"full": {"mode": "full"}})
    rows = table("tests.forks.local_buffers", BUFFERS)
    assert list(failed(rows)) == [BUFFERS]
    first, *others = (text.partition("; ")[0] for text in rows[BUFFERS].texts)
    assert first.startswith("spread changes in training, and is not in checkpoints: ")
    named: dict[str, list[str]] = {}
    for where, _, what in (text.partition(": ") for text in others):
        named.setdefault(where, []).append(what.split()[0])
    assert named == {
        "recomputed full": ["layers.*.calls"],
        "on tp 2": ["spread", "layers.*.calls"],
        "on shard 2": ["spread", "tokens", "layers.*.calls"],
    }


def test_dropout_is_no_difference_between_meshes(pooled):
    rows = table("tests.tiny_dropout", "tp 2", "pipeline 2")
    assert failed(rows) == {} and not_run(rows) == ["pipeline 2"]


# ------------------------------------------------------------------------------------------------------------ the command


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["titanlite check-model", *words])
    with pytest.raises(SystemExit) as ended:
        check_model.main()
    return ended.value.code


def test_a_failed_row_is_an_exit_code_of_1(monkeypatch, capsys):
    assert command(monkeypatch, "tests.forks.missing_entry:tied") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "tests.forks.missing_entry: tied on meta; tied trained"
    assert out[-1] == "1 of 24 checks failed"


def test_overrides_reach_the_flavors_on_meta_and_the_one_that_is_trained(monkeypatch, capsys):
    trained_models = []

    def on_ranks(_count, _function, model, *_more, **_options):
        trained_models.append(model)
        raise UserError("enough")

    monkeypatch.setattr(rows_module, "on_ranks", on_ranks)
    words = ("--model.overrides.n_layers", "3", "--model.overrides.n_heads=6", "--model.overrides.n_kv_heads", "3")
    assert command(monkeypatch, "tests.tiny:tied", *words, "--rows", "tp2divides,lossandgradients") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "tests.tiny: tied with n_layers = 3, n_heads = 6, n_kv_heads = 3 on meta; tied trained"
    assert any("2 ranks of tensor parallelism cannot share n_kv_heads = 3" in line for line in out)
    assert {model.title for model in trained_models} == {"tests.tiny tied with n_layers = 3, n_heads = 6, n_kv_heads = 3"}


@pytest.mark.parametrize("code", ["raise RuntimeError('no')", "def f(:", "FLAVORS = {}", "import nothing_of_the_kind"])
def test_a_module_that_cannot_be_imported_or_lacks_a_part_is_a_failed_row(monkeypatch, capsys, tmp_path, code):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / f"fork_{abs(hash(code))}"
    folder.mkdir()
    (folder / "model.py").write_text(code)
    assert command(monkeypatch, f"{folder.name}.model") == 1
    assert "imported             FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["lama3"], "there is no module models.lama3"),
        (["tests.tiny:huge"], "has the flavors plain, tied"),
        (["tests.tiny", "--training.steps", "-3", "--flavor", "x"], r"--training\.steps, --flavor: .*--coordinates, --output"),
        # a value that begins with a dash belongs to its option
        (["tests.tiny", "--model.overrides.dim", "-1"], r"overrides\.dim = -1: must be greater than 0"),
        (["tests.tiny", "--model.overrides.rope_theta", "-1e-3"], r"overrides\.rope_theta = -0\.001: must be greater than 0"),
        (
            ["llama3", "--model.overrides.mup_base_dim", "64"],
            r"mup_base_dim needs tied_embeddings = false.*\n.*1b, 3b; .*: llama3:debug, .*llama3:8b",
        ),
        (["llama3:1b", "--coordinates", "--model.overrides.mup_base_dim", "64"], "mup_base_dim needs tied_embeddings = false"),
        (["tests.tiny", "--rows", "casuality"], "there is no row 'casuality'; did you mean causality"),
    ],
)
def test_a_command_that_names_nothing_to_check_is_a_user_error(monkeypatch, words, fault):
    with pytest.raises(UserError, match=fault):
        command(monkeypatch, *words)


def test_a_flavor_is_found_as_model_flavor_finds_it_and_a_small_one_is_trained_at_other_widths(monkeypatch, capsys):
    """The 8b flavor trained at twice its width, 28 billion parameters, until the kernel ended it."""

    def measured(family):
        assert family.config == dataclasses.replace(llama3.FLAVORS["debug"], mup_base_dim=64)
        raise UserError("enough")

    monkeypatch.setattr(check_model, "measure", measured)
    with pytest.raises(UserError, match="enough"):
        command(monkeypatch, "llama3:8B", "--coordinates", "--model.overrides.mup_base_dim", "64")
    assert capsys.readouterr().out == "llama3 debug with mup_base_dim = 64 trained at four widths\n"


def test_the_named_flavor_or_debug_or_the_smallest_is_trained():
    assert choose_small("x", llama3, ["debug"]) == choose_small("x", llama3, ["8b"]) == "debug"
    assert choose_small("x", llama3, list(llama3.FLAVORS)) == "debug"
    assert choose_small("x", tiny, ["large"]) == "large"
    assert choose_small("x", tiny, list(tiny.FLAVORS)) in ("plain", "tied", "scaled")
    large = SimpleNamespace(**{**vars(tiny), "FLAVORS": {"1b": llama3.FLAVORS["1b"]}})
    with pytest.raises(UserError, match="smallest flavor, 1b, has 1,235,814,400 parameters"):
        choose_small("x", large, ["1b"])
