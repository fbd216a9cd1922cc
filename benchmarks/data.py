"""The cost of the data path: python -m benchmarks.data [--rounds 7] [--megabytes 40] [--folder DIR]

Four measurements. Where two ways are compared, they alternate in each round; ratios are medians over rounds of the ratio inside
a round.
    reading     batches for the training loop without workers, compared with a bare loop that copies the same rows of the mapped
                file into an int64 array; and the tokens per second of two workers
    recipes     the consumption of the debug recipe's model on this machine, and that of llama_1b, the fastest of the others, on
                an H100 that only computes matmuls
    tokenize    `titanlite tokenize` with one process per core, compared with the tokenizer's own encode_batch on the same text
    a trillion  opening a dataset of 10^12 tokens and seeking to step 1,000,000
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from models import llama3
from tests import sparse_set
from tests.token_files import mix_of, opened, write_file
from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.data.batch import Batch
from titanlite.data.batches import Batches, StepDataset
from titanlite.data.prepare.documents import stdlib_files
from titanlite.data.prepare.prepare import prepare
from titanlite.data.sources import open_tokenizer
from titanlite.launch.addresses import set_up_gloo
from titanlite.loop.step import build_model, forward_backward, update
from titanlite.optim.build import build_optimizer
from titanlite.parallel.mesh import DIMENSIONS, build_mesh
from titanlite.plan.time import peak_flops_of
from titanlite.registry.family import load_family

# Sequences in a rank's step, and their length: llama_debug, one in between, llama_8b, llama_1b.
_SHAPES = ((8, 256), (8, 2048), (8, 8192), (64, 4096))
_VARIANTS = {
    "pack": {},
    "pack, document_mask": {"document_mask": True},
    "best_fit, document_mask": {"document_policy": "best_fit", "document_mask": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=40, help="megabytes of text to tokenize")
    parser.add_argument("--folder", help="the folder for files; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"PyTorch {torch.__version__}, {os.cpu_count()} cores")
        recipes(reading(Path(folder), args.rounds))
        tokenize(Path(folder), args.rounds, args.megabytes)
        a_trillion(Path(folder))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# ------------------------------------------------------------------------------------------------------------- reading


def reading(folder: Path, rounds: int) -> dict[tuple[int, int], float]:
    """Prints the table; -> the lowest tokens per second of two workers, by shape."""
    random = np.random.default_rng(0)
    file = write_file(folder / "tokens", [random.integers(0, 60_000, 1000) for _ in range(100_000)])
    print("| rank's step | documents | tokens/s, 0 workers | of a bare loop | tokens/s, 2 workers |")
    print("| --- | --- | --- | --- | --- |")
    slowest = dict.fromkeys(_SHAPES, float("inf"))
    for share, length in _SHAPES:
        for name, variant in _VARIANTS.items():
            training = {"seq_len": length, "local_batch_size": share, "global_batch_size": share, **variant}
            plain, two = (Config.model_validate({"training": training, "dataloader": {"workers": n}}) for n in (0, 2))
            data = mix_of([opened(file)], plain)
            steps = 2 * max(1, 4096 // share)  # twice the number that is located at once
            plan = StepDataset(plain, data, (0, 1))
            rows = [np.minimum(plan.located(step)[1], file.tokens // length - 2).tolist() for step in range(steps)]

            def bare(rows=rows, share=share, length=length) -> None:
                for step in rows:
                    out = np.empty((share, length + 1), np.int64)
                    for at, row in enumerate(step):
                        out[at] = file.ids.numbers[row * length : row * length + length + 1]

            def ours(config: Config, data=data, steps=steps, share=share) -> float:
                source = Batches(StepDataset(config, data, (0, 1)))
                for _ in range(config.dataloader.workers * 4):  # until all workers have started
                    next(source)
                begin = time.perf_counter()
                for _ in range(steps):
                    next(source)
                seconds = time.perf_counter() - begin
                source.close()
                return seconds

            pairs = [(_seconds(bare), ours(plain)) for _ in range(rounds)]
            alone = statistics.median(second for _, second in pairs)
            ratio = statistics.median(first / second for first, second in pairs)
            workers = statistics.median(ours(two) for _ in range(3))
            tokens = steps * share * length
            slowest[share, length] = min(slowest[share, length], tokens / workers)
            print(f"| {share} x {length} | {name} | {tokens / alone:,.0f} | {ratio:.2f} | {tokens / workers:,.0f} |")
    return slowest


# ------------------------------------------------------------------------------------------------------------- recipes


def recipes(read: dict[tuple[int, int], float]) -> None:
    """Compares the tokens per second that training consumes with the lowest rate of two workers."""
    config = read_config("train_configs/llama_debug.toml", [])
    family = load_family("llama3", "debug")
    set_up_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build_model(family, config, mesh := build_mesh(dict.fromkeys(DIMENSIONS, 1), "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    shape = 1, config.training.local_batch_size, config.training.seq_len + 1
    batch = Batch(torch.randint(family.config.vocab_size, shape))

    def step() -> None:
        forward_backward(model, batch, mesh)
        update(model, optimizer, 1e-3, 1.0)

    step()
    debug = (batch.tokens.numel() - shape[1]) / statistics.median(_seconds(step) for _ in range(10))
    dist.destroy_process_group()
    large = llama3.FLAVORS["1b"]
    bound = peak_flops_of("H100") / llama3.flops(large, 4096).causal
    print(f"\nllama_debug here: {debug:,.0f} tokens/s a rank; two workers read {read[8, 256] / debug:,.0f} times as many")
    print(
        f"llama_1b on an H100 at its peak: {bound:,.0f} tokens/s a rank; two workers read {read[64, 4096] / bound:,.0f} times"
    )


# ------------------------------------------------------------------------------------------------------------ tokenize


def tokenize(folder: Path, rounds: int, megabytes: int) -> None:
    loaded, texts, size = open_tokenizer(""), [], 0
    sources = [file.read_text(encoding="utf-8") for file in stdlib_files()]
    while size < megabytes * 1e6:
        texts.append(sources[len(texts) % len(sources)])
        size += len(texts[-1])
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    pairs = []
    for number in range(rounds):
        alone = _seconds(lambda: loaded.tokenizer.encode_batch(texts, add_special_tokens=False))
        output = folder / f"tokens-{number}"
        whole = _seconds(
            lambda output=output: prepare(
                [str(path)], output, loaded, append_eos=True, workers=os.cpu_count() or 1, shard_tokens=10**9, on_error="fail"
            )
        )
        pairs.append((alone, whole))
    alone, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"\nencode_batch: {size / alone / 1e6:.2f} MB/s; tokenize: {size / whole / 1e6:.2f} MB/s, {ratio:.2f} of it")


# ---------------------------------------------------------------------------------------------------------- a trillion


def a_trillion(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "assets").mkdir()
    sparse_set.write(folder / "set")
    open_tokenizer("").tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    for mask in (False, True):
        # in a new process, so that its memory is that of a rank without this benchmark
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(sparse_set.measure, (folder / "set", str(folder / "assets"), mask))
        print(
            f"{found['tokens']:.0e} tokens, {found['documents']:.0e} documents{', apart' if mask else ''}: opened in "
            f"{found['open']:.2f} s, step {sparse_set.STEP:,} after {found['seek']:.2f} s, {found['resident_mb']:.0f} MB"
        )


if __name__ == "__main__":
    main()
