"""titanlite check CONFIG.toml [--ranks N] [--local-ranks N] [--section.key value ...]

Prints every fault that can be found without training; with job.print_config also the resolved TOML. On a machine without a GPU,
it checks a configuration for GPUs, and lists what only GPUs can verify. With --local-ranks it checks a run on this machine,
which has all ranks if --ranks is not given.
"""

import sys
from collections.abc import Iterator

from titanlite.config import effects
from titanlite.config.effects import Hardware
from titanlite.config.read import Faults, to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError, listed
from titanlite.tools.options import WholeNumber, config_parser, read_command


def main() -> None:
    """Exit code 0 for a valid configuration, 2 for one with faults."""
    parser = config_parser("check", __doc__)
    parser.add_argument("--local-ranks", type=WholeNumber(1, 1024))
    parser.set_defaults(ranks=None)
    options, path, config = read_command(parser)
    ranks = options.ranks or options.local_ranks or 1
    if options.local_ranks and options.local_ranks > ranks:
        raise UserError(f"--local-ranks {options.local_ranks}: more than --ranks {ranks}, those of all machines")
    import torch  # imported late: a fault in the file needs no torch

    if notes := check_here(config, path, ranks, options.local_ranks):
        print(listed(f"{path}: no faults; this machine has no GPU, so on GPUs this is not verified:", notes), file=sys.stderr)
    if note := effects.note(config.idle(Hardware(torch.cuda.is_available(), ranks))):
        print(f"{path}: {note}", file=sys.stderr)
    from titanlite.loop.summary import built_in
    from titanlite.registry.family import family_of
    from titanlite.transforms.meta import on_meta

    if note := built_in(config, sum(p.numel() for p in on_meta(family_of(config.model), config).parameters())):
        print(f"{path}: built-in {note}", file=sys.stderr)
    if config.job.print_config:
        print(to_toml(config))


def check_here(config: Config, path: str, ranks: int, local_ranks: int | None) -> list[str]:
    """Raises Faults that lists all faults of a configuration for `ranks` ranks, `local_ranks` of them on this machine.

    local_ranks: None if the run is on another machine. Returns what only a GPU can verify, if this machine has none.
    """
    # Imported late: a fault in the file itself, or --help, needs no torch.
    import torch

    from titanlite.launch.run_folder import other_run, owned_folders
    from titanlite.loop.checks import check
    from titanlite.plan import memory

    elsewhere = local_ranks is None and not torch.cuda.is_available()
    left = check(config, path, ranks, local_ranks, elsewhere=elsewhere, more=[memory.CHECK])
    if faults := [fault for folder in owned_folders(config) if (fault := other_run(folder))]:
        raise Faults(path, faults)
    return [*left, *_only_on_gpus(config, ranks), *memory.unverified(config, ranks)] if elsewhere else []


def _only_on_gpus(config: Config, ranks: int) -> Iterator[str]:
    """What a valid configuration uses on GPUs only."""
    from titanlite.registry.family import family_of
    from titanlite.transforms.attention_kernels import flex_users

    name, family = config.model.attention, family_of(config.model)
    if name in ("auto", "flash"):
        yield f'model.attention = "{name}": the kernel on a GPU' + (", cuDNN on Hopper" if name == "auto" else "")
    if name == "auto" and (special := flex_users(config, family, family.on_meta())):
        yield f"{', '.join(special)}: FlexAttention"
    if config.compile.enable and config.compile.backend == "inductor":
        yield 'compile.backend = "inductor": its kernels for GPUs'
    if ranks > 1:
        yield f"{ranks} ranks: their communication by NCCL"
