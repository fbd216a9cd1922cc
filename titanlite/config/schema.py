"""The schema: every TOML key is a field here, with its type, its bounds, its default and its meaning.

`titanlite/config/read.py` fills it from TOML files and the command line; `titanlite/loop/checks.py` holds what concerns
several keys at once. Keys carry the names that torchtitan's TOML files (0.2) use wherever the meaning is the same.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
CountOrDerived = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]


class Section(BaseModel):
    """What all sections share: unknown keys are refused, types are not guessed, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Job(Section):
    """The run and its folder."""

    dump_folder: Annotated[str, Field(min_length=1)] = "./outputs"
    """The run directory: resolved configuration, provenance, metrics, TensorBoard logs and checkpoints go there.
    Relative to the folder that the run is started from."""
    description: str = ""
    """One line that says what this run is for; kept with the run and shown at its start."""
    time_limit_minutes: NonNegative = 0.0
    """Stop as on SIGTERM when so many minutes have passed since the command was given: the step is finished, a checkpoint
    saved, and the exit code is 75. Leave time for a step and a checkpoint. 0: no limit."""
    print_config: bool = False
    """Print the resolved configuration as TOML on standard output before training; that text is a valid TOML file."""


class Model(Section):
    """Which model is trained."""

    name: str = "llama3"
    """A family of the folder models/ ("llama3" is models/llama3.py), or the dotted name of your own module."""
    flavor: str = "debug"
    """Which of the family's sizes: a key of FLAVORS in its file. "hf": the dimensions of the config.json in hf_assets_path."""
    hf_assets_path: str = ""
    """Folder with a tokenizer.json (and, where there is one, a tokenizer_config.json that names the end-of-text token).
    Empty: a byte-pair tokenizer of 4,096 entries, trained on the default data at first use."""
    attention: Literal["auto", "cudnn", "flash", "flash3", "efficient", "tiles", "math"] = "auto"
    """The kernel that computes attention in training. "auto": on Hopper cuDNN's, on other GPUs FlashAttention, or the next best
    that knows precision and head size, and FlexAttention where documents or windows are masked or scores capped. Any other is
    forced, for all that training computes: what it cannot do is refused. "efficient" is PyTorch's memory-efficient attention,
    "flash3" FlashAttention 3, a package of its own for Hopper, "tiles" our own for CPUs, which "auto" takes there for compiled
    blocks, bfloat16 and at most 512 tokens. "math" holds all scores."""


class Source(Section):
    """One of several sources of data."""

    path: Annotated[str, Field(min_length=1)]
    """As training.dataset_path, or "stdlib"."""
    name: str = ""
    """What reports call it. Empty: the last part of the path."""
    weight: Positive | None = None
    """Its part of all tokens that are trained on, in proportion to the other weights. Unset for all sources: each in proportion
    to its size."""
    epochs: Positive | None = None
    """How often it may be read, also 0.5 times. A run that would read it more often is refused. Unset: any number."""


class Training(Section):
    """Data, batch, length, precision."""

    dataset: str = "stdlib"
    """"stdlib" (the Python sources of the running interpreter's standard library), or a path as dataset_path."""
    dataset_path: str = ""
    """Data to read in place of the built-in one: a folder that `titanlite tokenize` has made, a pair of .bin and .idx in
    Megatron's format or a folder of such pairs, or text, which is made into tokens at first use: a file, a .jsonl file with a
    "text" or chat "messages" on each line, a .parquet file, or a folder of these."""
    sources: list[Source] = []
    """Several sources in place of one, each a table: [[training.sources]] with path, weight, epochs, name."""
    document_policy: Literal["pack", "best_fit", "truncate"] = "pack"
    """How documents become sequences. "pack": one behind the other, cut every seq_len tokens. "best_fit": documents that fit
    stay whole, put together with as little padding as possible. "truncate": a sequence for each, its rest left out."""
    document_mask: bool = False
    """Attention stays inside a document, positions begin anew with each, and none is to be guessed from the one before it."""
    local_batch_size: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Sequences in one forward and backward pass of one data-parallel rank."""
    global_batch_size: CountOrDerived = -1
    """Sequences in one optimizer step, over all ranks. More than one pass of every rank means gradient accumulation.
    -1: local_batch_size x data-parallel degree, no accumulation."""
    seq_len: Annotated[int, Field(ge=1, le=2**24)] = 2048
    """Tokens in one sequence."""
    steps: Count = 10_000
    """Optimizer steps of the whole run, counted from its very first start."""
    max_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are scaled down to this global L2 norm; inf measures the norm and clips nothing."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a step whose gradient norm is infinite or not a number. The step itself never changes a weight with the
    fused optimizer. "stop": the run ends. "skip": training goes on with the next batch, unless more than ten in a row were bad.
    "rollback": it goes on from the newest checkpoint with the batch after the one at fault, three times from the same one. With
    float16 only a loss that is not finite counts, since gradients overflow now and then."""
    z_loss: NonNegative = 0.0
    """This times the square of the log-sum-exp of the logits is added to the loss of each token that is trained on, and keeps
    them from drifting (PaLM, arXiv:2204.02311: 1e-4). The reported training loss holds it, that of validation does not."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which parameters, their gradients once they are summed over ranks, and the optimizer's moments are kept.
    "bfloat16" halves all of that, and optimizer.rounding sees to it that small updates are not lost (docs/precision.md)."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of parameters and activations in the forward and backward passes, whatever the masters' is. float16,
    for GPUs without bfloat16, scales the loss so that small gradients survive, and skips steps that overflow."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over ranks."""
    gc_freq: Count = 50
    """Python's garbage collector runs every so many steps, on all ranks at the same one, and not in between."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights, the order of the data, and anything random in a model's forward pass."""
    deterministic: bool = False
    """Use only deterministic kernels: slower on CUDA, and then two runs on the same mesh agree bit for bit."""


class Dataloader(Section):
    """How data is read. None of this changes what is read."""

    workers: NonNegativeInt = 0
    """Processes a rank that read ahead. 0: the rank reads each batch itself when it needs it."""
    prefetch: Annotated[int, Field(ge=1, le=16)] = 2
    """Steps that each worker is ahead."""
    stall_seconds: Positive = 20.0
    """When a step waits longer for its data, a message says which source and file are being read, and again after as long."""


class Parallelism(Section):
    """How the ranks are arranged; the product of the degrees is the number of processes."""

    data_parallel_replicate_degree: Count = 1
    """Groups of ranks that hold a full copy of the (sharded) model each and all-reduce their gradients."""
    data_parallel_shard_degree: CountOrDerived = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: what the others leave."""
    tensor_parallel_degree: Count = 1
    """Ranks over which every layer's matrices, and between them the sequence, are split."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=2)] = "default"
    """What becomes of a block's gathered parameters after its forward pass. "always": freed (full shard, ZeRO-3).
    "default": freed, but for the head, whose backward pass is next. "never": kept for the backward pass (shard-grad-op,
    ZeRO-2). A number N: kept as shards over N ranks, so that the second gather stays inside N; N divides the shard degree."""

    fsdp_prefetch: Count = 1
    """How many blocks ahead parameters are gathered, in the forward and in the backward pass. 1 is what FSDP2 does by
    itself; each more holds one more block's parameters and hides slower networks."""
    reduce_every_microbatch: bool = True
    """Reduce gradients over ranks after every microbatch. false: only after the last one of a step, which saves traffic
    under accumulation and keeps the whole model's gradients, in float32, on every rank of a shard group until then."""
    enable_async_tensor_parallel: bool = False
    """Overlap the gathers and sums of tensor parallelism with the matrix products beside them, piece by piece, through memory
    that the GPUs of a tensor-parallel group share. CUDA only, within one NVLink domain; the compiler does it, so it needs
    compile.enable."""
    cpu_offload: bool = False
    """Keep masters, gradients and optimizer state in the CPU's memory and move a block at a time to the GPU. CUDA only."""


class Lora(Section):
    """Training small adapters of a model whose own weights stay what they are (docs/lora.md)."""

    enable: bool = False
    """Freeze every weight, and train low-rank adapters beside those of linear layers. The weights to adapt are loaded by
    checkpoint.initial_load_path; frozen ones are kept in training.mixed_precision_param."""
    rank: Count = 16
    """Rows of A and columns of B, in W + alpha / rank * B A."""
    alpha: Positive = 32.0
    """Scale of the adapters, divided by their rank."""
    modules: Annotated[list[str], Field(min_length=1)] = ["layers.*"]
    """Patterns of names of linear layers, such as "layers.*.attention.w[qv]": those get adapters. A star crosses dots, so
    "layers.*" is every linear layer of the blocks."""


class Float8(Section):
    """Linear layers that multiply in float8 (docs/float8.md)."""

    enable: bool = False
    """Multiply the linear layers of the blocks in float8, with scales measured anew for every product. Needs torchao."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale a tensor, the fastest; one a row, more accurate; or one a row with the weights' gradients in
    training.mixed_precision_param, the most accurate."""
    filter_fqns: list[str] = []
    """Patterns of names of linear layers, such as "layers.0.*" or "layers.*.attention.w[kv]", that are left in
    training.mixed_precision_param. The head always is."""
    enable_fsdp_float8_all_gather: bool = False
    """Gather parameters over ranks in float8, half the traffic. With "tensorwise" only."""
    emulate: bool = False
    """Cast to float8, and multiply what comes of it in float32: slow, for devices without float8 products and for tests."""


class ActivationCheckpoint(Section):
    """What is computed again in the backward pass instead of being kept from the forward pass."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """"full": of each block only its input is kept. "selective": see selective_ac_option. "memory_budget": the compiler
    chooses what to keep, see memory_budget; needs compile."""
    selective_ac_option: Literal["op"] | Count = "op"
    """With mode "selective". "op": in each block keep the results of attention, of sums over the network and of every
    second matrix product, and compute the rest again. A number n: every n-th block is treated as in "full"."""
    memory_budget: Fraction = 0.5
    """With mode "memory_budget": share of the activations that is kept; 0 keeps inputs only, 1 is the compiler's default."""


class Compile(Section):
    """torch.compile."""

    enable: bool = False
    """Compile the components, each as one graph; one compilation serves all blocks."""
    components: Annotated[list[Literal["model", "loss"]], Field(min_length=1)] = ["model", "loss"]
    """"model": what unit says. "loss": the final norm, and what the loss does with logits."""
    unit: Literal["block", "model"] = "block"
    """"block": each block is a graph, and one compilation serves all. "model": embedding and blocks are one graph, which is
    faster where the model is small and takes longer to compile, the longer the more blocks; for one process."""
    backend: str = "inductor"
    """torch.compile's backend. On a CPU "inductor" needs a C++ compiler."""


class Optimizer(Section):
    """AdamW, Adam or Muon."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW decays weights apart from the gradient (Loshchilov & Hutter, arXiv:1711.05101); Adam adds the decay to it, and
    takes far smaller values of weight_decay than AdamW's default. Muon orthogonalises the momentum of the matrices of the
    blocks (Jordan 2024; Liu et al., arXiv:2502.16982), and AdamW does the rest, with the same lr: a matrix's update is scaled
    to be as large as one of AdamW."""
    lr: Positive = 8e-4
    """Peak learning rate; lr_scheduler scales it."""
    beta1: Beta = 0.9
    """Decay of the running mean of gradients."""
    beta2: Beta = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    momentum: Beta = 0.95
    """Decay of the running mean of gradients that Muon orthogonalises."""
    nesterov: bool = True
    """Muon looks ahead: once more the gradient is added to that mean before it is orthogonalised."""
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations of Muon's orthogonalisation. It is done in training.mixed_precision_param: in float32, or else
    in bfloat16."""
    weight_decay: NonNegative = 0.1
    """Weight decay of the parameters that are decayed."""
    decay_parameters: str = ""
    """A regular expression, searched in each parameter's name: the ones found are decayed. Empty: every parameter with two
    or more dimensions, so matrices and embeddings but no norm weights or biases."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """One kernel for everything, one kernel an operation, or one a parameter; same mathematics. With training.dtype =
    "bfloat16" one kernel a parameter, which torch.compile makes ("fused"), or one an operation and parameter ("for-loop")."""
    rounding: Literal["stochastic", "compensated"] = "stochastic"
    """How parameters are written with training.dtype = "bfloat16". "stochastic": up or down by chance, so that updates smaller
    than a bfloat16 can tell apart count in the mean; chance is a function of name, step and position. "compensated": what the
    parameter cannot hold is kept beside it, in 2 more bytes; both together are the float32 that there would be otherwise."""


class LRScheduler(Section):
    """Warm-up, stable, decay: the learning rate as a function of the step."""

    warmup_steps: NonNegativeInt = 200
    """Steps in which the rate rises linearly from lr / warmup_steps to lr."""
    total_steps: Count | None = None
    """The length of the schedule where it is not training.steps: what a run that is stopped early was planned for."""
    decay_ratio: Fraction | None = None
    """Share of total_steps that decays, at the end; between warm-up and decay the rate is constant. Unset: the decay
    begins right after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this share of lr."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one found in the folder."""
    folder: str = "checkpoint"
    """Where checkpoints go, inside job.dump_folder."""
    interval: Count = 500
    """A checkpoint every so many steps; one more is written after the last step."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """"disabled": training waits until a checkpoint is written. "async": it waits for a copy in the CPU's memory, which is
    written while training goes on. "async_with_pinned_mem": that copy is in pinned memory, for GPUs."""
    keep_latest_k: NonNegativeInt = 10
    """Older checkpoints than the newest k are deleted once a newer one has been written and read back; 0 keeps all."""
    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are never deleted. 0: no step is special."""
    load_step: CountOrDerived = -1
    """Go back to the checkpoint of this step, once: later ones are kept under another name, .aside-1, and a run that is started
    again goes on from what it has saved since. -1: resume from the newest sound one."""
    initial_load_path: str = ""
    """A step folder of another run's checkpoints, from which a run that has none of its own yet begins."""
    initial_load_model_only: bool = True
    """Of initial_load_path take the weights alone, and begin at step 0. false: also optimizer state, step and position in the
    data, so that this run is a branch of the other one."""
    initial_load_in_hf: bool = False
    """initial_load_path is a folder in Hugging Face's format: safetensors, and config.json with the model's own dimensions.
    Each rank reads its own slices."""
    last_save_in_hf: bool = False
    """After the last step write its checkpoint's weights in Hugging Face's format too, to step-00000100-hf beside it."""
    exclude_from_loading: list[str] = []
    """Patterns of tensor names, such as "optimizer.*" or "model.head.*", that keep their initial values when a checkpoint
    is loaded that was not itself written under the same patterns."""
    allow_changes: list[str] = []
    """Patterns of keys, such as "optimizer.lr" or "lr_scheduler.*", that may differ from those of the checkpoint that a run
    resumes from although they change the mathematics; "data" stands for the text and its tokenizer."""


class Metrics(Section):
    """What is reported, and how often."""

    log_freq: Count = 10
    """Report every so many steps, and at the first and the last one."""
    enable_tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl, which is always written."""
    save_tb_folder: str = "tb"
    """Where TensorBoard files go, inside job.dump_folder."""
    spike_window: NonNegativeInt = 100
    """A loss is compared with the median of so many steps before it; 0 looks for no spikes."""
    spike_threshold: Positive = 10.0
    """A loss is a spike, and reported with its sample numbers, when it is above that median by more than so many standard
    deviations, estimated by the median absolute deviation."""


class Profiling(Section):
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write a trace of one step every profile_freq steps, for chrome://tracing or Perfetto."""
    profile_freq: Annotated[int, Field(ge=3)] = 10
    """Steps from one trace to the next."""
    save_traces_folder: str = "profile_traces"
    """Where traces go, inside job.dump_folder."""
    enable_memory_snapshot: bool = False
    """Record every allocation on the GPU, and write a snapshot every profile_freq steps and when memory runs out. CUDA only."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where memory snapshots go, inside job.dump_folder."""


class Validation(Section):
    """Loss on text that is not trained on."""

    enable: bool = False
    """Measure the loss, and bits per byte, on the same samples at every round, on any mesh."""
    dataset: str = "stdlib"
    """As training.dataset."""
    dataset_path: str = ""
    """As training.dataset_path."""
    sources: list[Source] = []
    """Several sources in place of one, each measured by itself: [[validation.sources]] with path and name."""
    freq: Count = 100
    """A round every so many steps, and one after the last."""
    steps: CountOrDerived = 10
    """Batches in a round from each source, as large as a training step's; the samples are its first ones. -1: all of them."""
    sample_prompts: list[str] = []
    """Texts that the model continues after each round, by the same random numbers each time; to be read in TensorBoard. On the
    command line a comma stands between them."""
    sample_tokens: Count = 64
    """By how many tokens at most."""


class Comm(Section):
    """Patience of the collectives, and what is known of them when they hang."""

    init_timeout_seconds: Count = 300
    """How long a rank waits for the others until the first step is done (data, compilation and loading fall in it)."""
    train_timeout_seconds: Count = 100
    """How long a rank waits for the others in any later step."""
    save_timeout_seconds: Count = 1800
    """How long a rank waits for the others while a checkpoint is written."""
    trace_buf_size: NonNegativeInt = 0
    """On CUDA, how many of the latest collectives NCCL's flight recorder remembers; they are written into the run directory,
    in comm_traces, when one times out. 0 records nothing."""


class Config(Section):
    """A whole run. Sections are TOML tables."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    dataloader: Dataloader = Dataloader()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    lora: Lora = Lora()
    float8: Float8 = Float8()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    validation: Validation = Validation()

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in steps."""
        return self.lr_scheduler.total_steps or self.training.steps

    def global_batch(self, data_degree: int) -> int:
        """Sequences in one optimizer step over so many data-parallel ranks, derived where the key says -1."""
        given = self.training.global_batch_size
        return given if given > 0 else self.training.local_batch_size * data_degree
