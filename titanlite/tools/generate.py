"""titanlite generate DIR --prompt "..." [--prompt "..."] [--max-new-tokens 128] [--temperature 1.0] [--top-k 0]
                   [--top-p 1.0] [--seed 0] [--tp 1] [--dtype bfloat16] [--tokenizer DIR] [--model NAME]
                   [--weights ema]

Continues each prompt with the newest checkpoint of a run, one checkpoint, or a model in Hugging Face's format, and prints
prompt and continuation. DIR, or --checkpoint DIR, is the folder of the run, checkpoint or model. Sampling is seeded per prompt,
by --seed and the number of the prompt. --temperature 0 takes the most likely token each time. --tp N splits the model over N
GPUs, or processes. The defaults of --dtype and --tokenizer are those of the run or folder. For a run, --tokenizer is the new
path of model.hf_assets_path, if that has moved; another tokenizer is refused. --model names the module of the model, if it is
not a family of models/, or if config.json does not decide it. --weights ema uses the moving average of the weights
(optimizer.ema_decay). A damaged checkpoint is refused.
"""

import argparse
from pathlib import Path

import torch

from titanlite.checkpoint.whole import no_average
from titanlite.ground.errors import UserError
from titanlite.hf.folder import find_weights
from titanlite.inference.generate import Sampling, continue_texts
from titanlite.launch.local_ranks import on_ranks
from titanlite.parallel.tensor import split_faults
from titanlite.registry.limits import no_generation, refused_dimensions
from titanlite.tools.checkpoint import add_weights, checkpoints
from titanlite.tools.open_model import LoadedModel, family_at, is_hf_folder, open_model
from titanlite.tools.options import LOCAL_RANKS, SEED, TOKENS, Real, WholeNumber, command_parser, existing_folder, nonempty
from titanlite.transforms.dtypes import DTYPES

LONG = 24 * 3600  # seconds for what one rank does while the others wait: it may verify a file of hundreds of GB


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    options = _parse()
    source = model_source(options)
    for text in on_ranks(options.tp, _continuations, source, options, timeout_seconds=LONG):
        print(text, end="\n\n" if len(options.prompt) > 1 else "\n")


def inference_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """The options of the commands that run a model."""
    parser = command_parser(command, doc)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("dir", type=existing_folder, nargs="?")
    where.add_argument("--checkpoint", type=existing_folder)
    parser.add_argument("--model", type=nonempty)
    parser.add_argument("--tp", type=LOCAL_RANKS, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--tokenizer", type=existing_folder)
    add_weights(parser)
    return parser


def model_source(options: argparse.Namespace) -> Path:
    """The folder in Hugging Face's format, or the newest checkpoint, that the options name.

    Raises UserError, also for a model whose family declares that it cannot generate.
    """
    folder = options.dir or options.checkpoint
    source = folder if is_hf_folder(folder) else checkpoints(folder)[-1]
    family = family_at(source, options.model or "", str(options.tokenizer or ""))
    if reason := no_generation(family.limits):
        raise UserError(f"{source}: {family.module.__name__} cannot generate or score: it {reason}")
    if options.tp > 1:
        name, tp = family.module.__name__, options.tp
        refused = [f"--tp {tp}: {name} {reason}" for reason in refused_dimensions(family.limits, {"tp": tp}).values()]
        if refused := refused or [*split_faults(family, family.on_meta(), tp, name, f"--tp {tp}")]:
            raise UserError("\n".join(refused))
    if is_hf_folder(source):
        if options.weights == "ema":
            raise no_average(source)
        find_weights(folder, family, family.on_meta())
    return source


def open_as(options: argparse.Namespace, source: Path, device: torch.device) -> LoadedModel:
    """Opens the model of `model_source` with the options of `inference_parser`."""
    average = options.weights == "ema"
    return open_model(source, device, options.dtype, str(options.tokenizer or ""), options.model or "", average)


def _parse() -> argparse.Namespace:
    parser = inference_parser("generate", __doc__)
    parser.add_argument("--prompt", type=str, action="append", required=True)
    parser.add_argument("--max-new-tokens", type=TOKENS, default=128)
    parser.add_argument("--temperature", type=Real(1e-6, 1e6, zero=True), default=Sampling().temperature)
    parser.add_argument("--top-k", type=WholeNumber(0, 2**24), default=Sampling().top_k)
    parser.add_argument("--top-p", type=Real(1e-6, 1), default=Sampling().top_p)
    parser.add_argument("--seed", type=SEED, default=Sampling().seed)
    options = parser.parse_args()
    if options.temperature == 0 and (options.top_k or options.top_p < 1 or options.seed):
        raise UserError("--top-k, --top-p and --seed have no effect with --temperature 0, which takes the most likely token")
    return options


def _continuations(device: torch.device, source: Path, options: argparse.Namespace) -> list[str]:
    """Each prompt with its continuation."""
    opened = open_as(options, source, device)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    return continue_texts(opened.model, opened.tokenizer, options.prompt, options.max_new_tokens, sampling)
