"""The contestants by name. To add one: a file in this folder with `build(job) -> step`, and a row in the table.

step(tokens (accumulate, batch, seq + 1) int64, on the job's device) does one optimizer step on them and returns their mean
loss, a () tensor, without a host sync: forward, backward, the gradient norm clipped to job.max_norm, AdamW with the job's
constants and a constant rate, decay only for parameters of two dimensions. The model starts from job.weights().
"""

from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """How a contestant is started."""

    module: str  # the file in this folder
    packages: tuple[str, ...] = ()  # required besides titanlite's own; if one is missing, the contestant is left out
    compiled: bool = True
    float32_logits: bool = False  # whether it stores all logits in float32
    keys: dict[str, Any] = {}  # noqa: RUF012  its file reads them as job.keys


# A peer's plain name is the setup that its documentation recommends for speed: compiled.
CONTESTANTS: dict[str, Contestant] = {
    "titanlite": Contestant("titanlite"),
    "titanlite-eager": Contestant("titanlite", compiled=False),
    "titanlite-fsdp": Contestant("titanlite", keys={"fsdp": True}),
    "plain": Contestant("plain", compiled=False, float32_logits=True),
    "plain-compiled": Contestant("plain"),
    "hf": Contestant("hf", ("transformers", "accelerate")),
    "hf-eager": Contestant("hf", ("transformers", "accelerate"), compiled=False, float32_logits=True),
    "torchtitan": Contestant("torchtitan", ("torchtitan",)),
    "torchtitan-eager": Contestant("torchtitan", ("torchtitan",), compiled=False),
    "litgpt": Contestant("litgpt", ("litgpt", "lightning")),
    "litgpt-eager": Contestant("litgpt", ("litgpt", "lightning"), compiled=False),
    "fabric": Contestant("fabric", ("lightning",)),
    "fabric-eager": Contestant("fabric", ("lightning",), compiled=False, float32_logits=True),
}
MATMUL = Contestant("matmul", compiled=False)  # part of every run: a large matmul, the reference for all speeds
