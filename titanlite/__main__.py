"""`titanlite COMMAND ...`: each command is a file of titanlite/tools/, but for `train`, which is the loop itself."""

import difflib
import gc
import importlib
import os
import signal
import sys
from types import ModuleType

from titanlite.ground.errors import HelpRequested, UserError
from titanlite.launch import failure, stop

COMMANDS = {
    "launch": ("titanlite.tools.launch", "check a configuration, then start its ranks; run_train.sh calls this"),
    "train": ("titanlite.train", "train in this process, alone or as a rank of torchrun"),
    "check": ("titanlite.tools.check", "find every fault of a configuration without training"),
    "tokenize": ("titanlite.tools.tokenize", "turn text into token files for training, with many processes"),
    "data": ("titanlite.tools.data", "print what each source holds, or the text of a step"),
    "verify": ("titanlite.tools.verify", "train a few steps on several meshes and compare every gradient"),
    "checkpoint": ("titanlite.tools.checkpoint", "list, verify or show the checkpoints of a run"),
    "check-model": ("titanlite.tools.check_model", "prove that a model file shards, compiles, checkpoints and converts"),
    "import-hf": ("titanlite.tools.import_hf", "make a checkpoint from a model in Hugging Face's format"),
    "export-hf": ("titanlite.tools.export_hf", "write a checkpoint's weights in Hugging Face's format"),
    "export-torch": ("titanlite.tools.export_torch", "write a checkpoint's weights into one PyTorch file"),
    "replay": ("titanlite.tools.replay", "repeat one step of a run, and print its norms layer by layer"),
    "generate": ("titanlite.tools.generate", "continue prompts with a checkpoint"),
    "eval": ("titanlite.tools.eval", "evaluate a checkpoint on tasks of lm-eval"),
    "convert-config": ("titanlite.tools.convert_config", "write a configuration of torchtitan with titanlite's keys"),
    "estimate": ("titanlite.tools.estimate", "predict memory, FLOPs and traffic for many ranks on one machine"),
    "plan": ("titanlite.tools.plan", "predict the fastest mesh for so many GPUs, and its speed"),
}
USAGE = "usage: titanlite COMMAND ...; each command has --help\n\n" + "\n".join(
    f"  {command:<14} {meaning}" for command, (_, meaning) in COMMANDS.items()
)


def main() -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # from the first moment: imports take seconds
    _open_standard_streams()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    # `titanlite data show ... | head` ends quietly. But where another rank or machine dies, a broken connection must be an
    # exception: the signal would end its neighbors too, without a word.
    if name not in ("launch", "train"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name == "train":
        stop.listen()
    elif name == "launch":
        stop.leave_at_once()
    sys.argv = [f"titanlite {name}", *sys.argv[2:]]
    try:
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"titanlite {name}: no such command{hint}\n\n{USAGE}")
        _imported(COMMANDS[name][0]).main()
    except HelpRequested as request:
        from titanlite.tools.help import print_help  # not at the top: other commands need no schema

        print_help(request.values)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        print(failure.report(error, sys.argv[0]), file=sys.stderr)
        sys.exit(failure.code_of(error))


def _open_standard_streams() -> None:
    """Opens standard streams that are closed, as by `2>&-`: a file of the run would get the number of one, and its messages."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))


def _imported(module: str) -> ModuleType:
    """Imports a command without the garbage collector, which would take a sixth of a start to search PyTorch's 400,000 objects.

    They are never garbage, so it leaves them out later too.
    """
    gc.disable()
    found = importlib.import_module(module)
    gc.freeze()
    gc.enable()
    return found


if __name__ == "__main__":
    main()
