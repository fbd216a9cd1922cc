"""titanlite export-hf --checkpoint DIR --output DIR [--dtype bfloat16]

Writes the weights of a checkpoint in Hugging Face's format: safetensors files, config.json, generation_config.json and the
tokenizer. transformers' AutoModelForCausalLM.from_pretrained reads that folder as it is. Only one
tensor is in memory at a time.

DIR of --checkpoint is a checkpoint, or a run directory or a folder of checkpoints, whose newest is taken.
"""

import argparse
import sys
from pathlib import Path

import torch

from titanlite.errors import UserError
from titanlite.hf.export import export
from titanlite.tools.checkpoint import checkpoints

DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    """Exit code 0, or 2 for what the user can mend."""
    parser = command("export-hf", __doc__)
    parser.add_argument("--shard-gib", type=float, default=5.0, help="size of a file at most, in GiB (default: 5)")
    words = parser.parse_args()
    try:
        if not words.shard_gib > 0:
            raise UserError(f"--shard-gib {words.shard_gib}: must be above 0")
        source = checkpoints(words.checkpoint)[-1]
        files = export(source, words.output, dtype_of(words.dtype), int(words.shard_gib * 2**30), words.assets)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    size = sum(file.stat().st_size for file in files)
    print(f"{source} -> {words.output}: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 2**30:.2f} GiB")


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that all exports have."""
    parser = argparse.ArgumentParser(prog=f"titanlite {name}", description=description, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkpoint", type=Path, required=True, help="such as outputs/run/checkpoint/step-00000100")
    parser.add_argument("--output", type=Path, required=True, help="what is written; must not be there yet")
    parser.add_argument("--assets", default="", help="folder of the tokenizer, where it is not where the run had it")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
    return parser


def dtype_of(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


if __name__ == "__main__":
    main()
