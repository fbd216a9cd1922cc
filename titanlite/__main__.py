"""`titanlite COMMAND ...`: each command is a file of titanlite/tools/, but for `train`, which is the loop itself."""

import importlib
import os
import signal
import sys

from titanlite.launch import stop

COMMANDS = {
    "train": ("titanlite.train", "train in this process (run_train.sh starts several)"),
    "check": ("titanlite.tools.check", "find every fault of a configuration without training"),
    "tokenize": ("titanlite.tools.tokenize", "turn text into the token files that training reads, with many processes"),
    "launch": ("titanlite.launch.launcher", "torchrun, as run_train.sh starts it"),
    "data": ("titanlite.tools.data", "show the text of a step, or what there is in each source and how much is used"),
    "verify": ("titanlite.tools.verify", "train a few steps on several meshes and compare them, gradient by gradient"),
    "checkpoint": ("titanlite.tools.checkpoint", "list, verify or show the checkpoints of a run"),
    "check-model": ("titanlite.tools.check_model", "prove that a model file shards, compiles, checkpoints and converts"),
    "import-hf": ("titanlite.tools.import_hf", "make a checkpoint of a model in Hugging Face's format"),
    "export-hf": ("titanlite.tools.export_hf", "write a checkpoint's weights in Hugging Face's format"),
    "export-torch": ("titanlite.tools.export_torch", "write a checkpoint's weights into one file of PyTorch"),
    "replay": ("titanlite.tools.replay", "do one step of a run again, and print its norms layer by layer"),
    "generate": ("titanlite.tools.generate", "continue prompts with a checkpoint"),
    "eval": ("titanlite.tools.eval", "measure a checkpoint on tasks of lm-eval"),
    "estimate": ("titanlite.tools.estimate", "build and shard a model for many ranks on one machine; times and bytes"),
}


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # from the first moment: imports take seconds
    sys.path.append(os.getcwd())  # model modules of the user's own
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print("usage: titanlite COMMAND ...; with --help a command says what it takes\n", file=sys.stderr)
        for command, (_, meaning) in COMMANDS.items():
            print(f"  {command:<12} {meaning}", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    if name == "train":
        stop.listen()
    elif name == "launch":
        stop.leave_at_once()
    sys.argv = [f"titanlite {name}", *sys.argv[2:]]
    importlib.import_module(COMMANDS[name][0]).main()


if __name__ == "__main__":
    main()
