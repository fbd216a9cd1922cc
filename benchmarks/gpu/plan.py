"""The plan: parts, ordered by what their results decide, their runs, and the goals for one H200."""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

Options = dict[str, Any]  # "section.key" -> value


class Run(NamedTuple):
    """One command and its time limit."""

    name: str
    kind: str  # a key of KINDS in runs.py
    seconds: int  # its limit, several times the expected time
    expected: int  # seconds on one H200, estimated: start, compilation, steps
    config: str = ""  # a training run's recipe, ...
    options: Options = {}  # noqa: RUF012  ... and its options; of another kind the words in "words"
    needs: tuple[str, ...] = ()  # required packages; if one is missing, the run is left out
    gpus: int = 1  # with fewer GPUs, the run is left out


class Part(NamedTuple):
    """Runs that answer one question."""

    name: str
    question: str
    seconds: int  # the limit of all its runs together
    runs: tuple[Run, ...]


class Goal(NamedTuple):
    """A result that the best run of a part must reach."""

    text: str
    runs: str  # a pattern of PART/RUN
    figure: str
    at_least: float


# Without checkpoints: those of 8B would have 48 to 96 GB.
COMMON: Options = {
    "checkpoint.enable": False,
    "training.seq_len": 4096,
    "training.steps": 16,
    "training.global_batch_size": -1,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 4,
    "metrics.enable_tensorboard": False,
}
# What a rehearsal changes: a model of a few million parameters, a few short steps, and nothing that only a GPU has.
REHEARSAL: Options = {
    "model.flavor": "debug",
    "model.attention": "auto",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
    "compile.enable": False,
    "optimizer.implementation": "for-loop",
}
TRACED_STEP = 10  # of a run of kind "trace"

_8B: Options = {"training.dtype": "bfloat16"}
_8K: Options = _8B | {"training.seq_len": 8192}
_BUDGET: Options = {"activation_checkpoint.memory_budget": 0.8}
_LOWER_BUDGET: Options = {"activation_checkpoint.memory_budget": 0.5}
# frozen weights are bfloat16, adapters float32
_ADAPTERS: Options = {"lora.enable": True, "lora.modules": '["layers.*.attention.*"]'}
_TP: Options = {"parallelism.tensor_parallel_degree": 2}
_ASYNC: Options = {"parallelism.enable_async_tensor_parallel": True}
_EP: Options = {"parallelism.expert_parallel_degree": 2}
_AHEAD: Options = {"parallelism.fsdp_prefetch": 2}
_TENSORWISE, _ROWWISE = ({"float8.enable": True, "float8.recipe_name": name} for name in ("tensorwise", "rowwise"))


def _train(name: str, expected: int, config: str, batch: int, mode: str, options: Options = {}, **more: Any) -> Run:  # noqa: B006
    sizes = {"training.local_batch_size": batch, "activation_checkpoint.mode": mode}
    return Run(name, more.pop("kind", "train"), 180, expected, config, options | sizes, **more)


def _beside(peer: str, *needs: str) -> Run:
    words = "--model llama3:8b --seq 4096 --batch 4 --precision bfloat16-pure --recompute full --check-steps 3 --no-warm"
    return Run(peer, "throughput", 500, 180, options={"words": f"{words} --rounds 2 --steps 5 --peers {peer}"}, needs=needs)


PARTS = (
    Part(
        "start",
        "Does it run, and what can this GPU do? A failure here explains those below.",
        420,
        (
            Run("environment", "device", 120, 20),
            Run("debug recipe", "train", 120, 40, "llama_debug", {"training.seq_len": 256, "training.steps": 20}),
            Run("tests", "tests", 300, 150),
        ),
    ),
    Part(
        "8b",
        "8B with bfloat16 parameters: the headline; what recomputation saves and costs; the order of attention kernels.",
        1200,
        (
            _train("4k batch 4", 90, "llama_8b", 4, "none", _8B),
            _train("4k batch 5 memory_budget", 75, "llama_8b", 5, "memory_budget", _8B | _BUDGET),
            _train("4k batch 6 memory_budget", 75, "llama_8b", 6, "memory_budget", _8B | _LOWER_BUDGET),
            _train("8k batch 2", 70, "llama_8b", 2, "none", _8K),
            _train("4k batch 4 selective", 65, "llama_8b", 4, "selective", _8B),
            _train("4k batch 4 full", 65, "llama_8b", 4, "full", _8B),
            _train("4k batch 4 flash", 65, "llama_8b", 4, "none", _8B | {"model.attention": "flash"}),
            _train("4k batch 8 selective", 85, "llama_8b", 8, "selective", _8B),
        ),
    ),
    Part(
        "operations",
        "Before and after in one process: routers in float32 and on tensor cores, softcaps and sinks without and with a block "
        "mask, sizes of the head's chunks.",
        180,
        (Run("operations", "operations", 180, 60),),
    ),
    Part(
        "costs",
        "Where the time of the headline's step goes: what to work on next.",
        240,
        (_train("8b 4k batch 4", 80, "llama_8b", 4, "none", _8B, kind="trace"),),
    ),
    Part(
        "moe",
        "MoE models and softcaps on one GPU; adapters where parameters, gradients and moments do not fit.",
        540,
        (
            _train("olmoe batch 4", 45, "olmoe_7b", 4, "none", _8B | {"lr_scheduler.decay_ratio": 0.5}),
            _train("qwen3 30b-a3b adapters", 120, "qwen3_30b_a3b", 2, "selective", _ADAPTERS),
            _train("gpt-oss 20b adapters", 100, "gpt_oss_20b", 2, "selective", _ADAPTERS),
            _train("gemma 2 9b", 90, "gemma3_12b", 1, "selective", _8B | {"model.flavor": "2-9b"}),
        ),
    ),
    Part(
        "8b-float32",
        "Does 8B with float32 masters fit one GPU, as estimated?",
        180,
        (_train("4k batch 2 full", 85, "llama_8b", 2, "full"),),
    ),
    Part(
        "1b-3b",
        "How fast are the recipes of 1B and 3B, which recompute nothing?",
        360,
        (_train("1b batch 8 none", 50, "llama_1b", 8, "none"), _train("3b batch 4 none", 55, "llama_3b", 4, "none")),
    ),
    Part(
        "float8",
        "What float8 gives.",
        360,
        (
            _train("8k batch 2 tensorwise", 75, "llama_8b", 2, "none", _8K | _TENSORWISE, needs=("torchao",)),
            _train("8k batch 2 rowwise", 75, "llama_8b", 2, "none", _8K | _ROWWISE, needs=("torchao",)),
        ),
    ),
    Part(
        "documents",
        "What FlexAttention's document masks cost.",
        240,
        (_train("8b 4k batch 4", 75, "llama_8b", 4, "none", _8B | {"training.document_mask": True}),),
    ),
    Part(
        "qwen",
        "Qwen 2.5 7B on short sequences.",
        180,
        (_train("1k batch 16", 65, "qwen3_8b", 16, "none", _8B | {"model.flavor": "2.5-7b", "training.seq_len": 1024}),),
    ),
    Part(
        "memory", "What titanlite estimate predicts for every run; needs no GPU.", 600, (Run("estimates", "estimates", 600, 0),)
    ),
    Part(
        "peers",
        "The headline beside the peers that are installed.",
        1000,
        (_beside("hf", "transformers", "accelerate"), _beside("torchtitan", "torchtitan")),
    ),
    Part(
        "several-gpus",
        "With --gpus 2: asynchronous tensor parallelism, the exchange of expert parallelism, and how far ahead it gathers.",
        900,
        (
            _train("8b 4k batch 4 tp 2", 90, "llama_8b", 4, "selective", _8B | _TP, gpus=2),
            _train("8b 4k batch 4 tp 2 async", 90, "llama_8b", 4, "selective", _8B | _TP | _ASYNC, gpus=2),
            _train("olmoe batch 2", 90, "olmoe_7b", 2, "selective", _8B, gpus=2),
            _train("olmoe batch 2 ep 2", 90, "olmoe_7b", 2, "selective", _8B | _EP, gpus=2),
            _train("olmoe batch 2 ep 2 prefetch 2", 90, "olmoe_7b", 2, "selective", _8B | _EP | _AHEAD, gpus=2),
        ),
    ),
)
# The parts of one half-hour session on one H200, with the estimates made before. Later parts belong to other sessions.
SECONDS = 1800
OTHER_SESSIONS = ("peers", "several-gpus")

_TOKENS, _MFU = "tokens_per_second_per_device", "mfu_palm"
GOALS = (
    Goal("8B, 4,096 tokens, bfloat16 parameters", "8b/4k*", _TOKENS, 12_700),
    Goal("8B, 8,192 tokens, bfloat16 parameters", "8b/8k*", _TOKENS, 11_900),
    Goal("1B", "1b-3b/1b*", _MFU, 0.60),
    Goal("3B", "1b-3b/3b*", _MFU, 0.60),
    Goal("8B in float8, 8,192 tokens", "float8/8k*", _TOKENS, 14_500),
    Goal("Qwen 2.5 7B, 1,024 tokens", "qwen/*", _TOKENS, 14_500),
)
NEAR_ESTIMATE = 0.03  # how far a run's peak memory may be from the estimate


def options_of(run: Run, rehearse: bool) -> Options:
    """All options of a training run; those of the run override the common ones, a rehearsal's override both."""
    options = COMMON | run.options
    if run.kind == "trace":
        options |= {"profiling.enable_profiling": True, "profiling.profile_freq": TRACED_STEP}
    if rehearse:
        options |= REHEARSAL
        if run.kind == "trace":
            options |= {"profiling.profile_freq": 3}
        if options.get("float8.enable"):
            options |= {"float8.emulate": True}
    return options


def words_of(options: Options) -> list[str]:
    """Options as words of a command line."""
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in options.items()}
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def training_runs(parts: tuple[Part, ...]) -> dict[str, Run]:
    """The runs that train, by PART/RUN."""
    return {f"{part.name}/{run.name}": run for part in parts for run in part.runs if run.kind in ("train", "trace")}


def named(parts: tuple[Part, ...], patterns: list[str]) -> list[str]:
    """PART/RUN of the runs that one of the patterns matches, in the order of the plan."""
    names = [f"{part.name}/{run.name}" for part in parts for run in part.runs]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
