"""titanlite export-hf --checkpoint DIR --output DIR [--dtype bfloat16] [--assets DIR] [--shard-gib 5]
                   [--model NAME] [--weights ema]

Writes the weights of a checkpoint in Hugging Face's format: safetensors files, config.json and the tokenizer. transformers'
AutoModelForCausalLM.from_pretrained reads that folder. One tensor at a time is in memory.

DIR of --checkpoint is a checkpoint, or a run directory or folder of checkpoints, of which the newest is exported.
--weights ema uses the moving average of the weights (optimizer.ema_decay).
"""

import argparse
from collections.abc import Iterable

from titanlite.hf import folder
from titanlite.hf.export import export
from titanlite.tools.checkpoint import add_weights, checkpoints
from titanlite.tools.options import Real, command_parser, existing_folder, new_path, nonempty
from titanlite.transforms.dtypes import DTYPES


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    parser = export_parser("export-hf", __doc__, [name for name, dtype in DTYPES.items() if dtype in folder.DTYPES.values()])
    parser.add_argument("--shard-gib", type=Real(1e-6, 1e6), default=5.0, help="maximum size of a file, in GiB (default: 5)")
    options = parser.parse_args()
    source = checkpoints(options.checkpoint)[-1]
    dtype, shard = DTYPES.get(options.dtype), int(options.shard_gib * 2**30)
    assets, average = str(options.assets or ""), options.weights == "ema"
    files = export(source, options.output, dtype, shard, assets, named=options.model or "", average=average)
    size = sum(file.stat().st_size for file in files)
    print(f"{source} -> {options.output}: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 2**30:.2f} GiB")


def export_parser(command: str, doc: str | None, dtypes: Iterable[str]) -> argparse.ArgumentParser:
    """The options of both exports. dtypes: that the format has."""
    parser = command_parser(command, doc)
    add = parser.add_argument
    add("--checkpoint", type=existing_folder, required=True, help="such as outputs/run/checkpoint/step-00000100")
    add("--output", type=new_path, required=True, help="must not exist yet")
    add("--assets", type=existing_folder, help="folder of the tokenizer, if it has moved")
    add("--dtype", choices=list(dtypes), help="of the weights (default: as stored)")
    add("--model", type=nonempty, help="module of the model, if it is not a family of models/")
    add_weights(parser)
    return parser
