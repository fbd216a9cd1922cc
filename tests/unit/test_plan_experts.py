"""Predictions with experts that are split over ranks: what the exchange of rows sends, computes and holds, from shapes."""

import json
import random

import pytest

from tests.repetitions import slow_but
from tests.tiny_moe import FLAVORS
from tests.traffic_cases import Case
from titanlite.ground.errors import UserError
from titanlite.plan import experts
from titanlite.plan.experts import Routing, on_busiest_rank
from titanlite.plan.predict import Prediction, predict
from titanlite.plan.record import Traffic
from titanlite.plan.trace import RecordedLayer, Trace, check_trace, read_trace, spread
from titanlite.registry.family import family_of
from titanlite.transforms.meta import on_meta

SHAPE = FLAVORS["plain"]
LAYERS, ROW = SHAPE.n_layers, SHAPE.dim * 4  # bytes


def case(degrees: dict[str, int], reduced: str = "none", factor: float = 1.5, flavor: str = "plain", **keys: object) -> Case:
    others = {"moe": {"max_tokens_factor": factor}} if degrees.get("ep", 1) > 1 else {}
    mesh = {name: degree for name, degree in degrees.items() if name != "ep"}
    split = {"expert_parallel_degree": degrees.get("ep", 1), **keys}
    return Case(mesh, flavor, 2 if keys else 1, reduced, name="tests.tiny_moe", parallelism=split, others=others)


def predicted(each: Case, routing: Routing = "balanced") -> Prediction:
    return predict(each.config(), each.ranks, "cpu", routing)


def exchanged(prediction: Prediction) -> dict[str, Traffic]:
    traffic = prediction.work.traffic.items()
    assert all(each.kind == "all-to-all" for each, _ in traffic if each.sender.startswith("experts"))
    return {each.sender.removeprefix("experts: "): numbers for each, numbers in traffic if each.sender.startswith("experts")}


def test_a_step_exchanges_counts_rows_and_gradients_there_and_back_in_every_layer():
    """On 2 ranks, each with 128 tokens that use 2 experts: half of the rows leave."""
    rows = 256 * ROW
    assert exchanged(predicted(case({"dp_shard": 2, "ep": 2}))) == {
        "counts of rows": (LAYERS, LAYERS * 128, LAYERS * 64),
        "rows": (LAYERS, LAYERS * rows, LAYERS * rows // 2),
        "results": (LAYERS, LAYERS * rows, LAYERS * rows // 2),
        "gradients of results": (LAYERS, LAYERS * rows, LAYERS * rows // 2),
        "gradients of rows": (LAYERS, LAYERS * rows, LAYERS * rows // 2),
    }


def test_additional_chunks_are_sent_again_in_the_backward_pass():
    """128 of 256 rows fit a round."""
    found = exchanged(predicted(case({"dp_shard": 2, "ep": 2}, factor=0.5)))
    assert {what: traffic.calls for what, traffic in found.items() if what != "counts of rows"} == {
        "rows": 2 * LAYERS,
        "results": 2 * LAYERS,
        "gradients of results": 2 * LAYERS,
        "gradients of rows": 2 * LAYERS,
        "rows of additional chunks": LAYERS,
    }
    assert found["rows"].size == 2 * found["rows of additional chunks"].size == LAYERS * 256 * ROW


def test_with_the_worst_routing_rank_0_keeps_its_rows_and_returns_those_of_all_others():
    found = exchanged(predicted(case({"dp_shard": 2, "ep": 2}), "worst"))
    assert found["rows"] == (2 * LAYERS, LAYERS * 256 * ROW, 0)
    assert found["results"] == found["gradients of rows"] == (2 * LAYERS, LAYERS * 512 * ROW, LAYERS * 256 * ROW)


@pytest.mark.parametrize("reduced", slow_but(["none"], ["none", "full"]))
def test_memory_has_room_for_any_routing(monkeypatch, reduced):
    """One of two layers runs at a time, and its exchange is the worst moment or near it."""
    mesh = {"dp_shard": 2, "ep": 2}
    found = {factor: predicted(case(mesh, reduced, factor)).memory for factor in (0.5, 1.0, 2.0)}
    assert found[0.5].total < found[1.0].total
    if reduced == "none":  # the rows and both products with them
        values = 256 * (SHAPE.dim + 2 * SHAPE.expert_dim) * 4
        assert found[2.0].activations - found[1.0].activations == LAYERS * values
    monkeypatch.setattr(experts, "temporary_bytes", lambda *_: 0)
    without = predicted(case(mesh, reduced, 1.0)).memory
    assert without.activations == found[1.0].activations and without.working < found[1.0].working


def test_a_recorded_step_computes_what_its_busiest_rank_computes_in_each_layer():
    """Shares of 12/16 in the first layer and of 10/16 in the second, on one rank and then on the other."""
    counts = [[4, 4, 2, 2, 1, 1, 1, 1], [2, 2, 1, 1, 5, 2, 2, 1]]
    trace = Trace(step=3, mixtures=[RecordedLayer(top_k=2, counts=each) for each in counts])
    mesh = {"dp_shard": 2, "ep": 2}
    balanced, recorded = predicted(case(mesh, factor=2.0)), predicted(case(mesh, factor=2.0), trace)
    row = 2 * SHAPE.dim * SHAPE.expert_dim  # one product
    more = (512 * 12 // 16 - 256) + (512 * 10 // 16 - 256)
    assert recorded.work.flops == balanced.work.flops + 9 * more * row
    received = (512 * 12 // 16 + 512 * 10 // 16) * ROW
    assert exchanged(recorded)["results"] == exchanged(recorded)["gradients of rows"] == (LAYERS, received, received // 2)
    stays = (256 * 12 // 16 + 256 * 10 // 16) * ROW
    assert exchanged(recorded)["rows"] == (LAYERS, LAYERS * 256 * ROW, LAYERS * 256 * ROW - stays)
    assert recorded.memory == balanced.memory


def test_rows_of_additional_chunks_are_those_of_a_rank_that_counts_them_one_by_one():
    """A receiver takes its rows by expert and then by sender, whether or not a round ends inside of an expert."""
    generator = random.Random(0)
    for _ in range(60):
        ranks, experts, rows = generator.choice([1, 2, 4]), generator.choice([1, 3]), generator.randint(1, 12)
        shares = [generator.choice([0, 1, 5]) for _ in range(ranks * experts)]
        shares[generator.randrange(len(shares))] += 1
        capacity = generator.randint(1, 2 * rows)
        by_expert = [expert for expert, count in enumerate(spread(shares, rows * ranks)) for _ in range(count)]
        all_rows = sorted((expert, row % ranks) for row, expert in enumerate(by_expert))
        received = [[(expert, sender) for expert, sender in all_rows if expert // experts == rank] for rank in range(ranks)]
        busiest = max(range(ranks), key=lambda rank: len(received[rank]))
        mine = [[sender == busiest for _, sender in of_rank] for of_rank in received]
        assert on_busiest_rank(tuple(shares), rows, ranks, capacity) == (
            len(received[busiest]),
            (rows, sum(mine[busiest])),
            (sum(sum(each[capacity:]) for each in mine), sum(mine[busiest][capacity:])),
        )


def test_a_trace_of_another_model_is_refused_with_what_differs(tmp_path):
    config = case({"dp_shard": 2, "ep": 2}).config()
    model, path = on_meta(family_of(config.model), config), tmp_path / "routing.json"

    def refusal(*mixtures: dict[str, object]) -> str:
        path.write_text(json.dumps({"step": 1, "mixtures": mixtures}))
        with pytest.raises(UserError) as caught:
            check_trace(read_trace(tmp_path), path, model)
        return str(caught.value)

    right = {"top_k": 2, "counts": [1] * 8}
    assert "has 1 MoE layers, the model 2" in refusal(right)
    assert "MoE layer 1: 4 experts and top_k = 2, in the model 8 and 2" in refusal(right, {"top_k": 2, "counts": [1] * 4})
    assert "MoE layer 0: 8 experts and top_k = 3, in the model 8 and 2" in refusal({**right, "top_k": 3}, right)
