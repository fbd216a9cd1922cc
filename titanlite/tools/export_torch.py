"""titanlite export-torch --checkpoint DIR --output FILE.pt [--dtype bfloat16]

Writes the weights of a checkpoint into one file: {our parameter name: tensor}, as the model's load_state_dict takes it, read by
torch.load(FILE, weights_only=True). All weights are in memory at once; export-hf needs room for one tensor.

DIR of --checkpoint is a checkpoint, or a run directory or a folder of checkpoints, whose newest is taken.
"""

import os
import sys

import torch

from titanlite.checkpoint.whole import Stored
from titanlite.errors import UserError
from titanlite.hf.export import Exported
from titanlite.hf.folder import tied_names
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.export_hf import command, dtype_of


def main() -> None:
    """Exit code 0, or 2 for what the user can mend."""
    words = command("export-torch", __doc__).parse_args()
    output, unfinished = words.output, words.output.with_name(f".{words.output.name}.unfinished")
    try:
        if output.exists():
            raise UserError(f"{output}: is there already; name another output, or remove it")
        source = checkpoints(words.checkpoint)[-1]
        exported = Exported(Stored(source), dtype_of(words.dtype), words.assets)
        tensors = {name: exported.read_tensor(name) for name in exported.names}
        # a tied parameter under each of its names, as load_state_dict wants it; the file holds it once
        tensors |= {name: tensors[first] for name, first in tied_names(exported.model).items()}
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(output)
        except OSError as error:
            raise UserError(f"{output}: cannot be written: {error}") from None
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{source} -> {output}: {len(tensors)} tensors, {output.stat().st_size / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
