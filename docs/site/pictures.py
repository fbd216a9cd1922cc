"""The pictures of the pages, drawn from the program itself: python -m docs.site.pictures

It writes docs/pictures/*.svg, which are committed. What a picture shows comes from the code that it is about: ranks from the
mesh, parts of matrices from the sharding styles, masks from attention, orders from PyTorch's schedules.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import Shard

from docs.site.svg import COLORS, FAINT, Drawing
from models.attention import dense_mask
from titanlite.config.read import read_config
from titanlite.config.schema import Parallelism
from titanlite.parallel.mesh import build_mesh, part_of_rank, resolve_degrees
from titanlite.parallel.parallelize import STEPS
from titanlite.parallel.pipeline import STAGES_OF_A_RANK
from titanlite.parallel.tensor import STYLES
from titanlite.plan.moments import picture
from titanlite.plan.pipeline import Action, needs_of, orders, rehearse
from titanlite.plan.predict import predict
from titanlite.plan.report import GIB
from titanlite.plan.step import simulated_ranks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
# What flows into a module of each style, and out of it, with two tensor-parallel ranks: docs/reference/styles.md.
_FLOWS = {
    "sequence": ("slice", "gathered sequence"),
    "column": ("gathered sequence", "this rank's features"),
    "row": ("this rank's features", "slice, summed over ranks"),
    "replicate": ("slice, or heads", "the same kind"),
    "experts": ("slice, as rows of tokens", "the same kind"),
    "features": ("this rank's features", "this rank's features"),
    "vocab": ("tokens", "slice"),
}
# What each step of the surgery does; its order is that of STEPS.
_SURGERY = {
    "float8": "linear layers get float8 classes",
    "attention": "a kernel is chosen",
    "head": "it gets the loss of the run",
    "context": "attention exchanges keys or heads over cp",
    "experts": "experts are split over ep",
    "sharding": "matrices and sequences are split over tp",
    "casts": "parameters are cast where they are used",
    "activation checkpointing": "operations to keep are chosen",
    "chunks": "feed-forward in parts of the sequence",
    "compile": "each block becomes one graph",
    "checkpointed blocks": "whole blocks are recomputed",
    "fewer layers": "for predictions only",
    "pipeline": "the blocks of other stages are dropped",
    "FSDP2": "the rest is sharded over dp_shard x cp",
}
_LIFE = (
    ("write", ".step-00000500.unfinished", "each rank its shards"),
    ("read back", ".step-00000500.unfinished", "checksums of all files"),
    ("commit", "manifest.json", "written last, all synced"),
    ("rename", "step-00000500", "complete from here on"),
)
_ENDS = (
    ("resume", "the newest one that is intact"),
    ("damaged", "renamed to .aside-1; the one before is used"),
    ("retention", "older than keep_latest_k: deleted"),
)

# Parts of docs/pictures/run.txt, the log of a run on two ranks of a CPU, and what they mean.
_LOG = (
    ("mesh                 dp_shard 2", "two ranks share parameters, gradients and optimizer state"),
    ("global batch         16 sequences = 4,096 tokens a step", "of all ranks: it does not follow from the mesh"),
    ("schedule             10 warm-up, 10 stable, 20 cosine decay to 0.1 x 0.003", "steps of each part, and the last rate"),
    ("step 20/40", "a report, every metrics.log_freq steps"),
    ("mean loss 6.5143", "of steps 11 to 20: compare runs by this"),
    ("loss 6.2412", "of step 20 alone, in nats per token; a uniform guess is ln 4096 = 8.3"),
    ("grad norm 0.939", "of the whole gradient, before clipping"),
    ("lr 3.00e-03", "of this step"),
    ("1,182 tokens/s", "of all ranks, without the pauses at the end of the line"),
    ("data wait 0.1%", "of the time the device had no batch"),
    ("validation loss 6.4887", "of held-out text, in nats per token"),
    ("2.8275 bits a byte", "the same, independent of the tokenizer"),
    ("memory 0.70 GiB", "the peak of the rank that has used most"),
    ("validation 2.87 s", "a pause, which is not in tokens/s"),
    ("saved outputs/llama_debug/checkpoint/step-00000020 in 0.34 s", "a kill from here on loses only what follows"),
    ("done: 40 steps in 134.7 s, of which startup 2.6 s, validation 5.3 s, save 0.6 s", "pauses of the whole run"),
)


def mesh() -> Drawing:
    """16 ranks as pp 2 x dp_shard 4 x tp 2: their coordinates, and which part of the global batch they read."""
    parallelism = Parallelism(pipeline_parallel_degree=2, data_parallel_shard_degree=4, tensor_parallel_degree=2)
    degrees = resolve_degrees(parallelism, 16)
    with simulated_ranks(16):
        ranks = build_mesh(degrees, "cpu").mesh
    drawing = Drawing(760, 330, "16 ranks as a mesh")
    drawing.text(20, 28, "16 ranks: pp 2 x dp_shard 4 x tp 2", 16)
    drawing.text(20, 50, "One color: the ranks that read the same samples. tp neighbors are adjacent ranks.", 12, color=FAINT)
    for rank in range(16):
        stage, _, shard, _, tensor = (int(each) for each in (ranks == rank).nonzero()[0])
        x, y = 90 + 160 * shard + 70 * tensor, 90 + 105 * stage
        drawing.box(x, y, 70, 70, COLORS[part_of_rank(degrees, rank)], f"rank {rank}", 13)
        drawing.text(x + 35, y + 60, f"tp {tensor}", 10, "middle", FAINT)
    for stage in range(2):
        drawing.text(20, 130 + 105 * stage, f"pp {stage}", 13)
    for shard in range(4):
        drawing.text(160 + 160 * shard, 82, f"dp_shard {shard}", 13, "middle")
    drawing.text(20, 290, "A block's matrices: split over tp within a pair, and by FSDP2 over the 4 pairs of a row.", 12)
    drawing.text(20, 310, "Blocks: the first ones on row pp 0, the last ones and the head on row pp 1.", 12)
    return drawing


def styles() -> Drawing:
    """What each sharding style does to a module's matrix with two tensor-parallel ranks."""
    drawing = Drawing(760, 70 + 68 * len(STYLES), "Sharding styles")
    drawing.text(20, 28, "What a style does to a matrix, tp 2", 16)
    for column, words in ((140, "comes in"), (340, "rank 0"), (450, "rank 1"), (550, "goes out")):
        drawing.text(column, 54, words, 12, color=FAINT)
    for row, (name, style) in enumerate(STYLES.items()):
        y = 66 + 68 * row
        drawing.text(20, y + 30, f"{name}", 14)
        came, goes = _FLOWS[name]
        drawing.text(140, y + 30, came, 11)
        drawing.text(550, y + 30, goes, 11)
        for rank, x in enumerate((330, 440)):
            _part(drawing, x, y, style.weight.dim if isinstance(style.weight, Shard) else None, rank)
    return drawing


def _part(drawing: Drawing, x: float, y: float, dim: int | None, rank: int) -> None:
    """The part of a matrix that a rank of two has, in the outline of the whole. dim: which is split; None: each has all."""
    width, height = 80.0, 56.0
    drawing.box(x, y, width, height, "#ffffff")
    if dim is None:
        drawing.box(x, y, width, height, COLORS[2], "whole", 11)
    elif dim == 0:
        drawing.box(x, y + rank * height / 2, width, height / 2, COLORS[rank], "rows", 11)
    else:
        drawing.box(x + rank * width / 2, y, width / 2, height, COLORS[rank], "cols", 11)


def surgery() -> Drawing:
    """The steps from a model on the meta device to a sharded one, in their order."""
    steps = [("adapters", "LoRA's matrices are added"), *((step.name, _SURGERY[step.name]) for step in STEPS)]
    drawing = Drawing(640, 66 + 34 * len(steps), "The order of model surgery")
    drawing.text(20, 28, "From a model on the meta device to a sharded one", 16)
    for number, (name, what) in enumerate(steps):
        y = 46 + 34 * number
        drawing.box(20, y, 210, 24, COLORS[0], name)
        drawing.text(250, y + 17, what, 12)
        if number:
            drawing.arrow(125, y - 10, 125, y)
    return drawing


def document_mask() -> Drawing:
    """Which keys each query sees: causal, with a document mask, and with a window too."""
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]], dtype=torch.int32)
    panels = (
        ("document_mask = false", dense_mask(torch.zeros_like(documents))),
        ("document_mask = true", dense_mask(documents)),
        ("with a window of 3", dense_mask(documents, window=3)),
    )
    drawing = Drawing(760, 330, "Document masks")
    drawing.text(20, 28, "A sequence of three documents: which keys (columns) each query (row) sees", 14)
    for panel, (words, mask) in enumerate(panels):
        left = 20 + 245 * panel
        drawing.text(left, 56, words, 13)
        for query in range(12):
            for key in range(12):
                color = COLORS[int(documents[0, query])] if mask[0, 0, query, key] else "#ffffff"
                drawing.box(left + 19 * key, 68 + 19 * query, 19, 19, color)
    drawing.text(20, 318, "One color a document (of the query). White: not seen.", 12, color=FAINT)
    return drawing


def schedules() -> Drawing:
    """The steps of three pipeline schedules with 4 ranks and 8 microbatches, and their bubbles."""
    names = ("GPipe", "1F1B", "Interleaved1F1B")
    drawing = Drawing(900, 70 + 135 * len(names), "Pipeline schedules")
    drawing.text(20, 28, "Pipeline schedules: 4 ranks, 8 microbatches, one row a rank", 16)
    legend = (("forward", 0), ("backward", 1))
    for at, (words, color) in enumerate(legend):
        drawing.box(20 + 170 * at, 40, 14, 14, COLORS[color])
        drawing.text(40 + 170 * at, 52, words, 12)
    for row, name in enumerate(names):
        stages = 4 * STAGES_OF_A_RANK[name]
        with simulated_ranks(4):
            order = orders(name, 4, 8, stages)
        forward, backward = [4 / stages] * stages, [8 / stages] * stages  # a backward pass takes twice as long
        idle = rehearse(order, forward, backward).bubble
        top = 84 + 135 * row
        drawing.text(20, top, f"{name}: {stages // 4} of {stages} stages a rank; bubble {idle:.0%} of the step", 13)
        for rank, action, start, took in _played(order, forward, backward):
            kind = {"F": 0, "B": 1}[action.kind]
            words = str(action.number) if took >= 1 else ""
            drawing.box(20 + 23.5 * start, top + 10 + 25 * rank, 23.5 * took, 22, COLORS[kind], words, 10)
    return drawing


def _played(order: list[list[Action]], forward: list[float], backward: list[float]) -> list[tuple[int, Action, float, float]]:
    """(rank, action, when it starts, how long it takes) of a step."""
    done: dict[tuple[str, int, int], float] = {}
    clocks, waiting, played = [0.0] * len(order), [list(actions) for actions in order], []
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions and all(each in done for each in needs_of(*actions[0], last=len(forward) - 1)):
                action = actions.pop(0)
                kind, stage, number = action
                took = forward[stage] if kind == "F" else backward[stage]
                start = max([clocks[rank], *(done[each] for each in needs_of(*action, last=len(forward) - 1))])
                clocks[rank] = done[kind, stage, number] = start + took
                played.append((rank, action, start, took))
    return played


def memory(recipe: str = "llama_8b", ranks: int = 8, modes: tuple[str, ...] = ("none", "selective", "full")) -> Drawing:
    """What a rank holds at the worst moment of a step, by activation checkpointing, as `titanlite estimate` predicts it."""
    path = f"train_configs/{recipe}.toml"
    found = [predict(read_config(ROOT / path, ["--activation_checkpoint.mode", mode]), ranks).memory for mode in modes]
    scale = 540 / (max(each.total for each in found) / GIB)
    drawing = Drawing(760, 260, "Memory of a rank")
    drawing.text(20, 28, f"{path} on {ranks} ranks: GiB of a rank, predicted", 16)
    for row, (mode, parts) in enumerate(zip(modes, found, strict=True)):
        x, y = 110.0, 50 + 52 * row
        drawing.text(20, y + 24, mode, 13)
        for color, size in enumerate(parts):
            width = scale * size / GIB
            drawing.box(x, y, width, 36, COLORS[color], f"{size / GIB:.1f}" if width > 34 else "", 11)
            x += width
        drawing.text(x + 8, y + 24, f"{parts.total / GIB:.1f} GiB", 13)
    for at, words in enumerate(found[0]._fields):
        drawing.box(20 + 145 * at, 222, 14, 14, COLORS[at])
        drawing.text(40 + 145 * at, 234, words, 12)
    return drawing


class Timeline(NamedTuple):
    """A picture that `titanlite estimate --timeline` draws."""

    text: str

    @classmethod
    def of(cls, recipe: str = "llama_8b", ranks: int = 1) -> "Timeline":
        """Masters and batch are those of a GPU of 141 GB; a block runs again in its backward pass."""
        keys = {"training.dtype": "bfloat16", "training.local_batch_size": "4", "training.global_batch_size": "-1"}
        words = [f"--{key}={value}" for key, value in (keys | {"activation_checkpoint.mode": "full"}).items()]
        config = read_config(ROOT / f"train_configs/{recipe}.toml", words)
        title = f"{recipe} on {ranks} rank, bfloat16, batch 4, full: GiB over a step, predicted"
        return cls(picture(predict(config, ranks).moments, title))

    def svg(self) -> str:
        return self.text

    def save(self, path: Path) -> None:
        path.write_text(self.text, encoding="utf-8")


def checkpoint() -> Drawing:
    """A checkpoint's life: from a folder with a temporary name to one that a start reads, sets aside or deletes."""
    drawing = Drawing(900, 270, "A checkpoint's life")
    drawing.text(20, 28, "A checkpoint's life", 16)
    for number, (what, name, more) in enumerate(_LIFE):
        x = 20 + 218 * number
        drawing.box(x, 48, 196, 74, COLORS[2 if what == "rename" else 4])
        drawing.text(x + 98, 68, what, 13, "middle")
        drawing.text(x + 98, 90, name, 11, "middle")
        drawing.text(x + 98, 110, more, 11, "middle", FAINT)
        if number:
            drawing.arrow(x - 22, 85, x, 85)
    drawing.text(20, 148, "Killed before the rename: the next start removes the folder, whose name begins with a dot.", 12)
    for number, (what, more) in enumerate(_ENDS):
        y = 172 + 30 * number
        drawing.box(492, y, 96, 24, COLORS[0], what)
        drawing.text(600, y + 16, more, 11)
    drawing.text(470, 188, "then", 12, "end", FAINT)
    return drawing


def log() -> Drawing:
    """Parts of a real log, each with its meaning."""
    text = (FOLDER / "run.txt").read_text(encoding="utf-8")
    (report,) = (line for line in text.splitlines() if "step 20/40" in line)
    drawing = Drawing(1060, 60 + 26 * len(_LOG), "A log, annotated")
    drawing.text(20, 28, "A run's log, annotated", 16)
    for row, (part, what) in enumerate(_LOG):
        assert part in text, f"not in run.txt: {part}"
        y, inset = 44 + 26 * row, 20 if part in report and not part.startswith("step") else 0
        drawing.box(20 + inset, y, 530 - inset, 22, COLORS[4 if part in report else 7])
        drawing.text(28 + inset, y + 15, part, 11)
        drawing.text(566, y + 15, what, 11)
    return drawing


PICTURES: dict[str, Callable[[], Drawing | Timeline]] = {
    "mesh": mesh,
    "styles": styles,
    "surgery": surgery,
    "document_mask": document_mask,
    "schedules": schedules,
    "memory": memory,
    "timeline": Timeline.of,
    "checkpoint": checkpoint,
    "log": log,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().save(FOLDER / f"{name}.svg")
