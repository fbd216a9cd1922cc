"""titanlite estimate CONFIG.toml --ranks N [--device-memory-gib 80] [--routing worst]
    [--timeline FILE.svg] [--section.key value ...]

Predicts the memory, FLOPs and traffic of rank 0 in a step of a run on N ranks, on one machine without a GPU. It builds the
whole model on the meta device, shards it over a mesh of N simulated ranks, and records steps and updates of a few layers, at
least one of each kind, on tensors without memory.

With parallelism.expert_parallel_degree > 1, the predicted memory is enough for any routing. --routing decides FLOPs and
collectives: balanced, the default, sends equally many tokens to the experts of each rank; worst sends all tokens to the experts
of rank 0.

--timeline draws the memory of rank 0 from the first layer of a microbatch to the update.

Exit code 0: the run fits the memory; 1: it does not; 2: a fault of the configuration.
"""

import sys

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.plan.experts import Routing
from titanlite.plan.moments import picture
from titanlite.plan.predict import predict
from titanlite.plan.report import fits, lines
from titanlite.tools.options import PREDICTED, Real, config_parser, new_file, read_command


def main() -> None:
    parser = config_parser("estimate", __doc__, PREDICTED)
    parser.add_argument("--device-memory-gib", type=Real(1e-3, 1e6), default=80.0)
    parser.add_argument("--routing", choices=["balanced", "worst"])
    parser.add_argument("--timeline", type=new_file, metavar="FILE.svg")
    options, path, config = read_command(parser)
    if options.routing and config.parallelism.expert_parallel_degree == 1:
        raise UserError(f"--routing {options.routing}: has no effect unless parallelism.expert_parallel_degree > 1")
    check(config, path, options.ranks, open_files=False, elsewhere=True)  # for another machine, with its GPUs and data
    if note := effects.note(config.idle(Hardware(ranks=options.ranks))):
        print(f"{path}: {note}", file=sys.stderr)
    routing: Routing = options.routing or "balanced"
    prediction = predict(config, options.ranks, routing=routing)
    if options.timeline:
        title = f"{config.model.title} on {options.ranks} ranks: GiB of a rank over a step, predicted"
        options.timeline.write_text(picture(prediction.moments, title), encoding="utf-8")
    print("\n".join(lines(prediction, config, options.ranks, options.device_memory_gib, routing)))
    sys.exit(0 if fits(prediction, options.device_memory_gib) else 1)
