"""Importing a large model: python -m benchmarks.hf_import [--flavor 8b] [--ranks 2] [--folder DIR]

Writes a folder in Hugging Face's format with random bfloat16 weights of a Llama's size (8b: 16 GB, in files of 5 GiB), imports
it with `titanlite import-hf`, compares every tensor of the checkpoint with the file, and prints the peak memory of a rank.
Needs disk space for twice the size of the model.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

from models import llama3
from titanlite.checkpoint.tensors import model_tensors
from titanlite.checkpoint.whole import Stored
from titanlite.ground.files import split
from titanlite.hf.export import Item, write_file
from titanlite.hf.folder import INDEX, stored_tensors, their_names
from titanlite.registry.family import Family, load_family


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="a folder on the disk to use; default: the temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    family = load_family("llama3", args.flavor)
    try:
        begin = time.perf_counter()
        names, size = write_model(family, folder / "source")
        print(f"{len(names)} tensors, {size / 2**30:.2f} GiB, written in {time.perf_counter() - begin:.0f} s", flush=True)
        begin = time.perf_counter()
        command = ["import-hf", "--source", str(folder / "source"), "--output", str(folder / "weights")]
        subprocess.run([sys.executable, "-m", "titanlite", *command, "--ranks", str(args.ranks)], check=True)
        print(f"\nimported by {args.ranks} ranks in {time.perf_counter() - begin:.0f} s", flush=True)
        begin = time.perf_counter()
        different = compare(folder / "source", folder / "weights", names)
        print(f"{len(different)} of {len(names)} tensors differ; compared in {time.perf_counter() - begin:.0f} s {different}")
    finally:
        shutil.rmtree(folder)


def write_model(family: Family, folder: Path) -> tuple[dict[str, str], int]:
    """Writes a folder with random weights, one tensor in memory at a time; -> {our name: their name}, bytes."""
    folder.mkdir()
    tensors = {name.removeprefix("model."): tensor for name, tensor in model_tensors(family.on_meta()).items()}
    names = their_names(family, tensors)
    items = [Item(name, names[name], tuple(tensor.shape), torch.bfloat16) for name, tensor in tensors.items()]
    shapes = {item.ours: item.shape for item in items}
    files = split(items, lambda item: item.bytes, 5 * 2**30)
    places = {}
    for number, file in enumerate(files, 1):
        path = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # random bits with normal exponents: faster than sampling a distribution, and neighboring values differ
        write_file(path, file, lambda name: torch.randint(0x3000, 0x4000, shapes[name], dtype=torch.int16).view(torch.bfloat16))
        places |= {item.theirs: path.name for item in file}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(llama3.to_hf(family.config)))
    return names, sum(item.bytes for item in items)


def compare(source: Path, checkpoint: Path, names: dict[str, str]) -> list[str]:
    """The names of the tensors that differ from the files in any bit."""
    stored, entries = Stored(checkpoint), stored_tensors(source)[0]
    different = []
    for ours, theirs in names.items():
        with safe_open(str(entries[theirs].file), "pt") as file:
            if not torch.equal(stored.read(f"model.{ours}").view(torch.int16), file.get_tensor(theirs).view(torch.int16)):
                different.append(ours)
    return different


if __name__ == "__main__":
    main()
