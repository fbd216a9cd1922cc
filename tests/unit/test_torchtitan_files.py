"""The TOML files of torchtitan 0.2.2 load, or one message names everything in them that titanlite lacks."""

import pytest

from models import llama3, qwen3
from tests.torchtitan_files import FILES, settings, toml
from titanlite.config.read import Faults, read_config, read_words
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.errors import UserError
from titanlite.loop.checks import check
from titanlite.tools.check import all_faults
from titanlite.transforms.registry import family_of

# Files of dense families: the flavour that they stand for, and the ranks that they are for.
DENSE = {
    "base_config": (llama3.FLAVORS["debugmodel"], 1),
    "llama3/debug_model": (llama3.FLAVORS["debugmodel"], 1),
    "llama3/llama3_8b": (llama3.FLAVORS["8b"], 64),
    "llama3/llama3_70b": (llama3.FLAVORS["70b"], 256),
    "qwen3/qwen3_0.6b": (qwen3.FLAVORS["0.6b"], 1),
    "qwen3/qwen3_1.7b": (qwen3.FLAVORS["1.7b"], 1),
    "qwen3/qwen3_32b": (qwen3.FLAVORS["32b"], 8),
}
_NO_MODEL = "model.name = '{0}': there is no module models.{0}"
_BACKEND = ("[hf_transformers]", _NO_MODEL.format("transformers_modeling_backend"))
_EXPERTS = ("[quantize] grouped_mm.", ", linear.float8.filter_fqns")
_IMAGES = ("job.custom_config_module", "training.img_size", "validation.denoising_steps", "[encoder]")
# The others: what the one message names.
REFUSED = {
    "transformers_modeling_backend/debug_model": (
        "[hf_transformers]",
        _NO_MODEL.format(*["transformers_modeling_backend"] * 2),
    ),
    "transformers_modeling_backend/full": _BACKEND,
    "vlm/debug_model": ("[data]", "job.custom_config_module", _NO_MODEL.format("vlm")),
    "deepseek_v3/debug_model": (*_EXPERTS, "model.flavor = 'debugmodel': deepseek_v3 has the flavours"),
    "deepseek_v3/deepseek_v3_16b": (*_EXPERTS, "model.flavor = '16B': deepseek_v3 has the flavours"),
    "deepseek_v3/deepseek_v3_671b": _EXPERTS,
    "flux/debug_model": (*_IMAGES, "[inference]", _NO_MODEL.format("flux")),
    "flux/flux_dev_model": (*_IMAGES, _NO_MODEL.format("flux")),
    "flux/flux_schnell_model": (*_IMAGES, _NO_MODEL.format("flux")),
    "gpt_oss/debug_model": (*_EXPERTS, "model.flavor = 'debugmodel': gpt_oss has the flavours"),
    "llama3/llama3_405b": ("parallelism.tensor_parallel_degree = 8: each rank would scale its own part of a weight",),
    "llama3_ft/debug_model": ("[fault_tolerance]", "job.custom_config_module", "profiling.profiler_active = 10"),
    "llama4/debug_model": (*_EXPERTS, "linear.mx.filter_fqns", _NO_MODEL.format("llama4")),
    "llama4/llama4_17bx128e": ("pipeline_parallel_degree = 4", "linear.mx", _NO_MODEL.format("llama4")),
    "llama4/llama4_17bx16e": ("linear.mx.filter_fqns", _NO_MODEL.format("llama4")),
    "qwen3/qwen3_moe_debug": ("model.flavor = 'debugmodel_moe': qwen3 has the flavours",),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> str:
    """A folder with a tokenizer of fewer than 2,048 entries, like that of torchtitan's tests."""
    folder = tmp_path_factory.mktemp("assets")
    train_tokenizer(["a few words of text"]).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def words(assets, tmp_path):
    """What reads a file of torchtitan with paths of this machine, as a user does it."""
    (tmp_path / "text.txt").write_text("Some words to read. " * 100)

    def of(name: str) -> list[str]:
        letter = next(letter for letter, known in FILES.items() if known == name)
        (tmp_path / "run.toml").write_text(toml(letter))
        return [
            str(tmp_path / "run.toml"),
            *("--training.dataset", str(tmp_path / "text.txt"), "--training.dataset_path", ""),
            *("--model.hf_assets_path", assets, "--job.dump_folder", str(tmp_path / "out")),
        ]

    return of


def test_every_file_of_torchtitan_is_in_one_of_the_two_tables():
    assert sorted(FILES.values()) == sorted([*DENSE, *REFUSED])


@pytest.mark.parametrize("name", DENSE)
def test_a_file_of_a_dense_family_loads_with_paths_of_this_machine(words, name, capsys):
    dimensions, ranks = DENSE[name]
    path, config = read_words(words(name), "")
    check(config, path, ranks, open_files=False)
    assert family_of(config.model).config == dimensions
    theirs = settings(next(letter for letter, known in FILES.items() if known == name))
    assert config.training.seq_len == theirs["training.seq_len"] and config.optimizer.lr == theirs["optimizer.lr"]
    shown = capsys.readouterr().err
    assert f"{path}: taken from torchtitan's names:\n" in shown
    for key, value in theirs.items():  # each is kept, or the list says how it was taken
        section, _, last = key.partition(".")
        kept = getattr(getattr(config, section, None), last, None) == value
        assert kept or f"  {key} = " in shown or key in ("training.dataset", "model.hf_assets_path", "job.dump_folder"), key


@pytest.mark.parametrize("name", REFUSED)
def test_one_message_names_everything_in_a_file_that_titanlite_lacks(words, name):
    with pytest.raises(Faults) as caught, all_faults(8, None):
        path, config = read_words(words(name), "")
        check(config, path, 8, open_files=False)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(f"run.toml: {len(lines) - 1} fault{'s' if len(lines) > 2 else ''}")
    for expected in REFUSED[name]:
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (["--model.converters", '["float8"]'], "float8.enable", True),
        (["--model.converters=quantize.linear.float8"], "float8.enable", True),
        (["--quantize.linear.float8.recipe_name", "rowwise"], "float8.recipe_name", "rowwise"),
        (["--parallelism.pipeline_parallel_degree", "1"], "parallelism.tensor_parallel_degree", 1),
        (["--metrics.enable_wandb=false"], "metrics.log_freq", 10),
        (["--checkpoint.model_weights_only", "false"], "metrics.log_freq", 10),
        (["--training.compile", "true"], "compile.enable", True),
        (["--debug.seed", "7"], "training.seed", 7),
        (["--training.dataloader.num_workers", "2"], "dataloader.workers", 2),
        (["--activation_checkpoint.selective_ac_option", "2"], "activation_checkpoint.selective_ac_option", 2),
    ],
)
def test_an_option_with_torchtitans_name_is_taken_like_a_key_of_a_file(tmp_path, options, key, value):
    (tmp_path / "run.toml").write_text("")
    section, name = key.split(".")
    found = getattr(getattr(read_config(tmp_path / "run.toml", options), section), name)
    assert (found, type(found)) == (value, type(value))


def test_an_option_overrides_the_other_name_of_its_key_in_a_file(tmp_path):
    (tmp_path / "run.toml").write_text("quantize.linear.float8.emulate = true\ntraining.seed = 5\n")
    config = read_config(tmp_path / "run.toml", ["--float8.emulate", "false", "--debug.seed", "6"])
    assert (config.float8.emulate, config.training.seed) == (False, 6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics.enable_wandb = true", "metrics.enable_wandb = true (run.toml): not a key of titanlite: metrics.jsonl"),
        ("metrics.enable_wandb = 0", "metrics.enable_wandb = 0 (run.toml): not a key of titanlite"),
        ("metrics.rank_0_only = false", "titanlite always does what true requests; remove the key"),
        ("training.compile = true\ncompile.enable = false", "training.compile and compile.enable are one option"),
        ('checkpoint.export_dtype = "bfloat16"\ncheckpoint.enable = true', "`titanlite export-hf --dtype bfloat16`"),
        (
            'parallelism.context_parallel_degree = 2\nparallelism.context_parallel_rotate_method = "alltoall"',
            "use parallelism.context_parallel_method",
        ),
        (
            "parallelism.expert_parallel_degree = 2\nparallelism.expert_tensor_parallel_degree = 2",
            "tensor parallelism does not split experts",
        ),
        ('model.converters = ["mx"]', "use float8.enable"),
        (
            'quantize.linear.float8.filter_fqns = ["attention.wk"]',
            "[quantize] linear.float8.filter_fqns: not a key of titanlite",
        ),
        ("debug.seed = 1\ntraining.seed = 2", "debug.seed and training.seed are one option; give only training.seed"),
        ("debug.seed = -1", "training.seed = -1 (given as debug.seed): must be greater than or equal to 0"),
        ('activation_checkpoint.selective_ac_option = "0"', "selective_ac_option = 0 (run.toml): must be"),
    ],
)
def test_a_value_that_asks_for_something_else_is_refused_with_a_remedy(tmp_path, text, expected):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(tmp_path / "run.toml", [])
    assert expected in str(caught.value)
