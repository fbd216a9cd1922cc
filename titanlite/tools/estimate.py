"""titanlite estimate CONFIG.toml --ranks N [--device-memory-gib 80] [--routing worst] [--section.key value ...]

Predicts what rank 0 of a run on N ranks holds, computes and sends in a step, on one machine without a GPU. It builds the whole
model on the meta device, shards it over a mesh of N pretended ranks, and records steps and updates of a few layers, at least
one of each kind, on tensors without memory.

Where parallelism.expert_parallel_degree splits the experts of a mixture, the memory is enough for any routing. FLOPs and
collectives are those of --routing: balanced, the default, where the experts of every rank get as many rows, or worst, where
those of rank 0 get all rows of all ranks.

Exit code 0 when the run fits the memory, 1 when it does not, 2 for a fault of the configuration.
"""

import sys
from typing import get_args

import torch

from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.plan.experts import Routing
from titanlite.plan.predict import predict
from titanlite.plan.report import fits, lines
from titanlite.tools.options import config_parser, read_command


def main() -> None:
    parser = config_parser("estimate")
    parser.add_argument("--device-memory-gib", type=float, default=80.0)
    parser.add_argument("--routing", choices=get_args(Routing))
    options, path, config = read_command(parser)
    if options.routing and config.parallelism.expert_parallel_degree == 1:
        raise UserError(
            f"--routing {options.routing}: has no effect unless parallelism.expert_parallel_degree > 1; leave the option out"
        )
    routing: Routing = options.routing or "balanced"
    check(config, path, options.ranks, elsewhere=not torch.cuda.is_available())
    prediction = predict(config, options.ranks, routing=routing)
    print("\n".join(lines(prediction, config, options.ranks, options.device_memory_gib, routing)))
    sys.exit(0 if fits(prediction, options.device_memory_gib) else 1)
