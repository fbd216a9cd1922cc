"""titanlite data show CONFIG.toml --step N [--rank R] [--ranks N] [--section.key value ...]
titanlite data stats CONFIG.toml [--ranks N] [--section.key value ...]
titanlite data verify CONFIG.toml [--ranks N] [--section.key value ...]

`show` prints the documents and the text of a step's batch, for one rank or for all. `verify` reads all token files of training
and validation: checksums, index, ids. `stats` does that for training, and prints what each source has, how much of it the run
will use, and how often. None of them trains or starts a process group. If job.dump_folder has checkpoints of a run, they
determine which samples of each source came before a step. Without --ranks, there are as few as the mesh allows.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from titanlite.checkpoint import manifest
from titanlite.checkpoint.folder import list_steps, step_folder
from titanlite.config.effects import OPTION, Hardware
from titanlite.config.schema import Config, Parallelism
from titanlite.data.batches import StepDataset
from titanlite.data.mixture import Data, open_data
from titanlite.data.own import OwnSource
from titanlite.data.prepare.manifest import read_manifest
from titanlite.data.samples import Rows
from titanlite.data.sources import TokenSource, open_tokenizer, sections_of
from titanlite.data.timeline import Timeline, stored
from titanlite.data.tokenizer import LoadedTokenizer
from titanlite.ground.errors import UserError, listed
from titanlite.ground.run_files import CONFIG, INCIDENTS, PROVENANCE, read_entries, read_starts
from titanlite.loop import divergence
from titanlite.loop.checks import check
from titanlite.loop.resume import compared, values_of
from titanlite.parallel.mesh import DEGREES, DIMENSIONS, part_of_rank, parts_of, resolve_degrees
from titanlite.registry.family import vocabulary_of
from titanlite.tools.options import RANKS, STEPS, WholeNumber, command_parser, config_parser, read_command
from titanlite.tools.replay import furthest

# With sources, tokenizer and global batch, these decide which samples a step has.
_DECIDING = ("training.seed", "training.seq_len", "training.document_policy")
_AT_ONCE = 2**22  # tokens
_BAR = 40  # characters of the longest bar of a histogram


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = command_parser("data", __doc__)
    parser.add_argument("action", choices=list(_ACTIONS))
    options, words = parser.parse_known_args()
    for line in _ACTIONS[options.action](words):
        print(line)


def _open(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, Config, dict[str, int]]:
    """The options of a command, its checked configuration, and the degrees of its mesh."""
    parser.set_defaults(ranks=None)
    options, path, config = read_command(parser, words)
    of_a_run = Path(path).name == CONFIG and (Path(path).parent / PROVENANCE).is_file()
    if of_a_run and config.layers.get("job.dump_folder") != OPTION:  # the run's folder, wherever this command is started
        config = config.with_keys({"job.dump_folder": str(Path(path).parent)})
    ranks = options.ranks or _fewest_ranks(config.parallelism)
    check(config, path, ranks, elsewhere=not torch.cuda.is_available())
    return options, config.settled(Hardware()), resolve_degrees(config.parallelism, ranks)


def _fewest_ranks(parallelism: Parallelism) -> int:
    """Of a mesh that has these degrees, and whose replicas can split the experts as given."""
    fixed = math.prod(size for name in DIMENSIONS if (size := getattr(parallelism, DEGREES[name])) > 0)
    within = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    experts = parallelism.expert_parallel_degree
    return fixed * (experts // math.gcd(experts, within) if parallelism.data_parallel_shard_degree < 0 else 1)


def _check_values(where: str, then: dict[str, Any], described: dict[str, Any], config: Config, data: Data) -> None:
    """Raises UserError where a run had another order or other rows. then: its keys; described: its data, as `Data.describe`."""
    now = compared(config, 0, 0)
    different = [f"{key} = {then[key]!r}, here {now[key]!r}" for key in _DECIDING if then.get(key, now[key]) != now[key]]
    if described.get("tokenizer") not in (None, data.describe()["tokenizer"]):
        different.append(f'another tokenizer than model.hf_assets_path = "{config.model.hf_assets_path}"')
    if different:
        raise UserError(f"{where} with {'; '.join(different)}; set these, or name another folder")


def _as_started(config: Config, data: Data, step: int, size: int) -> None:
    """Raises UserError where the run may have done a step, which no checkpoint has, with other values, batch or sources."""
    folder = Path(config.job.dump_folder)
    start = next((each for each in reversed(read_starts(folder)) if each.get("global_batch")), None)
    if start is None or step > furthest(folder, config, read_entries(folder / INCIDENTS)):
        return
    where = f"step {step}: the run in {folder}"
    _check_values(f"{where} reads samples", start.get("compared", {}), start.get("data") or {}, config, data)
    if start["global_batch"] != size:
        text = f"has a global batch of {start['global_batch']} sequences, and this configuration one of {size}"
        raise UserError(f"{where} {text}; set --ranks or training.global_batch_size to the run's, or name another folder")
    described = [each["sources"] for each in (start.get("data"), data.describe()) if each]
    if len({tuple((each["fingerprint"], each["share"]) for each in sources) for sources in described}) > 1:
        names = ", ".join(f"{each['name']} {each['share']:.2%}" for each in described[0])
        raise UserError(f"{where} reads other sources or weights since its latest start: {names}; set these")


def _timeline(config: Config, data: Data, step: int, size: int) -> Timeline:
    """The timeline of a step: that of the run in job.dump_folder, as it read the step or will read it with this configuration.

    Raises UserError where the run did the step with other values, batch or mixture.
    """
    folder = Path(config.job.dump_folder)
    saves = folder / config.checkpoint.folder
    if not (steps := list_steps(saves) if config.checkpoint.enable else []):
        _as_started(config, data, step, size)
        return data.timeline(size)
    number = next((each for each in steps if each >= step), steps[-1])
    source = step_folder(saves, number)
    found = manifest.read(source)
    manifest.check_run(source, found)
    timeline = stored(found.numbers, str(source))
    if number < step:
        _as_started(config, data, step, size)
        entries = read_entries(folder / INCIDENTS)
        timeline = timeline.resumed(number, size, data.mixture).after(number, divergence.rollbacks(entries))
    else:
        where = f"step {step}: the run in {folder} did this step, as {source} says,"
        _check_values(where, values_of(found.numbers), found.numbers["data"], config, data)
    segment, _ = timeline.at(step)
    if (segment.global_batch, segment.mixture) != (size, data.mixture):
        names = {each["fingerprint"]: each["name"] for each in (*data.describe()["sources"], *found.numbers["data"]["sources"])}
        total = sum(share for _, share in segment.mixture)
        then = ", ".join(f"{names.get(name, name[:12])} {share / total:.2%}" for name, share in segment.mixture)
        what = f"the run in {folder} did this step with other sources, weights, --ranks or training.global_batch_size"
        raise UserError(f"step {step}: {what}, as {source} says: {segment.global_batch} sequences of {then}; set these")
    return timeline


# ---------------------------------------------------------------------------------------------------------------- show


def _show(words: list[str]) -> Iterator[str]:
    parser = config_parser("data show", __doc__)
    parser.add_argument("--step", type=STEPS)
    parser.add_argument("--rank", type=WholeNumber(0, RANKS.most - 1))
    options, config, degrees = _open(parser, words)
    data_ranks, ranks = parts_of(degrees), math.prod(degrees.values())
    if options.step is None or not 1 <= options.step <= config.training.steps:
        raise UserError(f"--step {options.step}: must be from 1 to training.steps = {config.training.steps}")
    if options.rank is not None and not 0 <= options.rank < ranks:
        raise UserError(f"--rank {options.rank}: must be from 0 to {ranks - 1}; --ranks N sets the number of ranks")
    data, tokenizer = open_data(config, vocabulary_of(config.model)), open_tokenizer(config.model.hf_assets_path)
    size = config.global_batch(data_ranks)
    timeline = _timeline(config, data, options.step, size)
    parts = range(data_ranks) if options.rank is None else [part_of_rank(degrees, options.rank)]
    for part in parts:
        steps = StepDataset(config, data, (part, data_ranks), timeline, options.step)
        first = timeline.at(options.step)[1] + int(steps.positions[0])
        for number, (source, sample) in enumerate(zip(*steps.located(0), strict=True), first):
            yield from _show_sample(data.sources[source], int(sample), number, part, tokenizer)


def _show_sample(
    source: TokenSource | OwnSource, sample: int, number: int, part: int, tokenizer: LoadedTokenizer
) -> Iterator[str]:
    if isinstance(source, OwnSource):
        yield f"=== sample {number:,} (data rank {part}): {source.where(sample)}"
        yield tokenizer.decode(source.read(sample).ids[:].tolist(), skip_special_tokens=False)
        return
    rows, row = source.locate(sample)
    yield f"=== sample {number:,} (data rank {part}): {source.name}, {rows.file.prefix}.bin, row {row:,}"
    for first, length in rows.pieces(row):
        begin, edges = rows.file.documents_of(first, first + length - 1)
        for document, (start, stop) in enumerate(itertools.pairwise(edges), begin):
            here = slice(max(first, start), min(first + length, stop))
            if here.start >= here.stop:
                continue
            span = f"tokens {here.start - start:,} to {here.stop - start - 1:,} of {stop - start:,}"
            yield f"--- document {document:,}{_origin(source, rows, document)}, {span}"
            yield tokenizer.decode(rows.file.ids[here].tolist(), skip_special_tokens=False)


def _origin(source: TokenSource, rows: Rows, document: int) -> str:
    """The input that a document was read from, if the manifest says."""
    if source.folder is None:
        return ""
    before = source.rows[: next(number for number, other in enumerate(source.rows) if other is rows)]
    number = document + sum(other.file.documents for other in before)
    paths, ends = _inputs(source.folder)
    return f" of {paths[int(np.searchsorted(ends, number, side='right'))]}"


@functools.cache
def _inputs(folder: Path) -> tuple[list[str], np.ndarray]:
    """(the inputs that a folder of token files was made of, how many documents they have up to the end of each)."""
    inputs = read_manifest(folder)["inputs"]
    return [entry["path"] for entry in inputs], np.cumsum([entry["documents"] for entry in inputs])


# --------------------------------------------------------------------------------------------------------------- stats


def _stats(words: list[str]) -> Iterator[str]:
    _, config, degrees = _open(config_parser("data stats", __doc__), words)
    data = open_data(config, vocabulary_of(config.model))
    _refuse_damaged(config, [rows for source in data.sources for rows in source.rows])
    size = config.global_batch(parts_of(degrees))
    segment, samples = _timeline(config, data, config.training.steps + 1, size).at(config.training.steps + 1)
    yield (
        f"{samples:,} samples of {config.training.seq_len:,} tokens in {config.training.steps:,} steps, "
        f"{config.training.document_policy}, documents {'kept apart' if data.mask else 'not kept apart'}"
    )
    for source, draws in zip(data.sources, segment.drawn(samples), strict=False):
        padding, unused = data.waste(source)
        limit = source.cfg.epochs
        yield f"\n{source.name}: {source.cfg.path}"
        yield f"  tokens      {source.tokens:,} in {len(source.rows)} files"
        yield f"  documents   {source.documents:,}, {source.tokens / max(1, source.documents):,.0f} tokens each on average"
        yield f"  samples     {source.samples:,} an epoch"
        yield f"  in the run  {draws:,} samples, {draws / samples:.2%} of all"
        yield f"  epochs      {draws / source.samples:.3f}" + ("" if limit is None else f", limit {limit:g}")
        if isinstance(source, OwnSource):  # nothing more is known before it is read
            continue
        yield f"  waste       {padding:.2%} of the positions are padding, {unused:.2%} of the tokens are in no sample"
        yield "  length of documents in tokens"
        yield from _histogram(source)


def _histogram(source: TokenSource) -> Iterator[str]:
    """Documents by length, in powers of two."""
    counts = np.zeros(64, np.int64)
    for rows in source.rows:
        lengths = rows.file.document_lengths()
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=64)[:64]  # n is below 2 ** exponent
    seen = np.flatnonzero(counts)
    for exponent in range(seen[0], seen[-1] + 1) if len(seen) else ():
        low, high = (0, 0) if exponent == 0 else (2 ** (exponent - 1), 2**exponent - 1)
        bar = "#" * -(-int(counts[exponent]) * _BAR // int(counts.max()))
        yield f"    {low:>9,} to {high:>9,}  {counts[exponent]:>12,}  {bar}"


# -------------------------------------------------------------------------------------------------------------- verify


def _verify(words: list[str]) -> Iterator[str]:
    _, config, _ = _open(config_parser("data verify", __doc__), words)
    rows = [
        each
        for section in sections_of(config)
        for source in open_data(config, vocabulary_of(config.model), section).sources
        for each in source.rows
    ]
    size = _refuse_damaged(config, rows)
    unproved = sum(not stored.has_sums for each in rows for stored in each.file.files)
    yield f"{len(rows)} token files, {size:,} bytes: sound" + (f"; {unproved} have no checksums" if unproved else "")


def _refuse_damaged(config: Config, rows: list[Rows]) -> int:
    """Reads all token files; -> their bytes. Raises UserError that lists the first fault of each."""
    vocabulary, faults = vocabulary_of(config.model), []
    size = sum(stored.size for each in rows for stored in each.file.files)
    with tqdm(desc="verifying", total=size, unit="B", unit_scale=True, disable=None) as bar:
        for each in rows:
            try:
                _verify_file(each, vocabulary, config.training.document_policy == "best_fit", bar.update)
            except UserError as error:
                faults.append(str(error))
    if faults:
        raise UserError(listed(f"{len(faults)} of {len(rows)} token files are damaged:", faults))
    return size


def _verify_file(rows: Rows, vocabulary: int, packed: bool, advance: Callable[[int], object]) -> None:
    """Reads a token file, its index, its loss mask and its packing. Raises UserError for the first fault."""
    file = rows.file
    for begin in range(0, file.tokens, _AT_ONCE):
        end = min(begin + _AT_ONCE, file.tokens)
        ids = file.ids[begin:end]
        wrong = (ids < 0) | (ids >= vocabulary)
        if wrong.any():
            at = int(wrong.argmax())
            what = f"{file.prefix}.bin: holds the id {ids[at]} at token {begin + at:,}"
            raise UserError(f"{what}, but the model's vocabulary is {vocabulary}")
        if file.loss is not None:
            advance(len(file.loss[begin:end]))
        advance(ids.nbytes)
    file.document_lengths()
    advance(file.files[1].size)
    for row in range(rows.count if packed else 0):
        rows.pieces(row)


_ACTIONS = {"show": _show, "stats": _stats, "verify": _verify}
