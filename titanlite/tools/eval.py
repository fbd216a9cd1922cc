"""titanlite eval DIR --tasks hellaswag,arc_easy [--include-path DIR] [--num-fewshot N] [--limit N] [--batch-size 8]
               [--max-length N] [--output FILE.json] [--tp 1] [--dtype bfloat16] [--tokenizer DIR] [--model NAME]
               [--weights ema] [--confirm-run-unsafe-code]

Evaluates the newest checkpoint of a run, one checkpoint, or a model in Hugging Face's format on tasks of EleutherAI's
lm-evaluation-harness (pip install 'titanlite[eval]'), prints the table of results, and writes all results to --output. DIR, or
--checkpoint DIR, is the folder of the run, checkpoint or model. --include-path names a folder with your own tasks. --max-length
limits the tokens that the model reads at once (default: the sequence length of training, or max_position_embeddings of
config.json). --model names the module of the model, if it is not a family of models/, or if config.json does not decide it.
--weights ema uses the moving average of the weights (optimizer.ema_decay). A damaged checkpoint is refused.
--confirm-run-unsafe-code allows tasks that run what the model writes, such as humaneval; the harness refuses them without it.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from titanlite.ground.errors import UserError
from titanlite.ground.files import replace_file
from titanlite.launch.local_ranks import on_ranks
from titanlite.tools.generate import LONG, inference_parser, model_source, open_as
from titanlite.tools.options import TOKENS, WholeNumber, existing_folder, new_file, nonempty


def main() -> None:
    """Exit code 0, or 2 for a user error."""
    options = _parse()
    source = model_source(options)
    options.tasks = _named_tasks(options)
    table, results = on_ranks(options.tp, _evaluate, source, options, timeout_seconds=LONG)
    if options.output:
        replace_file(options.output, json.dumps(results, indent=1, default=str) + "\n")
    print(f"{source}\n{table}")


def _parse() -> argparse.Namespace:
    parser = inference_parser("eval", __doc__)
    parser.add_argument("--tasks", type=nonempty, required=True)
    parser.add_argument("--include-path", type=existing_folder)
    parser.add_argument("--num-fewshot", type=WholeNumber(0, 1000))
    parser.add_argument("--limit", type=WholeNumber(1, 10**9))
    parser.add_argument("--batch-size", type=WholeNumber(1, 2**16), default=8)
    parser.add_argument("--max-length", type=TOKENS)
    parser.add_argument("--output", type=new_file)
    parser.add_argument("--confirm-run-unsafe-code", action="store_true")
    return parser.parse_args()


def _named_tasks(options: argparse.Namespace) -> list[str]:
    """The tasks that the names and patterns of --tasks match.

    Raises UserError for one that matches no task of the harness, and where the harness is not installed.
    """
    tasks, found = _tasks(options.include_path), dict[str, None]()
    for name in options.tasks.split(","):
        if not (matched := tasks.match_tasks([name])):
            raise UserError(f'--tasks: there is no task "{name}"; lm-eval ls tasks lists them, --include-path adds your own')
        found |= dict.fromkeys(matched)
    return [*found]


def _tasks(include: Path | None) -> Any:
    try:
        from lm_eval.tasks import TaskManager  # an optional package, and its import takes seconds

        import titanlite.tools.harness  # noqa: F401  # whose parts an older lm-eval lacks
    except ImportError as error:
        raise UserError(f"titanlite eval needs lm-eval: pip install 'titanlite[eval]' ({error})") from None
    return TaskManager(include_path=str(include) if include else None)


def _evaluate(device: torch.device, source: Path, options: argparse.Namespace) -> tuple[str, dict[str, Any]] | None:
    """(table, all results), on rank 0. All ranks evaluate the same requests in the same order; rank 0 shows the progress."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import make_table

    from titanlite.tools.harness import Harness

    opened = open_as(options, source, device)
    options.max_length = options.max_length or opened.seq_len
    model = Harness(opened, options.max_length, options.batch_size)
    quiet = contextlib.redirect_stderr(open(os.devnull, "w")) if torch.distributed.get_rank() else contextlib.nullcontext()
    with quiet:
        results = simple_evaluate(
            model,
            tasks=options.tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            task_manager=_tasks(options.include_path),
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        )
    if results is None:
        return None
    kept = {key: results[key] for key in ("results", "configs", "versions", "n-shot", "n-samples", "samples")}
    return make_table(results), {"titanlite": {"source": source, **vars(options)}, **kept}
