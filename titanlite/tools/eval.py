"""titanlite eval --checkpoint DIR --tasks hellaswag,arc_easy [--include-path DIR] [--num-fewshot N] [--limit N]
               [--batch-size 8] [--max-length N] [--output FILE.json] [--tp 1] [--dtype bfloat16] [--tokenizer DIR]

Measures the newest sound checkpoint of a run, or the one that DIR names, on tasks of EleutherAI's lm-evaluation-harness, prints
its table, and writes all its figures to --output. It comes with pip install 'titanlite[eval]'. --include-path names a folder
with tasks of your own. --max-length is how many tokens the model is shown at most, by default as many as in its training.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from titanlite.errors import UserError
from titanlite.files import replace_file
from titanlite.inference.load import open_checkpoint
from titanlite.tools.checkpoint import checkpoints
from titanlite.tools.generate import command, require_positive
from titanlite.tools.ranks import on_ranks


def main() -> None:
    """Exit code 0, or 2 for what the user can mend."""
    try:
        asked = _parse(sys.argv[1:])
        source = checkpoints(asked.checkpoint)[-1]
        _check_tasks(asked)
        table, results = on_ranks(asked.tp, _evaluate, source, asked, timeout_seconds=24 * 3600)
        if asked.output:
            replace_file(asked.output, json.dumps(results, indent=1, default=repr) + "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{source}\n{table}")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = command("eval", __doc__)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--include-path", type=Path)
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(words)
    require_positive(asked, "tp", "limit", "batch_size", "max_length")
    if asked.num_fewshot is not None and asked.num_fewshot < 0:
        raise UserError(f"--num-fewshot {asked.num_fewshot}: must be at least 0")
    if asked.include_path and not asked.include_path.is_dir():
        raise UserError(f"--include-path {asked.include_path}: no such folder")
    if asked.output and (asked.output.is_dir() or not asked.output.absolute().parent.is_dir()):
        raise UserError(f"--output {asked.output}: must be a file in a folder that is there")
    return asked


def _check_tasks(asked: argparse.Namespace) -> None:
    """Raises UserError for a task that the harness does not have, and where there is no harness."""
    tasks = _tasks(asked.include_path)
    for name in asked.tasks.split(","):
        if not tasks.match_tasks([name]):
            raise UserError(f'--tasks: there is no task "{name}"; lm-eval ls tasks lists them, --include-path adds your own')


def _tasks(include: Path | None) -> Any:
    try:
        from lm_eval.tasks import TaskManager  # seconds, and an optional package
    except ImportError as error:
        raise UserError(f"titanlite eval needs lm-eval: pip install 'titanlite[eval]' ({error})") from None
    return TaskManager(include_path=str(include) if include else None)


def _evaluate(device: torch.device, source: Path, asked: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(table, all figures). All ranks ask the same questions in the same order; the first one shows how far it has come."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import make_table

    from titanlite.inference.harness import Harness

    opened = open_checkpoint(source, device, asked.dtype, asked.tokenizer)
    model = Harness(opened, asked.max_length or opened.seq_len, asked.batch_size)
    quiet = contextlib.redirect_stderr(open(os.devnull, "w")) if torch.distributed.get_rank() else contextlib.nullcontext()
    with quiet:
        results = simple_evaluate(
            model,
            tasks=asked.tasks.split(","),
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            task_manager=_tasks(asked.include_path),
        )
    assert results is not None
    return make_table(results), {key: results[key] for key in ("results", "configs", "versions", "n-shot", "samples")}


if __name__ == "__main__":
    main()
