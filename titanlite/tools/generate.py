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
import torch.distributed as dist

from titanlite.checkpoint import load
from titanlite.data.sources import open_tokenizer
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import UserError
from titanlite.generate import Sampling, continue_texts
from titanlite.inference import family_of, load_model
from titanlite.mesh import DIMENSIONS, build_mesh
from titanlite.parallelize import DTYPES
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.ranks import on_ranks


def main() -> None:
    try:
        asked = _parse(sys.argv[1:])
        source = checkpoints(asked.checkpoint)[-1]
        for text in on_ranks(asked.tp, _answers, source, asked):
            print(text, end="\n\n" if len(asked.prompt) > 1 else "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="titanlite generate", allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=Sampling().temperature)
    parser.add_argument("--top-k", type=int, default=Sampling().top_k)
    parser.add_argument("--top-p", type=float, default=Sampling().top_p)
    parser.add_argument("--seed", type=int, default=Sampling().seed)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--tokenizer")
    asked = parser.parse_args(words)
    for name in ("max_new_tokens", "tp"):
        if getattr(asked, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(asked, name)}: must be at least 1")
    if not 0 <= asked.temperature < float("inf"):
        raise UserError(f"--temperature {asked.temperature}: must be 0 (the likeliest token) or a positive number")
    if asked.top_k < 0 or not 0 < asked.top_p <= 1:
        raise UserError(
            f"--top-k {asked.top_k} --top-p {asked.top_p}: must be at least 0 (all), and above 0 and at most 1 (all)"
        )
    if asked.temperature == 0 and (asked.top_k or asked.top_p < 1 or asked.seed):
        raise UserError("--top-k, --top-p and --seed have no effect with --temperature 0, which takes the likeliest token")
    return asked


def _answers(device: torch.device, source: Path, asked: argparse.Namespace) -> list[str]:
    """Every prompt with its continuation."""
    found = load.verified(source)
    family, config = family_of(source, found)
    degrees = {**dict.fromkeys(DIMENSIONS, 1), "tp": dist.get_world_size()}
    tp = build_mesh(degrees, device.type)["tp"]
    dtype = DTYPES[asked.dtype or config.training.mixed_precision_param]
    loaded = load_tokenizer(asked.tokenizer, "--tokenizer") if asked.tokenizer else open_tokenizer(config.model.hf_assets_path)
    model = load_model(source, found, family, config, dtype, device, tp)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
    return continue_texts(model, family.config.vocab_size, loaded, asked.prompt, asked.max_new_tokens, sampling, tp.size())


if __name__ == "__main__":
    main()
