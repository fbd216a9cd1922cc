"""titanlite export-hf --checkpoint DIR --output DIR [--dtype bfloat16] [--assets DIR] [--shard-gib 5]
                   [--model NAME]

Writes the weights of a checkpoint in Hugging Face's format: safetensors files, config.json, generation_config.json and the
tokenizer. transformers' AutoModelForCausalLM.from_pretrained reads that folder. One tensor at a time is in memory.

DIR of --checkpoint is a checkpoint, or a run directory or folder of checkpoints, of which the newest is exported.
"""

import argparse
from pathlib import Path

from titanlite.errors import UserError
from titanlite.hf.export import export
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.options import command_parser
from titanlite.transforms.dtypes import DTYPES


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = export_parser("export-hf", __doc__)
    parser.add_argument("--shard-gib", type=float, default=5.0, help="maximum size of a file, in GiB (default: 5)")
    options = parser.parse_args()
    if not options.shard_gib > 0:
        raise UserError(f"--shard-gib {options.shard_gib}: must be above 0")
    source = checkpoints(options.checkpoint)[-1]
    dtype, shard = DTYPES.get(options.dtype), int(options.shard_gib * 2**30)
    files = export(source, options.output, dtype, shard, options.assets, named=options.model)
    size = sum(file.stat().st_size for file in files)
    print(f"{source} -> {options.output}: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 2**30:.2f} GiB")


def export_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """The options of both exports."""
    parser = command_parser(command, doc)
    parser.add_argument("--checkpoint", type=Path, required=True, help="such as outputs/run/checkpoint/step-00000100")
    parser.add_argument("--output", type=Path, required=True, help="must not exist yet")
    parser.add_argument("--assets", default="", help="folder of the tokenizer, if it has moved since the run")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: as stored)")
    parser.add_argument("--model", default="", help="module of the model, if it is no family of models/")
    return parser
