"""titanlite tokenize --input GLOB... --output DIR --tokenizer PATH [options]

Tokenizes text, .jsonl, .parquet, saved datasets, datasets of the Hugging Face hub, and URLs into the token files of training.
"""

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import BadDocument, describe_place
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import UserError

_SHOWN = 10  # skipped entries that the terminal shows


def main() -> None:
    """Exit code 0 when DIR is complete, 2 for an error that the user can correct, 130 for Ctrl-C."""
    options = _options(sys.argv[1:])
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("titanlite").setLevel(logging.INFO)
    try:
        manifest = _tokenize(options)
    except BadDocument as error:
        print(f"{error}\n--on-error skip skips such entries, lists them, and continues from here", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    _report(manifest, options.output)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlite tokenize", allow_abbrev=False, description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="GLOB",
        help="files, folders, patterns, URLs, folders of saved datasets, hub:NAME[:CONFIG][:SPLIT]; .jsonl, .jsonl.gz, "
        ".jsonl.zst and .parquet hold one document per line or row, any other file is one document",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--tokenizer", required=True, metavar="PATH", help="a folder with tokenizer.json")
    parser.add_argument(
        "--workers",
        type=_count("--workers", 1),
        default=_processors(),
        metavar="N",
        help="processes (default: one per processor)",
    )
    parser.add_argument(
        "--text-key", default="text", help='the key or column of the text (default: "text", or "messages" for a chat)'
    )
    parser.add_argument("--append-eos", action="store_true", help="append the end-of-text id to each text")
    parser.add_argument(
        "--shard-tokens",
        type=_count("--shard-tokens", 1),
        default=10**9,
        metavar="N",
        help="tokens per shard at most (default: 1e9)",
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with an entry that is not a document (default: fail); skipped ones are listed",
    )
    parser.add_argument(
        "--best-fit", type=_count("--best-fit", 2), metavar="SEQ_LEN", help="also pack each shard for samples of this length"
    )
    return parser.parse_args(words)


def _count(name: str, least: int) -> Any:
    def parse(word: str) -> int:
        try:
            value = float(word)
            whole = int(word) if word.isdecimal() else int(value)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None
        if whole < least or (whole != value and not word.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word}: must be a whole number of at least {least}")
        return whole

    return parse


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenize(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
    from titanlite.data.prepare.chat import load_template

    return prepare(
        options.input,
        options.output,
        tokenizer,
        text_key=options.text_key,
        append_eos=options.append_eos,
        workers=options.workers,
        shard_tokens=options.shard_tokens,
        on_error=options.on_error,
        best_fit=options.best_fit,
        chat=load_template(options.tokenizer),
    )


def _report(manifest: dict[str, Any], output: Path) -> None:
    print(f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens, {len(manifest['shards'])} shards in {output}")
    if manifest["skipped"]:
        listing = output / "skipped.jsonl"
        print(f"{manifest['skipped']:,} skipped, listed in {listing}; the first:")
        with open(listing, encoding="utf-8") as lines:
            for _, line in zip(range(_SHOWN), lines, strict=False):
                entry = json.loads(line)
                print(f"  {describe_place(entry['file'], entry['line'])}: {entry['reason']}")
    print(f'training.dataset_path = "{os.path.abspath(output)}"')


if __name__ == "__main__":
    main()
