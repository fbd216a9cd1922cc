"""titanlite data show CONFIG.toml --step N [--rank R] [--ranks N] [--section.key value ...]
titanlite data stats CONFIG.toml [--ranks N] [--section.key value ...]

`show` prints the documents and the text of a step's batch, of one rank or of all; `stats` what there is in each source, how
much of it the run will use, and how often. Nothing is trained, and no process group started.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from titanlite.config.read import read_config
from titanlite.config.schema import Config
from titanlite.data.batches import Plan
from titanlite.data.mixture import Data, Mixed, open_data
from titanlite.data.samples import Rows
from titanlite.data.sources import open_tokenizer
from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.parallel.mesh import resolve_degrees
from titanlite.tools.check import parse_command

_BAR = 40  # characters of the longest bar of a histogram


def main() -> None:
    """Exit code 2 for a fault of configuration or data."""
    try:
        word, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
        if word in ("-h", "--help"):
            print(__doc__)
            return
        if word not in ("show", "stats"):
            raise UserError(f"titanlite data {word}: there are show and stats")
        for line in _show(words) if word == "show" else _stats(words):
            print(line)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _open(command: str, words: list[str]) -> tuple[Config, dict[str, int]]:
    """The configuration of a command's words, checked, and the degrees of its mesh."""
    path, ranks, _, options = parse_command(command, words)
    config = read_config(path, options)
    check(config, path, ranks)
    return config, resolve_degrees(config.parallelism, ranks)


# ---------------------------------------------------------------------------------------------------------------- show


def _show(words: list[str]) -> Iterator[str]:
    parser = argparse.ArgumentParser(prog="titanlite data show", allow_abbrev=False, add_help=False)
    parser.add_argument("--step", type=int)
    parser.add_argument("--rank", type=int)
    asked, rest = parser.parse_known_args(words)
    config, degrees = _open("data show", rest)
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    ranks = data_ranks * degrees["tp"]
    if asked.step is None or not 1 <= asked.step <= config.training.steps:
        raise UserError(f"--step {asked.step}: must be from 1 to training.steps = {config.training.steps}")
    if asked.rank is not None and not 0 <= asked.rank < ranks:
        raise UserError(f"--rank {asked.rank}: must be from 0 to {ranks - 1}; --ranks N says how many there are")
    data, tokenizer = open_data(config), open_tokenizer(config.model.hf_assets_path).tokenizer
    size = config.global_batch(data_ranks)
    # the ranks of one tensor-parallel group are neighbours, and read the same
    parts = range(data_ranks) if asked.rank is None else [asked.rank // degrees["tp"]]
    for part in parts:
        plan = Plan(
            data, (asked.step - 1) * size, size, config.training.local_batch_size, config.training.seed, (part, data_ranks)
        )
        for number, (source, sample) in enumerate(zip(*plan.located(0), strict=True), plan.first):
            yield from _show_sample(data, data.sources[source], int(sample), number, part, tokenizer)


def _show_sample(data: Data, mixed: Mixed, sample: int, number: int, part: int, tokenizer: Tokenizer) -> Iterator[str]:
    rows, row = mixed.locate(sample)
    yield f"=== sample {number:,} (data rank {part}): {mixed.source.name}, {rows.file.prefix}.bin, row {row:,}"
    for first, length in rows.pieces(rows, row, data.seq_len):
        begin, end = rows.file.document_at(first), rows.file.document_at(first + length - 1)
        edges = rows.file.boundaries(begin, end + 1).tolist()
        for document, (start, stop) in enumerate(itertools.pairwise(edges), begin):
            here = slice(max(first, start), min(first + length, stop))
            if here.start >= here.stop:
                continue
            place = f"tokens {here.start - start:,} to {here.stop - start - 1:,} of {stop - start:,}"
            yield f"--- document {document:,}{_origin(mixed, rows, document)}, {place}"
            yield tokenizer.decode(rows.file.ids[here].tolist(), skip_special_tokens=False)


def _origin(mixed: Mixed, rows: Rows, document: int) -> str:
    """The input that a document was read from, where that is known."""
    if mixed.source.manifest is None:
        return ""
    before = mixed.rows[: next(number for number, other in enumerate(mixed.rows) if other is rows)]
    number = document + sum(other.file.documents for other in before)
    inputs = mixed.source.manifest["inputs"]
    ends = np.cumsum([entry["documents"] for entry in inputs])
    return f" of {inputs[int(np.searchsorted(ends, number, side='right'))]['path']}"


# --------------------------------------------------------------------------------------------------------------- stats


def _stats(words: list[str]) -> Iterator[str]:
    config, degrees = _open("data stats", words)
    data = open_data(config)
    samples = config.training.steps * config.global_batch(degrees["dp_replicate"] * degrees["dp_shard"])
    yield (
        f"{samples:,} samples of {config.training.seq_len:,} tokens in {config.training.steps:,} steps, "
        f"{config.training.document_policy}, documents {'kept apart' if data.mask else 'not kept apart'}"
    )
    for mixed, draws in zip(data.sources, data.draws(samples), strict=True):
        padding, unused = data.waste(mixed)
        allowed = mixed.source.keys.epochs
        yield f"\n{mixed.source.name}: {mixed.source.keys.path}"
        yield f"  tokens      {mixed.tokens:,} in {len(mixed.rows)} files"
        yield f"  documents   {mixed.documents:,}, {mixed.tokens / max(1, mixed.documents):,.0f} tokens each on average"
        yield f"  samples     {mixed.count:,} an epoch"
        yield f"  in the run  {draws:,} samples, {draws / samples:.2%} of all"
        yield f"  epochs      {draws / mixed.count:.3f}" + ("" if allowed is None else f", allowed are {allowed:g}")
        yield f"  waste       {padding:.2%} of the places are padding, {unused:.2%} of the tokens are in no sample"
        yield "  length of documents in tokens"
        yield from _histogram(mixed)


def _histogram(mixed: Mixed) -> Iterator[str]:
    """Documents by length, in powers of two. Reads, and checks, every index."""
    counts = np.zeros(64, np.int64)
    for rows in mixed.rows:
        lengths = rows.file.document_lengths()
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)[:64]  # n is below 2 ** exponent
    seen = np.flatnonzero(counts)
    for exponent in range(seen[0], seen[-1] + 1) if len(seen) else ():
        low, high = (0, 0) if exponent == 0 else (2 ** (exponent - 1), 2**exponent - 1)
        bar = "#" * -(-int(counts[exponent]) * _BAR // int(counts.max()))
        yield f"    {low:>9,} to {high:>9,}  {counts[exponent]:>12,}  {bar}"


if __name__ == "__main__":
    main()
