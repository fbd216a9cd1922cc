"""A rank's memory in each phase of a step equals the prediction, for one microbatch and for several.

Tensors are real, and other ranks are simulated, since a gloo thread would free buffers at random times.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.distributed.scenarios import CPU, rank_batches
from tests.repetitions import slow_but
from tests.traffic_cases import HYBRID, LATE, SHARD, Case
from titanlite.config.schema import Config
from titanlite.loop.step import begin_training, forward_backward, update
from titanlite.parallel.mesh import build_mesh, resolve_degrees
from titanlite.plan.fused import _Kernels
from titanlite.plan.moments import PHASES
from titanlite.plan.predict import predict
from titanlite.plan.record import Allocations
from titanlite.plan.step import simulated_ranks
from titanlite.registry.family import family_of

CASES = {
    "one process": Case({}, "deep"),
    "one process, recomputed": Case({}, "deep", reduced="full"),
    "shard 2, three microbatches": Case(SHARD, "deep", accumulation=3),
    "shard 2, one microbatch, reduced at once": Case(SHARD, "deep", parallelism=LATE),
    "shard 2, two microbatches, reduced once": Case(SHARD, "deep", accumulation=2, parallelism=LATE),
    "2 x 2": Case(HYBRID, "deep"),
}


def peaks(config: Config, ranks: int) -> dict[str, int]:
    """The peak bytes of each phase of the second step, without masters and optimizer state, which exist before."""
    mesh, watch = build_mesh(resolve_degrees(config.parallelism, ranks), "cpu"), Allocations()
    model, optimizer, _ = begin_training(family_of(config.model), config, mesh, CPU)
    last = [*model.layers.values()][-1]
    model.embed.register_forward_pre_hook(lambda *_: watch.enter("forward"), prepend=True)
    model.head.register_forward_pre_hook(lambda *_: watch.enter("loss"), prepend=True)
    last.register_forward_hook(lambda *found: found[-1].register_hook(lambda _: watch.enter("backward")) and None, prepend=True)
    batches = rank_batches(config, mesh)
    with watch:
        for _ in range(2):
            watch.enter("forward")
            watch.begin()
            forward_backward(model, next(batches), mesh)
            watch.enter("update")
            update(model, optimizer, 1e-3, 1.0)
    return watch.peaks


@pytest.mark.parametrize("name", slow_but(["shard 2, three microbatches"], CASES))
def test_each_phase_holds_what_is_predicted_of_it(name):
    config = CASES[name].config()
    with simulated_ranks(CASES[name].ranks):
        found = peaks(config, CASES[name].ranks)
    prediction = predict(config, CASES[name].ranks, "cpu")
    for phase in PHASES:
        memory = prediction.during(phase)
        predicted = memory.total - memory.masters - memory.moments
        # with several, leftovers of the previous one are not counted, nor that the last one frees full gradients block by block
        assert found[phase] == pytest.approx(predicted, rel=0.01 if CASES[name].accumulation == 1 else 0.06), phase


def test_what_a_kernel_fuses_has_no_memory_and_what_it_reads_stays_until_its_result_is_written():
    """Written are the matmuls' results and what the second one reads: two of 100 x 100 at a time; unfused, three."""

    def block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        fused = (a @ a).sigmoid()
        return (fused + 2 * fused) @ b

    arguments = [torch.ones(100, 100), torch.ones(100, 1)]
    graph, watch = make_fx(block)(*arguments), Allocations()
    with watch:
        _Kernels(graph).boxed_run(arguments)
    assert watch.peaks == {"": 2 * 4 * 100 * 100}
