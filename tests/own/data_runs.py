"""Runs with own data, without a tokenizer: what the ranks of a pool run, and tests in their own process."""

import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed import scenarios
from tests.distributed.scenarios import CPU, learnable_ids, mesh_of
from tests.token_files import data_of, mix_of
from titanlite.config.schema import Config
from titanlite.data import mixture
from titanlite.data.mixture import Data, open_on_every_rank
from titanlite.data.own import open_own
from titanlite.data.sources import sources_of
from titanlite.parallel.mesh import ranks_of
from titanlite.registry.family import family_of
from titanlite.registry.own import is_part
from titanlite.tools.replay import replay, replay_config, route_to, setting_of
from titanlite.train import train
from titanlite.verify.compare import Trajectory


def opened_data(config: Config, vocabulary: int, section: str = "training") -> Data:
    """As `open_data`; every path that is not a part means the learnable tokens."""
    files = data_of([learnable_ids(vocabulary)], config, vocabulary).sources[0]
    sources = [
        open_own(config, section, number, vocabulary) if is_part(source.path) else files._replace(cfg=source, name=source.path)
        for number, source in enumerate(sources_of(config, section))
    ]
    return mix_of(sources, config, vocabulary)


def opened(config: Config) -> tuple[Data, Data | None]:
    """As a run opens its data; all ranks together."""
    with patch.object(mixture, "open_data", opened_data):
        return open_on_every_rank(config, family_of(config.model).config.vocab_size)


def trajectory(degrees: dict[str, int], config: Config) -> tuple[Trajectory, int] | None:
    return scenarios.trajectory(degrees, config, opened(config)[0])


def replayed(degrees: dict[str, int], folder: Path, step: int, part: str) -> float | None:
    """The loss of a step that `replay` repeats."""
    config, global_batch = setting_of(folder, step, "tests.tiny", [part])
    config = replay_config(config, global_batch, ranks_of(degrees) if degrees else None)
    data, _ = opened(config)
    return replay(config, folder, route_to(step, None, []), step, data, mesh_of(degrees), CPU).step.loss


def full_run(degrees: dict[str, int], config: Config, mesh: DeviceMesh | None = None) -> None:
    """A whole run of the training program."""
    train(config, *opened(config), mesh or mesh_of(degrees), CPU, time.perf_counter(), None)
    dist.barrier()
