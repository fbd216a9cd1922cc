"""titanlite generate --checkpoint DIR --prompt "..." [--prompt "..."] [--max-new-tokens 128] [--temperature 1.0]
                   [--top-k 0] [--top-p 1.0] [--seed 0] [--tp 1] [--dtype bfloat16] [--tokenizer DIR]

Continues each prompt with the newest sound checkpoint of a run, or the one that DIR names, and prints prompt and continuation.
Prompt i draws by (seed, i), whatever the others are; --temperature 0 takes the likeliest token each time. --tp N splits the
model over N GPUs, or processes. Without --dtype the precision is that of the training, without --tokenizer it is the run's.
"""

import argparse
import sys
from pathlib import Path

import torch

from titanlite.errors import UserError
from titanlite.inference.generate import Sampling, continue_texts
from titanlite.inference.load import open_checkpoint
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.ranks import on_ranks
from titanlite.transforms.dtypes import DTYPES


def main() -> None:
    """Exit code 0, or 2 for what the user can mend."""
    try:
        asked = _parse(sys.argv[1:])
        source = checkpoints(asked.checkpoint)[-1]
        for text in on_ranks(asked.tp, _answers, source, asked):
            print(text, end="\n\n" if len(asked.prompt) > 1 else "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options of all commands that have a checkpoint answer."""
    parser = argparse.ArgumentParser(prog=f"titanlite {name}", allow_abbrev=False, description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--tokenizer", default="")
    return parser


def require_positive(asked: argparse.Namespace, *names: str) -> None:
    """Raises UserError for a number that is there and not at least 1."""
    for name in names:
        if (value := getattr(asked, name)) is not None and not value >= 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = command("generate", __doc__)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=Sampling().temperature)
    parser.add_argument("--top-k", type=int, default=Sampling().top_k)
    parser.add_argument("--top-p", type=float, default=Sampling().top_p)
    parser.add_argument("--seed", type=int, default=Sampling().seed)
    asked = parser.parse_args(words)
    require_positive(asked, "max_new_tokens", "tp")
    if not 0 <= asked.temperature < float("inf"):
        raise UserError(f"--temperature {asked.temperature}: must be 0 (the likeliest token) or a positive number")
    if asked.top_k < 0:
        raise UserError(f"--top-k {asked.top_k}: must be 0 (all tokens) or a number of tokens")
    if not 0 < asked.top_p <= 1:
        raise UserError(f"--top-p {asked.top_p}: must be above 0 and at most 1 (all tokens)")
    if asked.temperature == 0 and (asked.top_k or asked.top_p < 1 or asked.seed):
        raise UserError("--top-k, --top-p and --seed have no effect with --temperature 0, which takes the likeliest token")
    return asked


def _answers(device: torch.device, source: Path, asked: argparse.Namespace) -> list[str]:
    """Every prompt with its continuation."""
    found = open_checkpoint(source, device, asked.dtype, asked.tokenizer)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    return continue_texts(
        found.model, found.vocabulary, found.tokenizer, asked.prompt, asked.max_new_tokens, sampling, found.tp
    )


if __name__ == "__main__":
    main()
