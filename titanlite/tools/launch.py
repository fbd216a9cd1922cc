"""titanlite launch CONFIG.toml [--section.key value ...]

Checks a configuration once and then starts the ranks of this node; run_train.sh calls it. The header of run_train.sh
explains the environment variables that say how many ranks there are and where: NGPU, NNODES, NODE_RANK and so on.
"""

import io
import os
import signal
import sys
from pathlib import Path

from titanlite.config.read import read_words
from titanlite.config.schema import Config
from titanlite.ground.run_files import CONFIG
from titanlite.launch import children, stop
from titanlite.launch.layout import read_layout
from titanlite.tools.check import check_here


def main() -> None:
    """The exit code is the run's: 0 done, 2 a fault in configuration or data, 75 stopped, else a failed rank's."""
    words = sys.argv[1:]
    layout, starter = read_layout(), int(os.environ.pop("TITANLITE_STARTER", "0"))  # the latter of api.py
    path, config = read_words(words, "titanlite launch CONFIG.toml [--section.key value ...]")
    if os.environ.pop("TITANLITE_TABLES", ""):  # of api.py too, whose file is temporary
        words[0] = str(Path(config.job.dump_folder) / CONFIG)

    import torch.distributed.tensor  # noqa: F401 - not before: the faults above need no torch, and the forks below share it

    from titanlite.launch.fork_server import ForkServer

    server = ForkServer("titanlite.train", "torch._dynamo")  # which PyTorch's optimizers import
    parent = os.getpid()
    if (check := os.fork()) == 0:  # in a child: what the check does to its process, above all CUDA, must not affect this one
        children.end_with_parent(parent)
        check_here(config, path, layout.local_ranks * layout.nodes, layout.local_ranks)
        sys.exit()
    try:
        from titanlite.launch.launcher import Launcher, launch  # while the check runs

        if code := os.waitstatus_to_exitcode(os.waitpid(check, 0)[1]):
            if code == -signal.SIGKILL:
                print("the check of the configuration was ended by SIGKILL, as when memory runs out", file=sys.stderr)
            sys.exit(code if code > 0 else 128 - code)
        launcher = Launcher(
            Path(config.job.dump_folder),
            lambda environment: server.start(run_rank, config, words, environment=environment),
            starter,
        )
        sys.exit(launch(layout, launcher, max(60.0, config.comm.train_timeout_seconds)))
    finally:
        server.close()


def run_rank(config: Config, words: list[str]) -> None:
    """A rank of a checked configuration, in a process of its own. words: of the command, for the record of the run."""
    stop.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    children.name_process(f"rank {os.environ['RANK']}")
    sys.argv = ["titanlite train", *words]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)

    from titanlite import train

    train.main(config)
