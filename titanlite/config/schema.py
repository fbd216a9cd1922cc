"""The schema: every TOML key is a field, with its type, its bounds, its default, its meaning, when it has an effect, and
whether a resumed run may change it (`OnResume`).

Here are `Config` and the sections that say what is computed; data.py has those for reading and validation data, operation.py
those for saving, reporting and watching it.
`read.py` fills it from TOML files and the command line; `titanlite/loop/checks.py` lists the checks of several keys at once.
Keys carry the names that torchtitan's TOML files (0.2) use wherever the meaning is the same.
"""

import functools
import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from titanlite.config import bounds, effects
from titanlite.config.data import Dataloader, Source, Validation
from titanlite.config.effects import ACCUMULATION, ALWAYS, CUDA, DECAY, FILE, RANKS, ConfigLayer, EffectiveWhen, Hardware
from titanlite.config.operation import Checkpoint, Comm, Hooks, Job, Metrics, Profiling
from titanlite.config.tables import MAY_CHANGE, OnResume, Section, StrictModel

_WITH_FSDP = EffectiveWhen(  # where titanlite/parallel/mesh.py applies it
    f"{RANKS} or parallelism.cpu_offload = true or parallelism.reduce_every_microbatch = false"
    " or float8.enable_fsdp_float8_all_gather = true"
)
_WITH_LORA, _WITH_FLOAT8 = EffectiveWhen("lora.enable = true"), EffectiveWhen("float8.enable = true")
_WITH_COMPILE = EffectiveWhen("compile.enable = true")
_WITH_FULL = EffectiveWhen('activation_checkpoint.mode = "full"')
_WITH_BUILT_IN = EffectiveWhen('optimizer.name = "AdamW" or optimizer.name = "Adam" or optimizer.name = "Muon"')
_WITH_MUON = EffectiveWhen('optimizer.name = "Muon"')
_WITH_TEACHER = EffectiveWhen("distillation.teacher is set", 'training.loss = "cross_entropy"')
_WITH_CONTEXT = EffectiveWhen("parallelism.context_parallel_degree > 1")
_WITH_EXPERTS = EffectiveWhen("parallelism.expert_parallel_degree > 1")
_WITH_PIPELINE = EffectiveWhen("parallelism.pipeline_parallel_degree > 1")
_WITH_OVERLAP = EffectiveWhen(
    "parallelism.tensor_parallel_degree > 1",
    *("compile.enable = true", 'compile.components has "model"', 'compile.backend = "inductor"', CUDA),
)
_WITH_DECAY = EffectiveWhen(DECAY)
_WITHOUT_PATHS = EffectiveWhen("training.dataset_path is not set", "training.sources is not set")
# Keys that name a model or a text may change: resume.py compares the dimensions, the fingerprints and the shares of sources.
_LENGTH_OF_SAMPLES = OnResume("a position in the data counts samples of that length")
_RULE_OF_SAMPLES = OnResume("a position in the data counts samples of that policy")
_OTHER_PARAMETERS = OnResume("the optimizer's state is that of other parameters")


class Model(Section):
    """Which model is trained."""

    name: Annotated[str, ALWAYS] = "llama3"
    """A model family in the folder models/ ("llama3" is models/llama3.py), or the dotted name of your own module."""
    flavor: Annotated[str, ALWAYS, MAY_CHANGE] = "debug"
    """The size: a key of FLAVORS in the family's file. "hf": the dimensions in the config.json of hf_assets_path."""
    overrides: Annotated[dict[str, JsonValue], ALWAYS, MAY_CHANGE] = {}
    """Dimensions that differ from the flavor's, as a table: overrides = { dim = 512, n_layers = 8 }, or the option
    --model.overrides.dim 512. The names are the fields of Config in the family's file; a field with a table of its own takes
    one, such as rope_scaling = { rope_type = "linear", factor = 4.0 }, and "none" where it may be None. Without rope_type, the
    table changes the flavor's own scaling. All others keep the flavor's values."""
    hf_assets_path: Annotated[bounds.Text, ALWAYS, MAY_CHANGE] = ""
    """Folder with a tokenizer.json and, optionally, a tokenizer_config.json that names the end-of-text token. Empty: a
    byte-pair tokenizer of 4,096 entries, trained on the default data at first use."""
    attention: Annotated[Literal["auto", "cudnn", "flash", "efficient", "tiles", "math"], ALWAYS, MAY_CHANGE] = "auto"
    """The attention kernel in training. "auto": cuDNN on Hopper, FlashAttention on other GPUs, or the next best kernel that
    supports precision and head size; FlexAttention for document masks, windows, capped scores and sinks, for the first two by
    FlashAttention 4 where flash-attn-4 is installed and works. Any other value forces that kernel for the whole model; a
    configuration that it does not support is refused. "efficient": PyTorch's memory-efficient attention. "tiles": our own
    kernel for CPUs, which "auto" uses there for compiled blocks in bfloat16 with at most 512 tokens. "math": stores all
    scores."""

    @property
    def title(self) -> str:
        """Family and flavor for messages, with what differs from the flavor."""
        changed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.overrides.items())
        return f"{self.name} {self.flavor}" + (f" with {changed}" if changed else "")


class Group(StrictModel):
    """Parameters with settings of their own."""

    pattern: bounds.Name
    """The names of parameters, as in checkpoints, with stars, which also match dots: "layers.*.ffn.w[13].weight". The first
    entry that matches a parameter counts. A pattern that matches no trained parameter is refused."""
    lr: bounds.Positive = 1.0
    """Factor on the learning rate of the step."""
    weight_decay: bounds.NonNegative | None = None
    """Their weight decay. Unset: as optimizer.weight_decay and decay_parameters say."""
    frozen: bool = False
    """They keep their values, and have no gradient and no optimizer state."""


class Training(Section):
    """Data, batch, length, precision."""

    dataset: Annotated[bounds.Name, _WITHOUT_PATHS, MAY_CHANGE] = "stdlib"
    """"stdlib" (the Python sources of the running interpreter's standard library), a path as dataset_path, or
    "package.module:name", data of your own (docs/guides/own_parts.md)."""
    dataset_options: Annotated[dict[str, JsonValue], _WITHOUT_PATHS.and_when('training.dataset has ":"'), MAY_CHANGE] = {}
    """Keyword arguments of your own data, as a table: [training.dataset_options], or --training.dataset_options.NAME VALUE."""
    dataset_path: Annotated[bounds.Text, EffectiveWhen("training.sources is not set"), MAY_CHANGE] = ""
    """Training data: a folder written by `titanlite tokenize`, a pair of .bin and .idx files in Megatron's format or a folder
    of such pairs, or text, which is tokenized at first use: a text file, a .jsonl, .json, .csv or .parquet file with "text" or
    chat "messages" in each entry, or a folder of these; docs/reference/data.md lists all suffixes."""
    sources: Annotated[list[Source], ALWAYS, MAY_CHANGE] = []
    """Several data sources, each a table: [[training.sources]] with path, options, weight, epochs, name."""
    document_policy: Annotated[Literal["pack", "best_fit", "truncate"], ALWAYS, _RULE_OF_SAMPLES] = "pack"
    """How documents become sequences. "pack": documents are concatenated and cut every seq_len tokens. "best_fit": documents
    that fit stay whole and are combined with as little padding as possible. "truncate": one document per sequence; the rest of
    a longer one is dropped."""
    document_mask: Annotated[bool, EffectiveWhen('training.document_policy != "truncate"')] = False
    """Attention stays inside a document, positions restart with each, and no document's first token is predicted."""
    add_bos: Annotated[bool | None, EffectiveWhen("model.hf_assets_path is set"), MAY_CHANGE] = None
    """Every text begins with the tokenizer's beginning-of-text token, in training, validation, samples, generation and
    evaluation. Unset: as the tokenizer does it by itself. Token files that were made otherwise are refused."""
    local_batch_size: Annotated[int, Field(ge=1, le=2**16), ALWAYS, MAY_CHANGE] = 8
    """Sequences per forward and backward pass of one data-parallel rank."""
    global_batch_size: Annotated[Literal[-1] | bounds.Batch, ALWAYS] = -1
    """Sequences per optimizer step, over all ranks; more than one pass of every rank means gradient accumulation. -1:
    local_batch_size x data-parallel degree, no accumulation."""
    seq_len: Annotated[int, Field(ge=1, le=2**24), ALWAYS, _LENGTH_OF_SAMPLES] = 2048
    """Tokens per sequence."""
    steps: Annotated[bounds.Steps, ALWAYS, MAY_CHANGE] = 10_000
    """Optimizer steps of the whole run, counted from its first start."""
    max_norm: Annotated[bounds.Norm, ALWAYS] = 1.0
    """Gradients are scaled down to this global L2 norm. inf: the norm is measured and nothing is clipped."""
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], ALWAYS, MAY_CHANGE] = "stop"
    """What happens after a step whose loss or gradient norm is infinite or NaN. With the fused optimizer that step changes no
    weight. "stop": the run ends. "skip": training continues with the next batch, unless more than ten steps in a row are bad.
    "rollback": training continues from the newest checkpoint without the bad batch, at most three times from the same one.
    With float16 only a non-finite loss counts, since gradients overflow occasionally; but more than 20 steps in a row that are
    not finite, or an overflow with a loss scale below 2^-14, end the run."""
    loss: Annotated[Literal["cross_entropy"] | bounds.OwnPart, ALWAYS] = "cross_entropy"
    """What is minimized: the sum over labels of the cross entropy, or of a loss of each token that "package.module:name"
    computes from its logits (docs/guides/own_parts.md). Validation reports the cross entropy."""
    loss_options: Annotated[dict[str, JsonValue], EffectiveWhen('training.loss has ":"')] = {}
    """Keyword arguments of your own loss, as a table: [training.loss_options], or --training.loss_options.NAME VALUE."""
    z_loss: Annotated[bounds.NonNegative, ALWAYS] = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss of each token; it keeps the logits from drifting (PaLM,
    arXiv:2204.02311: 1e-4). The reported training loss includes it, the validation loss does not."""
    predict_further: Annotated[int, Field(ge=0, le=64), ALWAYS, _OTHER_PARAMETERS] = 0
    """Multi-token prediction (arXiv:2412.19437, section 2.2): this many tokens after the next one are predicted too, each by a
    block of its own, which validation, generation and exports leave out (docs/guides/multi_token.md)."""
    predict_further_weight: Annotated[bounds.NonNegative, EffectiveWhen("training.predict_further > 0")] = 0.3
    """Weight of the additional losses, each a mean over its labels, averaged over the depths. DeepSeek-V3: 0.3, later 0.1."""
    dtype: Annotated[Literal["float32", "bfloat16"], ALWAYS] = "float32"
    """Precision of parameters, reduced gradients and optimizer moments. "bfloat16" halves their memory; optimizer.rounding
    keeps small updates from being lost (docs/guides/precision.md)."""
    mixed_precision_param: Annotated[Literal["bfloat16", "float16", "float32"], ALWAYS] = "bfloat16"
    """Precision of parameters and activations in the forward and backward passes. float16, for GPUs without bfloat16, scales
    the loss so that small gradients do not underflow, and skips steps that overflow."""
    mixed_precision_reduce: Annotated[Literal["float32", "bfloat16"], _WITH_FSDP] = "float32"
    """Precision in which gradients are reduced over ranks."""
    gc_freq: Annotated[bounds.Steps, ALWAYS, MAY_CHANGE] = 50
    """Python's garbage collector runs every gc_freq steps, at the same step on all ranks, and at no other time."""
    seed: Annotated[int, Field(ge=0, lt=2**63), ALWAYS] = 0
    """Determines the initial weights, the order of the data, and random numbers in the forward pass."""
    deterministic: Annotated[bool, ALWAYS, MAY_CHANGE] = False
    """Use deterministic kernels only: slower on CUDA; two runs on the same mesh are then equal bit for bit."""


class Parallelism(Section):
    """How the ranks are arranged; the product of the degrees is the number of processes."""

    ON_RESUME = MAY_CHANGE

    data_parallel_replicate_degree: Annotated[bounds.Count, ALWAYS] = 1
    """Replicas of the (sharded) model; gradients are all-reduced between them."""
    data_parallel_shard_degree: Annotated[Literal[-1] | bounds.Count, ALWAYS] = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all remaining ranks."""
    tensor_parallel_degree: Annotated[bounds.Count, ALWAYS] = 1
    """Ranks over which the matrices of every layer, and the sequence between them, are split."""
    context_parallel_degree: Annotated[bounds.Count, ALWAYS] = 1
    """Ranks over which each sequence is split. They share parameters, gradients and optimizer state too."""
    context_parallel_method: Annotated[Literal["gather", "ulysses"], _WITH_CONTEXT] = "gather"
    """How attention communicates. "gather": every rank all-gathers keys and values. "ulysses": all-to-alls of queries, keys,
    values and the result exchange the sequence for heads, whose numbers the degree must divide. "gather" sends less while the
    degree is smaller than 1 + heads / key-value heads."""
    expert_parallel_degree: Annotated[bounds.Count, ALWAYS] = 1
    """Ranks over which the experts of an MoE layer are split, and to which their tokens are dispatched. It divides the
    product of shard, context and tensor degree, and adds no ranks: those with the same experts shard their parameters."""
    expert_parallel_node_size: Annotated[bounds.Count, _WITH_EXPERTS] = 1
    """Above 1: adjacent ranks of the experts that share a fast network, such as the 8 GPUs of a node. A token is then sent once
    to each node that has experts for it, instead of once to each rank, and forwarded there. It divides the degree."""
    pipeline_parallel_degree: Annotated[bounds.Count, ALWAYS] = 1
    """Ranks over which the blocks are cut into stages. Microbatches: global_batch_size / (local_batch_size x data ranks)."""
    pipeline_parallel_schedule: Annotated[Literal["1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS"], _WITH_PIPELINE] = "1F1B"
    """The order in which stages run microbatches. "1F1B" and "GPipe" have one stage a rank, "Interleaved1F1B" and "LoopedBFS"
    two or more, which makes the pipeline bubble shorter (docs/guides/parallelism.md)."""
    pipeline_parallel_layers_per_stage: Annotated[Literal[-1] | bounds.Count, _WITH_PIPELINE] = -1
    """Blocks of each stage except the last, which has the rest. -1: the number for which the slowest stage has the fewest
    FLOPs, the head's included."""
    fsdp_reshard_after_forward: Annotated[Literal["default", "always", "never"], _WITH_FSDP] = "default"
    """What happens to a block's gathered parameters after its forward pass. "always": freed (full shard, ZeRO-3). "default":
    freed, except the head's, whose backward pass comes next; kept in a pipeline, which would gather them for every microbatch.
    "never": kept for the backward pass (shard-grad-op, ZeRO-2)."""
    fsdp_prefetch: Annotated[int, Field(ge=1, le=1024), _WITH_FSDP] = 1
    """How many blocks ahead parameters are gathered, forward and backward. Each costs memory, and hides more of the network."""
    reduce_every_microbatch: Annotated[bool, EffectiveWhen("parallelism.pipeline_parallel_degree = 1", ACCUMULATION)] = True
    """Reduce-scatter gradients over the shard degree after every microbatch. false: only after the last one of a step, which
    sends less; until then every rank keeps the whole model's gradients in mixed_precision_reduce. Replicas are all-reduced once
    a step; with true after every microbatch for the weight of a tied embedding and head, for parameters that belong to no
    block or to several, and for all gradients if mixed_precision_reduce = "bfloat16" and dtype = "float32". A pipeline reduces
    once a step."""
    enable_async_tensor_parallel: Annotated[bool, _WITH_OVERLAP] = False
    """Overlap the collectives of tensor parallelism with the adjacent matmuls, through symmetric memory. CUDA only,
    within one NVLink domain; the compiler does it, so it needs compile.enable. With float8, only reduce-scatters overlap."""
    cpu_offload: Annotated[bool, EffectiveWhen(CUDA)] = False
    """Keep parameters, gradients and optimizer state in CPU memory and move one block at a time to the GPU. CUDA only."""


class Moe(Section):
    """MoE models (mixture of experts)."""

    max_tokens_factor: Annotated[float, Field(ge=0.01, le=1024.0, allow_inf_nan=False), _WITH_EXPERTS, MAY_CHANGE] = 1.5
    """The most rows of tokens that a rank receives for its experts at a time, relative to balanced routing. Routing that sends
    it more takes additional chunks, with the same results, so that memory is bounded under any routing. Higher values use more
    memory and fewer chunks; from expert_parallel_degree on, one chunk is enough."""
    bias_update_speed: Annotated[bounds.NonNegative, ALWAYS] = 0.0
    """How far each step moves the bias of an expert in its router: up if it got fewer tokens of the global batch than the mean,
    down if more (DeepSeek-V3, arXiv:2412.19437: 1e-3). For models whose routers have such a bias."""
    balance_loss: Annotated[bounds.NonNegative, ALWAYS] = 0.0
    """Weight of each router's balance loss, the mean over sequences (DeepSeek-V3, equations 17 to 20: 1e-4). It is added to the
    gradients for each router, so divide the weight of code that averages over layers by their number; the reported loss is
    without it."""
    router_z_loss: Annotated[bounds.NonNegative, ALWAYS] = 0.0
    """Weight of the squared log-sum-exp of each router's logits, the mean over tokens (ST-MoE, arXiv:2202.08906: 1e-3). It is
    added to the gradients for each router; the reported loss is without it."""


class Lora(Section):
    """Training of low-rank adapters; the model's own weights are frozen (docs/guides/lora.md)."""

    enable: Annotated[bool, ALWAYS, _OTHER_PARAMETERS] = False
    """Freeze every weight and train low-rank adapters of linear layers. checkpoint.initial_load_path loads the frozen weights;
    they are kept in training.mixed_precision_param."""
    rank: Annotated[int, Field(ge=1, le=2**16), _WITH_LORA, _OTHER_PARAMETERS] = 16
    """Rows of A and columns of B in W + alpha / rank * B A."""
    alpha: Annotated[bounds.Positive, _WITH_LORA] = 32.0
    """Scale of the adapters; divided by their rank."""
    modules: Annotated[list[str], Field(min_length=1), _WITH_LORA, _OTHER_PARAMETERS] = ["layers.*"]
    """Patterns of the names of linear layers that get adapters, such as "layers.*.attention.w[qv]". A star also matches dots:
    "layers.*" is every linear layer of the blocks. Patterns that cover the experts of an MoE layer are refused."""


class Float8(Section):
    """Matmuls of linear layers in float8 (docs/guides/float8.md)."""

    enable: Annotated[bool, ALWAYS] = False
    """Multiply the linear layers of the blocks in float8, with dynamic scales. Needs torchao."""
    recipe_name: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], _WITH_FLOAT8] = "tensorwise"
    """"tensorwise": one scale per tensor, the fastest. "rowwise": one per row, more accurate. "rowwise_with_gw_hp": one per
    row, and the gradients of the weights in training.mixed_precision_param, the most accurate."""
    filter_fqns: Annotated[list[str], _WITH_FLOAT8] = []
    """Patterns of the names of linear layers that stay in training.mixed_precision_param, such as "layers.0.*" or
    "layers.*.attention.w[kv]". The head always does."""
    enable_fsdp_float8_all_gather: Annotated[bool, _WITH_FLOAT8] = False
    """All-gather parameters in float8, which halves the communication. With "tensorwise" only."""
    emulate: Annotated[bool, _WITH_FLOAT8, MAY_CHANGE] = False
    """Cast to float8 and multiply the results in float32: slow; for devices without float8 matmuls and for tests."""


class ActivationCheckpoint(Section):
    """Which activations are recomputed in the backward pass instead of being kept."""

    ON_RESUME = MAY_CHANGE

    mode: Annotated[Literal["none", "full", "selective", "memory_budget"], ALWAYS] = "none"
    """"full": only the input of each block is kept. "selective": see selective_ac_option. "memory_budget": the compiler chooses
    what to keep, see memory_budget; needs compile.enable."""
    selective_ac_option: Annotated[Literal["op"] | bounds.Count, EffectiveWhen('activation_checkpoint.mode = "selective"')] = (
        "op"
    )
    """With mode "selective". "op": each block keeps the results of attention, of MoE layers, of collectives and of every
    second matmul, and recomputes the rest. A number n: every n-th block is recomputed as with "full"."""
    memory_budget: Annotated[bounds.Fraction, EffectiveWhen('activation_checkpoint.mode = "memory_budget"')] = 0.5
    """With mode "memory_budget": the share of activations that is kept. 0: inputs only; 1: the compiler's default."""
    sequence_chunks: Annotated[bounds.Count, _WITH_FULL] = 1
    """With mode "full": each feed-forward layer computes the sequence in this many parts, and recomputes them one by one in the
    backward pass, so that memory holds the activations of one part at a time. For long sequences."""
    offload: Annotated[bool, _WITH_FULL.and_when(CUDA)] = False
    """With mode "full": the inputs of blocks are in host memory between forward and backward pass; copies overlap with
    computation. For long sequences."""


class Compile(Section):
    """torch.compile."""

    ON_RESUME = MAY_CHANGE

    enable: Annotated[bool, ALWAYS] = False
    """Compile the components. Each block is one graph, and one compilation serves all blocks."""
    components: Annotated[list[Literal["model", "loss"]], Field(min_length=1), _WITH_COMPILE] = ["model", "loss"]
    """"model": the blocks. "loss": the final norm and the loss on logits."""
    backend: Annotated[str, _WITH_COMPILE] = "inductor"
    """torch.compile's backend. On a CPU "inductor" needs a C++ compiler."""


class Optimizer(Section):
    """AdamW, Adam, Muon, or one of your own."""

    name: Annotated[Literal["AdamW", "Adam", "Muon"] | bounds.OwnPart, ALWAYS] = "AdamW"
    """AdamW decouples weight decay from the gradient (Loshchilov & Hutter, arXiv:1711.05101). Adam adds the decay to the
    gradient and needs far smaller values of weight_decay than the default. Muon orthogonalizes the momentum of the blocks'
    matrices (Jordan 2024; Liu et al., arXiv:2502.16982), also of each expert, and leaves all else to AdamW, with the same lr: a
    matrix's update is scaled to the size of AdamW's. "package.module:Class" is a class of your own, or of PyTorch:
    "torch.optim:RAdam" (docs/guides/own_parts.md)."""
    lr: Annotated[bounds.Rate, ALWAYS] = 8e-4
    """Peak learning rate; lr_scheduler scales it."""
    beta1: Annotated[bounds.Beta, _WITH_BUILT_IN] = 0.9
    """Decay of the running mean of gradients."""
    beta2: Annotated[bounds.Beta, _WITH_BUILT_IN] = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Annotated[bounds.Epsilon, _WITH_BUILT_IN] = 1e-8
    """Added to the root of the second moment."""
    momentum: Annotated[bounds.Beta, _WITH_MUON] = 0.95
    """Muon's decay of the running mean of gradients."""
    nesterov: Annotated[bool, _WITH_MUON] = True
    """Muon adds the gradient once more to the running mean before it is orthogonalized."""
    ns_steps: Annotated[int, Field(ge=1, le=20), _WITH_MUON] = 5
    """Muon's Newton-Schulz iterations, in training.mixed_precision_param if that is float32, else in bfloat16."""
    options: Annotated[dict[str, JsonValue], EffectiveWhen('optimizer.name has ":"')] = {}
    """Keyword arguments of your own optimizer, as a table: [optimizer.options], or --optimizer.options.NAME VALUE."""
    weight_decay: Annotated[bounds.NonNegative, ALWAYS] = 0.1
    """Weight decay of the parameters that are decayed."""
    decay_parameters: Annotated[str, EffectiveWhen("optimizer.weight_decay > 0")] = ""
    """A regular expression, searched in each parameter's name; the parameters that match are decayed. Empty: all parameters
    with two or more dimensions, that is matrices and embeddings, but no norm weights or biases."""
    groups: Annotated[list[Group], ALWAYS] = []
    """Parameters with settings of their own, each entry a table: [[optimizer.groups]] with pattern, lr, weight_decay,
    frozen."""
    ema_decay: Annotated[bounds.Beta, EffectiveWhen("checkpoint.enable = true or validation.enable = true"), MAY_CHANGE] = 0.0
    """Decay of an exponential moving average (EMA) of the trained weights, such as 0.999. It is kept in float32 and in
    checkpoints, and validation measures it too (docs/guides/long_runs.md). Update t uses (1 + t) / (10 + t) where that is
    smaller. 0: no EMA."""
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], _WITH_BUILT_IN, MAY_CHANGE] = "fused"
    """"fused": one kernel for all parameters. "foreach": one kernel per operation. "for-loop": one kernel per operation and
    parameter. The mathematics is the same. With training.dtype = "bfloat16", "fused" is one compiled kernel per parameter and
    "foreach" does not exist."""
    rounding: Annotated[Literal["stochastic", "compensated"], EffectiveWhen('training.dtype = "bfloat16"')] = "stochastic"
    """How updated parameters are rounded with training.dtype = "bfloat16". "stochastic": up or down at random, so that updates
    smaller than bfloat16's resolution count in the mean; seeded per parameter, step and element. "compensated": the rounding
    error is kept in 2 more bytes per parameter; together they are the float32 parameter."""


class Distillation(Section):
    """Training with a second, frozen model (docs/guides/distillation.md)."""

    teacher: Annotated[bounds.Text, ALWAYS, MAY_CHANGE] = ""
    """A folder in Hugging Face's format, of any family of models/ and of the same vocabulary. Its model is sharded like the one
    that is trained, kept in training.mixed_precision_param, evaluated on the same tokens, and not saved. An own training.loss
    gets its logits."""
    weight: Annotated[bounds.Fraction, _WITH_TEACHER] = 0.5
    """The loss of each label is (1 - weight) x cross entropy + weight x temperature^2 x KL(teacher || student). The reported
    training loss is this sum; validation reports the cross entropy."""
    temperature: Annotated[bounds.Positive, _WITH_TEACHER] = 1.0
    """The logits of both models are divided by it for the divergence (Hinton et al., arXiv:1503.02531)."""


class LRScheduler(Section):
    """Warm-up, stable, decay: the learning rate as a function of the step."""

    warmup_steps: Annotated[bounds.StepsOrNone, ALWAYS] = 200
    """Steps in which the rate rises linearly from lr / warmup_steps to lr."""
    total_steps: Annotated[bounds.Steps | None, ALWAYS] = None
    """Length of the schedule; set it if training.steps ends a run before its schedule. Unset: training.steps."""
    decay_ratio: Annotated[bounds.Fraction | None, ALWAYS] = None
    """Share of total_steps that decays, at the end; the rate is constant between warm-up and decay. Unset: the decay starts
    right after the warm-up."""
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"] | bounds.OwnPart, _WITH_DECAY] = "linear"
    """Shape of the decay; "package.module:name" is a function of your own (docs/guides/own_parts.md)."""
    options: Annotated[dict[str, JsonValue], _WITH_DECAY.and_when('lr_scheduler.decay_type has ":"')] = {}
    """Keyword arguments of your own decay_type, as a table: [lr_scheduler.options], or --lr_scheduler.options.NAME VALUE."""
    min_lr_factor: Annotated[bounds.Fraction, _WITH_DECAY] = 0.0
    """The decay ends at this fraction of lr, in the last step. With 0 the last step is the last one above 0."""


class Config(StrictModel):
    """A whole run. Sections are TOML tables."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    dataloader: Dataloader = Dataloader()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    distillation: Distillation = Distillation()
    moe: Moe = Moe()
    lora: Lora = Lora()
    float8: Float8 = Float8()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    hooks: Hooks = Hooks()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    validation: Validation = Validation()

    @functools.cached_property
    def layers(self) -> dict[str, ConfigLayer]:
        """The layer that has set each key. `read.py` writes it; a configuration made in Python is one layer."""
        sections = type(self).model_fields
        return {f"{section}.{name}": FILE for section in sections for name in getattr(self, section).model_fields_set}

    def idle(self, hardware: Hardware) -> list[effects.Idle]:
        """The keys that have no effect on such hardware."""
        return list(effects.idle(self, hardware, self.layers))

    def settled(self, hardware: Hardware) -> "Config":
        """The configuration with all keys that have no effect at their defaults, so that nothing can depend on them."""
        settled = self.with_keys({f"{key.section}.{key.name}": key.default for key in self.idle(hardware)})
        return settled if settled == self else settled.settled(hardware)  # what depended on them may have no effect either

    def with_keys(self, keys: dict[str, Any]) -> "Config":
        """A copy with other values of keys, such as {"training.steps": 5}, which are not validated."""
        config = self
        for key, value in keys.items():
            section, _, name = key.partition(".")
            config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
        return config

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in steps."""
        return self.lr_scheduler.total_steps or self.training.steps

    @property
    def decay_steps(self) -> int:
        """Steps in which the learning rate decays."""
        cfg, total = self.lr_scheduler, self.schedule_steps
        return total - cfg.warmup_steps if cfg.decay_ratio is None else round(total * cfg.decay_ratio)

    def accumulates(self, ranks: int) -> bool:
        """Whether a step on so many ranks has more than one microbatch."""
        cfg = self.parallelism  # whose ranks of these three dimensions read the same samples:
        together = cfg.tensor_parallel_degree * cfg.context_parallel_degree * cfg.pipeline_parallel_degree
        return self.microbatches(max(1, ranks // together)) > 1

    def global_batch(self, data_degree: int) -> int:
        """Sequences per optimizer step over this many data-parallel ranks, derived if the key is -1."""
        given = self.training.global_batch_size
        return given if given > 0 else self.training.local_batch_size * data_degree

    def microbatches(self, data_degree: int) -> int:
        """Forward and backward passes of each rank per optimizer step."""
        return self.global_batch(data_degree) // (self.training.local_batch_size * data_degree)
