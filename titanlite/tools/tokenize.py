"""titanlite tokenize --input GLOB... --output DIR --tokenizer PATH [options]

Tokenizes text, JSON, CSV, Parquet, saved datasets, datasets of the Hugging Face hub, and URLs into the token files of training.
"""

import argparse
import itertools
import json
import logging
import os
from typing import Any

from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.encode import Skipped
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import BadDocument, describe_location
from titanlite.data.tokenizer import LoadedTokenizer, load_tokenizer
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import read_lines
from titanlite.launch.layout import cores
from titanlite.tools.options import WholeNumber, command_parser, existing_folder, new_path, nonempty

_SHOWN = 10  # skipped entries that the terminal lists


def main() -> None:
    """Exit code 0: DIR is complete; 2: a user error; 130: Ctrl-C."""
    options = _parse()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("titanlite").setLevel(logging.INFO)
    tokenizer = load_tokenizer(str(options.tokenizer), "--tokenizer", options.add_bos)
    try:
        manifest = prepare(
            options.input,
            options.output,
            tokenizer,
            text_key=options.text_key,
            append_eos=options.append_eos,
            workers=options.workers,
            shard_tokens=options.shard_tokens,
            on_error=options.on_error,
            chat=load_template(str(options.tokenizer)),
        )
    except BadDocument as error:
        raise UserError(f"{error}\n--on-error skip skips such entries, lists them, and continues from here") from None
    _report(manifest, options, tokenizer)


def _parse() -> argparse.Namespace:
    parser = command_parser("tokenize", __doc__)
    add = parser.add_argument
    add("--input", type=nonempty, nargs="+", action="extend", required=True, metavar="GLOB",
        help="files, folders, patterns, URLs, folders of saved datasets, hub:NAME[:CONFIG] or hub:NAME:[CONFIG]:SPLIT; "
             ".jsonl, .json, .csv, .tsv and .parquet hold one document per line, entry or row, a file of text or source code "
             "is one")  # fmt: skip
    add("--output", required=True, type=new_path, metavar="DIR", help="a new folder")
    add("--tokenizer", required=True, type=existing_folder, metavar="PATH", help="a folder with tokenizer.json")
    add("--workers", type=WholeNumber(1, 1024), default=cores(), metavar="N", help="(default: one per processor)")
    add("--text-key", type=nonempty,
        help='the key or column of the text (default: "text", or "messages" for a chat in an entry without one)')  # fmt: skip
    add("--add-bos", action=argparse.BooleanOptionalAction, help="begin each document with the beginning-of-text token of the "
        "tokenizer, as training.add_bos (default: as the tokenizer does by itself)")  # fmt: skip
    add("--append-eos", action="store_true", help="append the end-of-text id to each text")
    add("--shard-tokens", type=WholeNumber(1, 10**12), default=10**9, metavar="N", help="at most (default: 1e9)")
    add("--on-error", choices=("fail", "skip"), default="fail",
        help="what to do with an entry that is not a document (default: fail); skipped entries are listed")  # fmt: skip
    return parser.parse_args()


def _report(manifest: dict[str, Any], options: argparse.Namespace, tokenizer: LoadedTokenizer) -> None:
    output = options.output
    print(f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens, {len(manifest['shards'])} shards in {output}")
    if manifest["skipped"]:
        listing = output / "skipped.jsonl"
        print(f"{manifest['skipped']:,} skipped, listed in {listing}; the first:")
        for entry in itertools.islice(read_lines(listing, Skipped), _SHOWN):
            print(f"  {describe_location(entry['file'], entry['line'])}: {entry['reason']}")
    print(f'training.dataset_path = "{os.path.abspath(output)}"')
    if options.add_bos is not None:
        print(f"training.add_bos = {json.dumps(options.add_bos)}")
    end = tokenizer.spelled([tokenizer.end_of_text])
    if not options.append_eos:
        end = f"nothing; --append-eos ends them with {end}, as training does with text that it tokenizes itself"
    texts = "texts, except chats, which end as their template says," if manifest["chats"] else "texts"
    print(f"{texts} begin with {tokenizer.spelled(tokenizer.beginning)} and end with {end}")
