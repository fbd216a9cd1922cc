"""titanlite estimate CONFIG.toml --ranks N [--device-memory-gib 80] [--section.key value ...]

Predicts what rank 0 of a run on N ranks holds, computes and sends in a step, on one machine without a GPU. It builds the whole
model on the meta device, shards it over a mesh of N pretended ranks, and records steps and updates of a few layers, at least
one of each kind, on tensors without memory.

Exit code 0 when the run fits the memory, 1 when it does not, 2 for a fault of the configuration.
"""

import sys

import torch

from titanlite.loop.checks import check
from titanlite.plan.predict import predict
from titanlite.plan.report import fits, lines
from titanlite.tools.options import config_parser, read_command


def main() -> None:
    parser = config_parser("estimate")
    parser.add_argument("--device-memory-gib", type=float, default=80.0)
    options, path, config = read_command(parser)
    check(config, path, options.ranks, elsewhere=not torch.cuda.is_available())
    prediction = predict(config, options.ranks)
    print("\n".join(lines(prediction, config, options.ranks, options.device_memory_gib)))
    sys.exit(0 if fits(prediction, options.device_memory_gib) else 1)
