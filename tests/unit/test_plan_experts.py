"""Predictions with experts that are split over ranks: traffic, FLOPs and memory of dispatch and combine, from shapes."""

import pytest
import torch

from models.all_to_all import Layout, chunks
from tests.repetitions import slow_but
from tests.tiny_moe import FLAVORS
from tests.traffic_cases import Case
from tests.unit.test_exchange import counts_of
from titanlite.plan import experts
from titanlite.plan.experts import Load, Passed, Routing, on_rank_0
from titanlite.plan.predict import Prediction, predict
from titanlite.plan.record import Traffic
from titanlite.plan.report import traffic_table

SHAPE = FLAVORS["plain"]  # 8 experts, of which a token uses 2
LAYERS, ROW, COPIES = SHAPE.n_layers, SHAPE.dim * 4, 2  # bytes
PACKED = ROW + 8 * COPIES  # a token with the numbers and weights of its experts


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


def test_a_step_dispatches_tokens_and_combines_sums_and_does_the_same_with_gradients():
    """On 2 ranks, each with 128 tokens. Both experts of a token are on the other rank in C(4, 2) of C(8, 2) cases, 3 of 14."""
    both, away = round(2 * 128 * 11 / 14), round(128 * 11 / 14) - 1  # each token once per rank, and those that are sent
    counts = 3 * 8 * 2 * 8  # of 8 parts of the tokens
    assert exchanged(predicted(case({"dp_shard": 2, "ep": 2}))) == {
        "counts": (2 * LAYERS, LAYERS * counts, LAYERS * counts // 2),
        "tokens": (2 * LAYERS, LAYERS * both * PACKED, LAYERS * away * PACKED),
        "sums": (2 * LAYERS, LAYERS * both * ROW, LAYERS * both * ROW // 2),
        "gradients of sums": (2 * LAYERS, LAYERS * both * ROW, LAYERS * away * ROW),
        "gradients of tokens": (2 * LAYERS, LAYERS * both * (ROW + 8), LAYERS * both * (ROW + 8) // 2),
    }


def test_with_nodes_a_step_sends_once_to_each_node_and_from_there_to_its_ranks():
    """Two nodes of two ranks, each with 64 tokens, of which 3 of 14 have no expert on a node, and 15 of 28 none on a rank."""
    nodes = case({"dp_shard": 4, "ep": 4}, expert_parallel_node_size=2)._replace(accumulation=1)
    whole = predicted(nodes)
    found, part = exchanged(whole), 8 * 8  # bytes of a count for each of 8 parts
    assert all("  all-to-all" in line for line in traffic_table(whole) if "experts: " in line), "columns stay apart"
    of_node, of_rank = round(64 * 2 * 11 / 14), round(2 * 64 * 2 * 13 / 28)
    away = of_node - round(64 * 11 / 14)
    # for a node: its tokens, and the tokens and rows of its ranks; then what 4 ranks forward and compute
    counts = LAYERS * part * (2 * (1 + 4) + 4 * 2), LAYERS * part * (2 * 2 + 2 * 2)
    assert [found[f"counts {where}"] for where in ("between nodes", "within a node")] == [
        (2 * LAYERS, size, size // 2) for size in counts
    ]
    assert found["tokens between nodes"] == (2 * LAYERS, LAYERS * of_node * PACKED, LAYERS * away * PACKED)
    assert found["sums within a node"] == (2 * LAYERS, LAYERS * of_rank * ROW, LAYERS * of_rank * ROW // 2)
    kinds = [name.removesuffix(" between nodes") for name in found if name.endswith(" between nodes")]
    assert sorted(kinds) == ["counts", "gradients of sums", "gradients of tokens", "sums", "tokens"]


@pytest.mark.parametrize("reduced", slow_but(["none"], ["none", "full"]))
def test_memory_has_room_for_any_routing(monkeypatch, reduced):
    """One of two layers runs at a time, and its exchange is the peak or near it."""
    mesh = {"dp_shard": 2, "ep": 2}
    found = {factor: predicted(case(mesh, reduced, factor)).during("backward") for factor in (0.5, 1.0, 2.0)}
    assert found[0.5].total < found[1.0].total
    if reduced == "none":  # two matmuls of two chunks; all tokens may arrive
        assert found[2.0].activations - found[1.0].activations == LAYERS * 2 * 2 * 128 * SHAPE.expert_dim * 4
    monkeypatch.setattr(experts, "temporary_bytes", lambda *_: 0)
    without = predicted(case(mesh, reduced, 1.0)).during("backward")
    assert without.activations == found[1.0].activations and without.working < found[1.0].working


@pytest.mark.parametrize(
    ("family", "copies", "hidden"), [("tests.tiny_moe", 2, SHAPE.expert_dim), ("tests.forks.right.own_router", 1, 96)]
)
def test_with_the_worst_routing_rank_0_computes_the_rows_of_all_ranks_for_any_router(family, copies, hidden):
    """Of 2 ranks, each with 128 tokens."""
    whole = case({"dp_shard": 2, "ep": 2}, factor=2.0)._replace(name=family)
    balanced, worst = predicted(whole), predicted(whole, "worst")
    matmul, sums = 2 * SHAPE.dim * hidden, exchanged(worst)["sums"]  # of one row
    assert worst.work.flops == balanced.work.flops + 9 * LAYERS * 128 * copies * matmul
    assert sums == (2 * LAYERS, LAYERS * 256 * ROW, LAYERS * 128 * ROW) and sums.sent > exchanged(balanced)["sums"].sent
    assert worst.memory == balanced.memory


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("routing", "factor", "copies"), [("balanced", 2.0, 3), ("balanced", 0.9, 6), ("worst", 0.9, 3)])
def test_loads_are_on_average_those_of_tokens_that_choose_at_random(routing, factor, copies, nodes):
    """With the worst routing, a token has the 4 experts of rank 0 before any other."""
    ranks, experts, tokens = 4, 4, 3000
    layout = Layout(ranks, experts, tokens, copies, int(factor * tokens * copies), nodes)
    scores = torch.rand(ranks, tokens, ranks * experts, generator=torch.Generator().manual_seed(0))
    scores[..., :experts] += routing == "worst"
    expected = of_rank_0(scores.topk(copies).indices, layout)
    found, later = on_rank_0(routing, layout)
    print(found, later, expected)
    assert found.chunks == expected.chunks and later.chunks == max(0, found.chunks - 2)
    assert found.rows == pytest.approx(expected.rows, rel=0.05) and len(found.hops) == nodes
    for ours, theirs in zip(found.hops, expected.hops, strict=True):
        assert tuple(ours) == pytest.approx(tuple(theirs), rel=0.05)


def of_rank_0(chosen: torch.Tensor, layout: Layout) -> Load:
    found = chunks(counts_of(chosen, layout)[0], layout, 0)
    every = zip(*(chunk.hops for chunk in found), strict=True)  # the chunks of each hop
    hops = tuple(
        Passed(
            sum(sum(each.sends) for each in hop), sum(each.sends[0] for each in hop), sum(sum(each.receives) for each in hop)
        )
        for hop in every
    )
    return Load(len(found), sum(each.rows for each in found), hops)
