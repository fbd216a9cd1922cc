"""A dataset of 10^12 tokens in 10^9 documents that takes no disk space: a thousand names of one shard, whose ids are a hole."""

import os
import time
from pathlib import Path

import numpy as np

from titanlite.config.schema import Config
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.indexed import path_of
from titanlite.data.prepare.shards import write_index
from titanlite.registry.family import vocabulary_of

SHARDS, DOCUMENTS, TOKENS = 1000, 10**6, 10**9  # the last two per shard
STEP = 1_000_000


def write(folder: Path) -> None:
    """The dataset as a folder of Megatron's pairs: 20 MB of index, and nothing else on the disk."""
    first = folder / "00000"
    write_index(first, np.dtype(np.uint16), np.full(DOCUMENTS, TOKENS // DOCUMENTS, np.int32))
    with open(path_of(first, "bin"), "wb") as file:
        file.truncate(TOKENS * 2)
    for number in range(1, SHARDS):
        for suffix in ("bin", "idx"):
            os.link(path_of(first, suffix), folder / f"{number:05}.{suffix}")


def measure(folder: Path, assets: str, mask: bool) -> dict[str, float]:
    """Opens the dataset and reads the step: seconds of both, and MB of resident memory, total and added."""
    from titanlite.data.mixture import open_data

    training = {"dataset_path": str(folder), "seq_len": 8192, "global_batch_size": 64, "document_mask": mask}
    config = Config.model_validate({"training": training, "model": {"hf_assets_path": assets}})
    before = _memory("VmRSS")
    begin = time.perf_counter()
    data = open_data(config, vocabulary_of(config.model))
    opened = time.perf_counter()
    batch = next(Batches(StepDataset(config, data, (3, 8), first_step=STEP)))
    sought = time.perf_counter()
    assert batch.tokens.numel() == 8 * 8193
    tokens, documents = data.sources[0].tokens, data.sources[0].documents
    peak = _memory("VmHWM")
    return {
        "tokens": tokens,
        "documents": documents,
        "open": opened - begin,
        "seek": sought - opened,
        "resident_mb": peak,
        "added_mb": peak - before,
    }


def _memory(name: str) -> float:
    """MB of this process; unlike getrusage, excluding the time before exec."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024 / 1e6
