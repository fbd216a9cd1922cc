"""Tables of the schema for data: a source, how data is read, and validation."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from titanlite.config import bounds
from titanlite.config.effects import ALWAYS, EffectiveWhen
from titanlite.config.tables import MAY_CHANGE, Section, StrictModel

_WITH_VALIDATION = EffectiveWhen("validation.enable = true")
_WITH_VALIDATION_TEXT = _WITH_VALIDATION.and_when("validation.dataset_path is not set", "validation.sources is not set")
_WITH_SAMPLES = _WITH_VALIDATION.and_when("metrics.enable_tensorboard = true")


class Source(StrictModel):
    """One of several data sources."""

    path: bounds.Name
    """As training.dataset_path, or as training.dataset."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of data of your own, as training.dataset_options."""
    name: str = ""
    """The name in reports. Empty: the last part of the path."""
    weight: bounds.Positive | None = None
    """The share of this source in all training tokens, relative to the other weights. Unset for all sources: proportional to
    their sizes."""
    epochs: bounds.Positive | None = None
    """How often the source may be read at most, such as 0.5 or 4. A run that needs more is refused. Samples that a rollback
    leaves out do not count. Unset: no limit."""


class Dataloader(Section):
    """How data is read. Nothing here changes what is read."""

    ON_RESUME = MAY_CHANGE

    workers: Annotated[int, Field(ge=0, le=256), ALWAYS] = 0
    """Processes per rank that read ahead. 0: the rank itself reads each batch when it needs it."""
    prefetch: Annotated[int, Field(ge=1, le=16), EffectiveWhen("dataloader.workers > 0")] = 2
    """Steps that each worker reads ahead."""
    stall_seconds: Annotated[bounds.Positive, Field(le=bounds.LONGEST_SECONDS), ALWAYS] = 20.0
    """When a step waits longer for data, a message names the source and file that are being read; it repeats after the same
    time."""


class Validation(Section):
    """Loss on data that is not trained on."""

    ON_RESUME = MAY_CHANGE

    enable: Annotated[bool, ALWAYS] = False
    """Measure the loss and bits per byte, on the same samples each time and on any mesh."""
    dataset: Annotated[bounds.Name, _WITH_VALIDATION_TEXT] = "stdlib"
    """As training.dataset."""
    dataset_options: Annotated[dict[str, JsonValue], _WITH_VALIDATION_TEXT.and_when('validation.dataset has ":"')] = {}
    """As training.dataset_options."""
    dataset_path: Annotated[bounds.Text, _WITH_VALIDATION.and_when("validation.sources is not set")] = ""
    """As training.dataset_path."""
    sources: Annotated[list[Source], _WITH_VALIDATION] = []
    """Several data sources, measured separately: [[validation.sources]] with path, options and name."""
    freq: Annotated[bounds.Steps, _WITH_VALIDATION] = 100
    """Steps between validations; one more follows the last step."""
    steps: Annotated[Literal[-1] | bounds.Steps, _WITH_VALIDATION] = 10
    """Batches per validation and source, as large as a training step's; always the source's first samples. -1: all samples."""
    sample_prompts: Annotated[list[str], _WITH_SAMPLES] = []
    """Prompts that the model continues after each validation, with the same seed each time; shown in TensorBoard. Separated by
    commas on the command line."""
    sample_tokens: Annotated[int, Field(ge=1, le=2**17), _WITH_SAMPLES.and_when("validation.sample_prompts is set")] = 64
    """Tokens of each continuation at most."""
