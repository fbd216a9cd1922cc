"""Who can be measured, by name. To add one: a file beside this with `build(job) -> step`, and a line in the table.

step(tokens (accumulate, batch, seq + 1) int64, on the job's device) does one whole optimizer step on them and returns their
mean loss, a () tensor that nobody has waited for: forward, backward, the gradient's norm clipped to job.max_norm, AdamW with
the job's constants and a constant rate, decay for parameters of two dimensions alone. The model starts from job.weights().
"""

from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """How one is started."""

    module: str  # the file in this folder
    packages: tuple[str, ...] = ()  # to import, beside titanlite's own; one that is missing leaves the contestant out
    compiled: bool = True
    keys: dict[str, Any] = {}  # noqa: RUF012  what its file reads as job.keys


# A peer's plain name is what its documentation tells people who want speed: compiled.
CONTESTANTS: dict[str, Contestant] = {
    "titanlite": Contestant("titanlite"),
    "titanlite-eager": Contestant("titanlite", compiled=False),
    "titanlite-fsdp": Contestant("titanlite", keys={"fsdp": True}),
    "plain": Contestant("plain", compiled=False),
    "plain-compiled": Contestant("plain"),
    "hf": Contestant("hf", ("transformers", "accelerate")),
    "hf-eager": Contestant("hf", ("transformers", "accelerate"), compiled=False),
    "torchtitan": Contestant("torchtitan", ("torchtitan",)),
    "torchtitan-eager": Contestant("torchtitan", ("torchtitan",), compiled=False),
    "litgpt": Contestant("litgpt", ("litgpt", "lightning")),
    "litgpt-eager": Contestant("litgpt", ("litgpt", "lightning"), compiled=False),
    "fabric": Contestant("fabric", ("lightning",)),
    "fabric-eager": Contestant("fabric", ("lightning",), compiled=False),
}
MATMUL = Contestant("matmul", compiled=False)  # in every run: one large product, which all speeds are compared with
