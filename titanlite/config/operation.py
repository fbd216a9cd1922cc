"""The sections of the schema for saving, reporting and watching a run. A resume may change them, except hooks."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from titanlite.config import bounds
from titanlite.config.effects import ALWAYS, CUDA, RANKS, EffectiveWhen
from titanlite.config.tables import MAY_CHANGE, Section

_WITH_CHECKPOINTS = EffectiveWhen("checkpoint.enable = true")
_WITH_INITIAL_LOAD = _WITH_CHECKPOINTS.and_when("checkpoint.initial_load_path is set")
_WITH_PROFILES = EffectiveWhen("profiling.enable_profiling = true or profiling.enable_memory_snapshot = true")
_WITH_SNAPSHOTS = EffectiveWhen("profiling.enable_memory_snapshot = true", CUDA)
_AMONG_RANKS = EffectiveWhen(RANKS)


class Job(Section):
    """The run and its folder."""

    ON_RESUME = MAY_CHANGE

    dump_folder: Annotated[bounds.Name, ALWAYS] = "./outputs"
    """The run directory, for the resolved configuration, provenance, metrics, TensorBoard logs and checkpoints. Relative to the
    folder that the run is started from."""
    description: Annotated[str, ALWAYS] = ""
    """One line on the purpose of this run; logged at its start and kept in the run directory."""
    time_limit_minutes: Annotated[bounds.Minutes, _WITH_CHECKPOINTS] = 0.0
    """Stop as on SIGTERM when this many minutes have passed since the start of the command, by the monotonic clock: the run
    finishes the step, saves a checkpoint and exits with code 75. Leave time for a step and a checkpoint. 0: no limit."""
    print_config: Annotated[bool, ALWAYS] = False
    """Print the resolved configuration on standard output before training, as a valid TOML file."""


class Checkpoint(Section):
    """Saving and resuming."""

    ON_RESUME = MAY_CHANGE

    enable: Annotated[bool, ALWAYS] = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Annotated[bounds.Text, _WITH_CHECKPOINTS] = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Annotated[bounds.Steps, _WITH_CHECKPOINTS] = 500
    """Steps between checkpoints; one more is saved after the last step."""
    async_mode: Annotated[Literal["disabled", "async", "async_with_pinned_mem"], _WITH_CHECKPOINTS] = "disabled"
    """"disabled": training waits until a checkpoint is written. "async": training waits for a copy in CPU memory and continues
    while the copy is written. "async_with_pinned_mem": the copy is in pinned memory, for GPUs."""
    keep_latest_k: Annotated[bounds.StepsOrNone, _WITH_CHECKPOINTS] = 10
    """Checkpoints older than the newest k are deleted once a newer one is written and verified. 0: all are kept."""
    keep_every_n_steps: Annotated[bounds.StepsOrNone, _WITH_CHECKPOINTS.and_when("checkpoint.keep_latest_k > 0")] = 0
    """Checkpoints of steps that are multiples of this are never deleted. 0: there are no such steps."""
    load_step: Annotated[Literal[-1] | bounds.StepsOrNone, _WITH_CHECKPOINTS] = -1
    """Go back to the checkpoint of this step, once: later checkpoints are renamed to .aside-1, and the next start resumes from
    what the run has saved since. -1: resume from the newest valid checkpoint."""
    initial_load_path: Annotated[bounds.Text, _WITH_CHECKPOINTS] = ""
    """A step folder of another run's checkpoints. A run without checkpoints of its own starts from it."""
    initial_load_model_only: Annotated[bool, _WITH_INITIAL_LOAD] = True
    """Load only the weights of initial_load_path and start at step 0. false: also load optimizer state, step and data position,
    so that this run continues the other one."""
    initial_load_in_hf: Annotated[bool, _WITH_INITIAL_LOAD] = False
    """initial_load_path is a folder in Hugging Face's format: safetensors, and a config.json with the model's dimensions. Each
    rank reads its own slices."""
    last_save_in_hf: Annotated[bool, _WITH_CHECKPOINTS] = False
    """After the last step, also write the weights in Hugging Face's format, to step-00000100-hf beside the checkpoint."""
    exclude_from_loading: Annotated[list[str], _WITH_CHECKPOINTS] = []
    """Patterns of tensor names, such as "optimizer.*" or "model.head.*", that keep their initial values when a checkpoint is
    loaded. A pattern applies once: not to checkpoints that this run has written with it, whatever else is in the list."""
    allow_changes: Annotated[list[str], _WITH_CHECKPOINTS] = []
    """Patterns of keys, such as "optimizer.lr" or "lr_scheduler.*", that may differ from the checkpoint's although they change
    the mathematics. "data" stands for the text, its tokenizer and the mixture, "model.source" for the code of the model,
    "teacher" for the files of distillation.teacher."""


class Metrics(Section):
    """What is reported, and how often."""

    ON_RESUME = MAY_CHANGE

    log_freq: Annotated[bounds.Steps, ALWAYS] = 10
    """Steps between reports. Also reported are the first and the last step of a start, and steps with a validation.
    `loss_mean` is the mean of the finite losses since the last multiple of log_freq, `loss` the loss of the one step."""
    enable_tensorboard: Annotated[bool, ALWAYS] = True
    """Write TensorBoard event files besides metrics.jsonl, which is always written."""
    save_tb_folder: Annotated[bounds.Text, EffectiveWhen("metrics.enable_tensorboard = true")] = "tb"
    """Folder of the TensorBoard files, inside job.dump_folder."""
    extra: Annotated[list[bounds.OwnPart], ALWAYS] = []
    """Functions of your own, "package.module:name", each of which adds numbers to every report as extra/NAME
    (docs/guides/own_parts.md)."""
    extra_options: Annotated[dict[str, dict[str, JsonValue]], EffectiveWhen("metrics.extra is set")] = {}
    """Their keyword arguments, a table for each function: [metrics.extra_options.NAME]."""
    spike_window: Annotated[int, Field(ge=0, le=10**6), ALWAYS] = 100
    """Each loss is compared with the median of this many previous ones. 0: spikes are not detected."""
    spike_threshold: Annotated[bounds.Positive, EffectiveWhen("metrics.spike_window > 0")] = 10.0
    """A loss is a spike if it exceeds that median by more than this many standard deviations, estimated from the median
    absolute deviation. Spikes are reported with their sample numbers."""


class Hooks(Section):
    """Code of your own at points of the training loop."""

    modules: Annotated[list[bounds.Name], ALWAYS] = []
    """Modules of your own, "package.module", with any of the functions after_building, before_step, after_step, at_report and
    at_save, which every rank calls (docs/guides/own_parts.md). Their code can change the training, so a resume compares it."""


class Profiling(Section):
    """Traces of time and memory."""

    ON_RESUME = MAY_CHANGE

    enable_profiling: Annotated[bool, ALWAYS] = False
    """Write a trace of one step every profile_freq steps, for chrome://tracing or Perfetto."""
    profile_freq: Annotated[int, Field(ge=3, le=bounds.MOST_STEPS), _WITH_PROFILES] = 10
    """Steps between traces."""
    save_traces_folder: Annotated[bounds.Text, EffectiveWhen("profiling.enable_profiling = true")] = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    enable_memory_snapshot: Annotated[bool, EffectiveWhen(CUDA)] = False
    """Record every GPU allocation; write a snapshot every profile_freq steps and when memory runs out. CUDA only."""
    save_memory_snapshot_folder: Annotated[bounds.Text, _WITH_SNAPSHOTS] = "memory_snapshot"
    """Folder of the memory snapshots, inside job.dump_folder."""


class Comm(Section):
    """Timeouts of collectives, and what is recorded of them."""

    ON_RESUME = MAY_CHANGE

    init_timeout_seconds: Annotated[bounds.Seconds, _AMONG_RANKS] = 300
    """How long a rank waits for the others until the first step is done, including compilation and loading. A node that still
    tokenizes text or packs it has a day longer."""
    train_timeout_seconds: Annotated[bounds.Seconds, _AMONG_RANKS] = 100
    """How long a rank waits for the others in later steps. On CPUs, stages of a pipeline wait for init_timeout_seconds."""
    save_timeout_seconds: Annotated[bounds.Seconds, _WITH_CHECKPOINTS.and_when(RANKS)] = 1800
    """How long a rank waits for the others while a checkpoint is written."""
    trace_buf_size: Annotated[int, Field(ge=0, le=10**6), EffectiveWhen(CUDA)] = 0
    """How many of the latest collectives NCCL's flight recorder keeps; written to comm_traces in the run directory when a
    collective times out. CUDA only. 0: nothing is recorded."""
