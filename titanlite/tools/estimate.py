"""titanlite estimate CONFIG.toml --ranks N [--device-memory-gib 80] [--routing worst] [--trace RUN]
    [--timeline FILE.svg] [--section.key value ...]

Predicts the memory, FLOPs and traffic of rank 0 in a step of a run on N ranks, on one machine without a GPU. It builds the
whole model on the meta device, shards it over a mesh of N simulated ranks, and records steps and updates of a few layers, at
least one of each kind, on tensors without memory.

With parallelism.expert_parallel_degree > 1, the predicted memory is enough for any routing. --routing decides FLOPs and
collectives: balanced, the default, sends equally many tokens to the experts of each rank; worst sends all tokens to the experts
of rank 0; recorded gives experts their shares in a run, whose folder or routing.json --trace names. Rank 0 is then the busiest
rank of each layer, and the results of balanced routing are printed next to it.

--timeline draws the memory of rank 0 from the first layer of a microbatch to the update.

Exit code 0: the run fits the memory; 1: it does not; 2: a fault of the configuration.
"""

import sys
from typing import Any

import torch

from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.plan.moments import picture
from titanlite.plan.predict import Prediction, predict
from titanlite.plan.report import fits, lines
from titanlite.plan.trace import Trace, busiest, check_trace, read_trace
from titanlite.registry.family import family_of
from titanlite.tools.options import PREDICTED, Real, config_parser, existing_path, new_path, read_command
from titanlite.transforms.meta import on_meta


def main() -> None:
    parser = config_parser("estimate", PREDICTED)
    parser.add_argument("--device-memory-gib", type=Real(1e-3, 1e6), default=80.0)
    parser.add_argument("--routing", choices=["balanced", "worst", "recorded"])
    parser.add_argument("--trace", type=existing_path, metavar="RUN", help="with --routing recorded: a run, or a routing.json")
    parser.add_argument("--timeline", type=new_path, metavar="FILE.svg")
    options, path, config = read_command(parser)
    if options.routing and config.parallelism.expert_parallel_degree == 1:
        raise UserError(f"--routing {options.routing}: has no effect unless parallelism.expert_parallel_degree > 1")
    if (options.routing == "recorded") != (options.trace is not None):
        raise UserError("--routing recorded and --trace RUN: give both or neither")
    check(config, path, options.ranks, elsewhere=not torch.cuda.is_available())
    routing: Any = options.routing or "balanced"
    trace = read_trace(options.trace) if options.trace else None
    if trace:
        check_trace(trace, options.trace, on_meta(family_of(config.model), config))
    prediction = predict(config, options.ranks, routing=trace or routing)
    if options.timeline:
        title = f"{config.model.title} on {options.ranks} ranks: GiB of a rank over a step, predicted"
        options.timeline.write_text(picture(prediction.moments, title), encoding="utf-8")
    print("\n".join(lines(prediction, config, options.ranks, options.device_memory_gib, routing)))
    if trace:
        balanced = predict(config, options.ranks)
        print("\n".join(beside_balanced(prediction, balanced, trace, config.parallelism.expert_parallel_degree)))
    sys.exit(0 if fits(prediction, options.device_memory_gib) else 1)


def beside_balanced(recorded: Prediction, balanced: Prediction, trace: Trace, degree: int) -> list[str]:
    """FLOPs and traffic of a step with recorded and balanced routing. degree: of expert parallelism."""
    loads = [busiest(layer.counts, degree) for layer in trace.mixtures]
    sent = [sum(traffic.sent for traffic in each.work.traffic.values()) / 2**30 for each in (recorded, balanced)]
    flops = [each.work.flops / 1e12 for each in (recorded, balanced)]
    return [
        f"  routing of step {trace.step}: the busiest rank of a layer receives {min(loads):.2f} to {max(loads):.2f} x the mean",
        f"  {'':<24}{'recorded':>12}{'balanced':>12}{'ratio':>8}",
        f"  {'TFLOP of a step':<24}{flops[0]:>12.3f}{flops[1]:>12.3f}{flops[0] / flops[1]:>8.3f}",
        f"  {'GiB sent in a step':<24}{sent[0]:>12.3f}{sent[1]:>12.3f}{sent[0] / max(sent[1], 1e-12):>8.3f}",
    ]
