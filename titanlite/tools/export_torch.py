"""titanlite export-torch --checkpoint DIR --output FILE.pt [--dtype bfloat16] [--assets DIR] [--model NAME] [--weights ema]

Writes the weights of a checkpoint into one file: {our parameter name: tensor}, as the model's load_state_dict takes it. Read it
with torch.load(FILE, weights_only=True). All weights are in memory at once; export-hf needs memory for one tensor.

DIR of --checkpoint is a checkpoint, or a run directory or folder of checkpoints, of which the newest is exported.
--weights ema uses the moving average of the weights (optimizer.ema_decay).
"""

import torch

from titanlite.checkpoint.storage import checked_file
from titanlite.checkpoint.whole import Stored
from titanlite.ground.files import publish, start_output, writing
from titanlite.hf.export import Exported
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.export_hf import export_parser
from titanlite.transforms.dtypes import DTYPES


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    options = export_parser("export-torch", __doc__, DTYPES).parse_args()
    unfinished = start_output(options.output)
    with writing(options.output):
        source = checkpoints(options.checkpoint)[-1]
        stored = Stored(source, average=options.weights == "ema")
        exported = Exported(stored, DTYPES.get(options.dtype), str(options.assets or ""), options.model or "")
        tensors = {name: exported.read_tensor(name) for name in exported.shapes}
        # load_state_dict needs a tied parameter under each of its names; the file stores it once
        tensors |= {name: tensors[first] for name, first in exported.tied.items()}
        with checked_file(unfinished) as file:
            torch.save(tensors, file)
        publish(unfinished, options.output)
    print(f"{source} -> {options.output}: {len(tensors)} tensors, {options.output.stat().st_size / 2**30:.2f} GiB")
