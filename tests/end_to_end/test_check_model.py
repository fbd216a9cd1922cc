"""titanlite check-model: a sound model passes every check, and of a broken fork the table names what is broken."""

import re
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from titanlite.errors import UserError
from titanlite.tools import check_model, model_runs
from titanlite.tools.check_model import ALONE, CHECKPOINT, MESHES, Row, rows_of
from titanlite.zoo import load_module

ROOT = Path(__file__).parents[2]
FORKS = ROOT / "tests" / "forks"
TRAINING = [*ALONE, *MESHES, CHECKPOINT]


def call(called: str, arguments: tuple) -> object:
    """On a rank of a pool: a function that the command would start ranks for. A fault of the user's is handed back."""
    torch._dynamo.reset()
    try:
        return getattr(model_runs, called)(torch.device("cpu"), *arguments)
    except UserError as error:
        return error


@pytest.fixture
def pooled(pools: dict[int, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are there already in place of new ones."""

    def on_ranks(count, function, *arguments, **_options):
        answers = pools[count].run(f"{__name__}:call", called=function.__name__, arguments=arguments)
        if fault := next((answer for answer in answers if isinstance(answer, UserError)), None):
            raise fault
        return answers[0]

    monkeypatch.setattr(check_model, "on_ranks", on_ranks)


def table(name: str, until: str = "") -> dict[str, Row]:
    """The rows of a fork; nothing is done for the row `until` and those after it."""
    rows: dict[str, Row] = {}
    for row in rows_of(name, load_module(name), ["plain"], "plain"):
        if row.name == until:
            break
        rows[row.name] = row
    for row in rows.values():
        print(row)
    return rows


def failed(rows: dict[str, Row]) -> dict[str, list[str]]:
    return {row.name: row.texts for row in rows.values() if row.verdict == "FAILED"}


def not_run(rows: dict[str, Row]) -> list[str]:
    return [row.name for row in rows.values() if row.verdict == "not run" and row.name != "Hugging Face"]


def line_of(fork: str, code: str) -> str:
    path = FORKS / f"{fork}.py"
    return f"{path}, line {1 + path.read_text().splitlines().index(code)}"


# ------------------------------------------------------------------------------------------------------- eight broken forks


def test_a_missing_entry_of_the_sharding_table_is_named_and_nothing_is_trained(pooled):
    rows = table("tests.forks.missing_entry")
    assert failed(rows) == {"sharding": ["sharding: no pattern matches layers.*.ffn_norm"]}
    assert not_run(rows) == TRAINING
    assert rows["compile"].texts == ["needs sharding"]


def test_an_uninitialised_parameter_is_named_and_nothing_is_trained(pooled):
    rows = table("tests.forks.uninitialised")
    assert failed(rows) == {"initial": ["initial: no pattern matches layers.*.attention.wv.weight"]}
    assert not_run(rows) == TRAINING


def test_buffers_that_a_constructor_computes_are_named_and_constant_ones_are_not(pooled):
    rows = table("tests.forks.lost_buffer", until=TRAINING[0])
    assert list(failed(rows)) == ["buffers"]
    assert [text.partition(":")[0] for text in rows["buffers"].texts] == ["slopes", "offsets"]
    assert not_run(rows) == []


def test_a_graph_break_is_told_with_the_line(pooled):
    rows = table("tests.forks.graph_break")
    assert list(failed(rows)) == ["compile"]
    assert rows["compile"].texts[0].startswith(line_of("graph_break", "        if x.abs().max() > 1e4:"))
    assert not_run(rows) == []


def test_heads_that_two_ranks_cannot_share_are_named_and_only_meshes_with_tensor_parallelism_left_out(pooled):
    rows = table("tests.forks.undivided_heads")
    assert failed(rows) == {"tp 2 divides": ["2 ranks of tensor parallelism cannot share n_heads = 3, n_kv_heads = 3"]}
    assert not_run(rows) == ["2 x 2", "tp 2"]
    assert rows[CHECKPOINT].texts == ["one process -> shard 2"]


def test_wrong_flops_are_told_with_the_function_and_with_what_is_counted(pooled):
    rows = table("tests.forks.wrong_flops", until=TRAINING[0])
    assert list(failed(rows)) == ["FLOPs"]
    text = rows["FLOPs"].texts[0]
    assert line_of("wrong_flops", "def flops(config: Config, seq_len: int) -> Flops:") in text
    said, counted = (int(number.replace(",", "")) for number in re.findall(r"(?:says|counts) ([\d,]+\d)", text))
    assert counted - said == 6 * 2 * 64 * 96  # what the fork has left out: layers, dim, ffn_dim
    assert not_run(rows) == []


def test_a_tensor_that_the_map_drops_is_named(pooled):
    rows = table("tests.forks.dropped_tensor", until=TRAINING[0])
    assert failed(rows) == {"Hugging Face names": ["HF has no name for layers.*.ffn.w3.weight"]}
    assert not_run(rows) == ["Hugging Face logits"]


def test_a_wrong_style_of_the_right_shape_is_told_by_the_parameter_whose_gradient_is_wrong(pooled):
    rows = table("tests.forks.wrong_style")
    assert list(failed(rows)) == ["2 x 2", "tp 2"]
    for mesh in ("2 x 2", "tp 2"):
        assert re.search(r"gradient of layers\.\d\.attention\.head_scale\.weight differs most", rows[mesh].texts[0])
    assert rows["shard 2"].verdict == "passed"
    assert rows[CHECKPOINT].texts == ["one process -> 2 x 2 -> tp 2 -> shard 2"]


# ------------------------------------------------------------------------------------------------------------- other faults


def test_a_recompilation_is_told_with_its_cause(pooled):
    rows = table("tests.forks.recompiling")
    assert list(failed(rows)) == ["compile"]
    assert all("self.phase == 'step " in text and "recompiling.py:" in text for text in rows["compile"].texts)


def test_an_error_of_the_forward_pass_is_told_with_the_line_and_meshes_are_not_tried(pooled):
    rows = table("tests.forks.raising")
    place = line_of("raising", "        return hidden + hidden[:, :3]")
    assert failed(rows).keys() == {"FLOPs", "loss and gradients"}
    assert all(texts[0].startswith(f"{place}: RuntimeError") for texts in failed(rows).values())
    assert not_run(rows) == TRAINING[1:]
