"""Training from Python: `run` starts ranks as run_train.sh does; `Run` reads what a run has left in its folder.

    import titanlite

    run = titanlite.run("train_configs/llama_debug.toml", training={"steps": 50}, job={"dump_folder": "outputs/mine"})
    run.metrics()["loss"]
    run.generate("def main(")

The ranks are processes of their own, so this works in notebooks, whose state they do not share. What they use of your code,
such as a model family, is named as on the command line, and stands in a file.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.decoder import Decoder
from titanlite.checkpoint.tensors import model_tensors
from titanlite.checkpoint.whole import Stored
from titanlite.config.read import read_config, toml_key, toml_value
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.ground.run_files import CONFIG, METRICS, read_reports
from titanlite.hf.export import Exported
from titanlite.inference.generate import Sampling, continue_texts
from titanlite.registry.family import module_name
from titanlite.registry.source import edited_file
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.open_model import build

_SCRIPT = Path(__file__).parents[1] / "run_train.sh"  # sets what makes ranks faster; an installed wheel has none
_LAST_LINES = 30  # of the log, in the message of a run that has failed


def run(config: str | Path | Mapping[str, Any], *, ranks: int | None = None, **sections: Any) -> "Run":
    """Trains to the end, and prints the log as it comes. -> the run's folder.

    config: a TOML file, or its tables as a dictionary, whose `base` is relative to the current folder. sections: values that
    go before those of the file, as options do: `optimizer={"lr": 1e-3}`; None is the default of a key. ranks: processes on
    this machine; None: NGPU, else a rank for each GPU, or one. A run whose folder has a checkpoint resumes from it.

    Raises UserError for a fault in the configuration or data, and RuntimeError for a run that failed or was stopped before its
    last step. KeyboardInterrupt, of Ctrl-C or of a notebook's stop button, ends the ranks. If this process is killed, they
    save and stop, as by SIGTERM.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(config, Mapping):
            file = Path(folder) / "config.toml"
            file.write_text(_toml_of(config), encoding="utf-8")
        else:
            file = Path(config)
        options = [option for section, keys in sections.items() for option in _options(section, keys)]
        resolved = read_config(file, options)  # refuses unknown keys without starting anything
        command = [str(_SCRIPT)] if _SCRIPT.is_file() else [sys.executable, "-m", "titanlite", "launch"]
        number = os.environ.get("NGPU") or max(1, torch.cuda.device_count()) if ranks is None else ranks
        own = {"NGPU": str(number), "PYTHON": sys.executable, "TITANLITE_STARTER": str(os.getpid())}
        if isinstance(config, Mapping):
            own["TITANLITE_TABLES"] = "1"  # the file does not outlive the run
        _follow([*command, str(file), *options], os.environ | own)
    return Run(resolved.job.dump_folder)


def _toml_of(tables: Mapping[str, Any]) -> str:
    """The text of a TOML file with these tables. What is no table is a line of its own, such as `training.steps = 5`."""
    lines = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            keys = {key: _given(name, key, each) for key, each in value.items()}
            lines.append(f"{toml_key(name)} = {toml_value(keys)}\n")
        elif value is not None:
            if name == "base" and value and isinstance(value, str | Path):
                value = os.path.abspath(value)
            lines.append(f"{'.'.join(map(toml_key, name.split('.')))} = {toml_value(value)}\n")
    return "".join(lines)


def _options(section: str, keys: Any) -> list[str]:
    """The options for a section. What is no table is one option, such as `--training.steps=5`."""
    if not isinstance(keys, Mapping):
        return [f"--{section}={_option(*section.partition('.')[::2], keys)}"]
    return [f"--{section}.{key}={_option(section, key, value)}" for key, value in keys.items()]


def _given(section: str, key: str, value: Any) -> Any:
    """None in model.overrides is "none", a dimension like any other; in other tables it is an entry that is not given."""
    return _worded(value) if (section, key) == ("model", "overrides") and value is not None else value


def _worded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _worded(each) for key, each in value.items()}
    return "none" if value is None else value


def _option(section: str, key: str, value: Any) -> str:
    """A value as the text of an option; for None the default of the key."""
    if value is None:
        value = getattr(getattr(Config(), section, None), key, None)
    if value is None:
        return "none"
    return os.fspath(value) if isinstance(value, str | os.PathLike) else toml_value(_given(section, key, value))


def _follow(command: list[str], environment: dict[str, str]) -> None:
    """Runs a launcher and prints its lines, on the standard output of a notebook too. Raises as `run` does."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    # errors: a byte of the log that is no text does not end the run
    launcher = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    assert launcher.stdout is not None
    try:
        for line in launcher.stdout:
            print(line, end="", flush=True)
            last.append(line)
        code = launcher.wait()
    except BaseException:  # a notebook's interrupt does not reach the launcher; SIGINT ends its ranks without a last checkpoint
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        raise
    if code == 2:
        raise UserError("".join(last).rstrip())
    if code == 75:
        raise RuntimeError("the run was stopped, and has saved a checkpoint; call run again to continue")
    if code:
        raise RuntimeError(f"the run ended with code {code}:\n{''.join(last).rstrip()}")


class Run:
    """A run's folder, while it trains or afterwards. folder: `job.dump_folder`, or one that holds checkpoints.

    Raises UserError, here and in each method, for a folder or file that is not there, or that is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"{folder}: no such folder")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def config(self) -> Config:
        """The resolved configuration of the latest start."""
        return read_config(self.folder / CONFIG, [])

    def metrics(self) -> dict[str, list[Any]]:
        """The reports as columns: "step", "loss", "lr" and so on. A report without a value has None there.

        `pandas.DataFrame(run.metrics())` is a table.
        """
        reports = read_reports(self.folder / METRICS)
        names = dict.fromkeys(name for report in reports for name in report)
        return {name: [report.get(name) for report in reports] for name in names}

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first. At least one."""
        return checkpoints(self.folder)

    def model(self, checkpoint: str | Path | None = None, name: str = "", assets: str | Path = "") -> Decoder:
        """The model of a checkpoint, the newest by default, in float32 on the CPU, in evaluation mode and in this process.

        name: the module of a model that is no family of models/. assets: the folder of the tokenizer, if it has moved.
        `model.head(model(tokens, SeqInfo(positions)))` are logits (models/decoder.py). Adapters are merged.
        """
        return _loaded(self._opened(checkpoint, name, assets))

    def generate(
        self,
        *prompts: str,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        checkpoint: str | Path | None = None,
        name: str = "",
        assets: str | Path = "",
    ) -> list[str]:
        """Each prompt with its continuation, by `model(checkpoint, name, assets)`, in this process.

        sampling: temperature, top_k, top_p and seed.
        """
        exported = self._opened(checkpoint, name, assets)
        tokenizer = exported.tokenizer()
        if tokenizer is None:
            raise UserError(f"{self.folder}: has no tokenizer; name its folder with assets=")
        return continue_texts(_loaded(exported), tokenizer, prompts, max_new_tokens, sampling or Sampling())

    def _opened(self, checkpoint: str | Path | None, name: str, assets: str | Path) -> Exported:
        stored = Stored(Path(checkpoint) if checkpoint else self.checkpoints()[-1])
        named = name or stored.manifest.numbers["config"].get("model", {}).get("name", "")
        imported = sys.modules.get(module_name(named))
        if imported and (file := edited_file(imported)):
            remedy = "restart it (in a notebook, its kernel), since Python does not import a module again"
            raise UserError(f"{file}: was edited after this process had imported it; {remedy}")
        return Exported(stored, torch.float32, str(assets), name)


def _loaded(exported: Exported) -> Decoder:
    model = build(exported.family, Config(), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for name, tensor in model_tensors(model).items():
            tensor.copy_(exported.read_tensor(name.removeprefix("model.")))
    return model.eval()
