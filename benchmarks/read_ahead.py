"""Data loading in this checkout compared with another one: python -m benchmarks.read_ahead OTHER [--rounds 9]

OTHER: a checkout of another commit, such as `git worktree add OTHER COMMIT` creates. In each round every measurement runs once
in each checkout, in a process of its own, in alternating order. Ratios are medians over rounds of the ratio in a round; above
1, this checkout is slower. A step is measured in CPU time of the rank's process, which other processes hardly affect, starts in
wall time. The batches of both must be equal bit for bit.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# Workers, sequences in a rank's step, their length.
_CASES = ((0, 8, 256), (2, 8, 2048))
_VARIANTS: dict[str, dict[str, Any]] = {
    "pack": {},
    "pack, document_mask": {"document_mask": True},
    "best_fit, document_mask": {"document_policy": "best_fit", "document_mask": True},
}
_RESUMED = 1_000_000  # the step at which a run resumes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"PyTorch {torch.__version__}, {os.cpu_count()} cores, {args.rounds} rounds")
    print("| workers | rank's step | documents | CPU us a step | ratio | first batch, s | ratio | resumed, s | ratio |")
    print("|" + " - |" * 9)
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder))
        for workers, share, length in _CASES:
            for variant in _VARIANTS:
                pairs = []
                for number in range(args.rounds):
                    order = (here, args.other.absolute())[:: 1 if number % 2 else -1]
                    found = {root: _in(root, folder, share, length, variant, workers) for root in order}
                    pairs.append((found[here], found[args.other.absolute()]))
                assert all(ours["digest"] == theirs["digest"] for ours, theirs in pairs)
                cells = []
                for name, form in (("step", "{:.0f}"), ("first", "{:.3f}"), ("resumed", "{:.4f}")):
                    cells.append(form.format(statistics.median(ours[name] for ours, _ in pairs)))
                    cells.append(f"{statistics.median(ours[name] / theirs[name] for ours, theirs in pairs):.2f}")
                print(f"| {workers} | {share} x {length} | {variant} | {' | '.join(cells)} |", flush=True)


def _in(root: Path, folder: str, share: int, length: int, variant: str, workers: int) -> dict[str, Any]:
    """The measurements in a process of a checkout."""
    words = [json.dumps([folder, share, length, variant, workers])]
    environment = os.environ | {"PYTHONPATH": str(root), "TITANLITE_CACHE": f"{folder}/cache-{root.name}"}
    done = subprocess.run(
        [sys.executable, __file__, *words], cwd=root, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def _write(folder: Path) -> None:
    import numpy as np

    from tests.token_files import write_file

    random = np.random.default_rng(0)
    write_file(folder / "tokens", [random.integers(0, 60_000, 1000) for _ in range(20_000)])


def _measure(folder: str, share: int, length: int, variant: str, workers: int) -> dict[str, Any]:
    from tests.token_files import mix_of, opened
    from titanlite.config.schema import Config
    from titanlite.data.batches import Batches, StepDataset
    from titanlite.data.indexed import TokenFile

    training = {"seq_len": length, "local_batch_size": share, "global_batch_size": share, **_VARIANTS[variant]}
    config = Config.model_validate({"training": training, "dataloader": {"workers": workers}})
    data = mix_of([opened(TokenFile(Path(folder) / "tokens"))], config)
    digest, steps = hashlib.blake2b(), max(200, 2 * 4096 // share)

    def first_batch(step: int) -> tuple[Batches, float]:
        begin = time.perf_counter()
        source = Batches(StepDataset(config, data, (0, 1), first_step=step))
        batch = next(source)
        seconds = time.perf_counter() - begin
        for tensor in batch:
            digest.update(b"" if tensor is None else tensor.numpy().tobytes())
        return source, seconds

    source, first = first_batch(1)
    for _ in range(4 * workers):  # until all workers read
        next(source)
    begin = time.process_time()
    for _ in range(steps):
        next(source)
    step = (time.process_time() - begin) / steps
    digest.update(next(source).tokens.numpy().tobytes())
    source.close()
    source, resumed = first_batch(_RESUMED + 1)  # the fork server is already running
    source.close()
    return {"step": step * 1e6, "first": first, "resumed": resumed, "digest": digest.hexdigest()}


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        print(json.dumps(_measure(*json.loads(sys.argv[1]))))
    else:
        main()
