"""model.overrides: a flavor's dimensions are changed by file or option, and every wrong one is named before a run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from models import llama3
from models.rope import LinearScaling, YarnScaling
from titanlite.config.read import Faults, read_config, to_toml
from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.loop.checks import check
from titanlite.registry import family
from titanlite.registry.family import family_of, load_family

SCALED = llama3.FLAVORS["8b"].rope_scaling


def written(folder: Path, text: str, *options: str) -> Config:
    (folder / "run.toml").write_text(text)
    return read_config(folder / "run.toml", list(options))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("[model.overrides]\ndim = 512\nn_layers = 8\n", []),
        ("", ["--model.overrides.dim", "512", "--model.overrides.n-layers=8"]),
        ("", ["--model.overrides", "{dim = 512, n_layers = 8}"]),
        ("[model.overrides]\ndim = 4\nn_layers = 8\n", ["--model.overrides.dim", "512"]),
        ("[model.overrides]\ndim = 4\nn_layers = 8\n", ["--model.overrides", "{dim = 512}"]),
    ],
)
def test_a_table_and_options_change_the_dimensions_they_name_and_no_others(tmp_path, text, options):
    config = written(tmp_path, text, *options)
    assert family_of(config.model).config == dataclasses.replace(llama3.FLAVORS["debug"], dim=512, n_layers=8)
    assert config.model.title == "llama3 debug with dim = 512, n_layers = 8"
    assert read_config(written_again(tmp_path, config), []) == config


def written_again(folder: Path, config: Config) -> Path:
    """The configuration as stored in the run folder."""
    (folder / "config.toml").write_text(to_toml(config))
    return folder / "config.toml"


def test_overrides_of_a_file_add_to_those_of_its_base(tmp_path):
    (tmp_path / "base.toml").write_text("[model.overrides]\ndim = 512\nrope_scaling = { factor = 4.0, low_freq_factor = 2 }\n")
    config = written(tmp_path, 'base = "base.toml"\n[model.overrides]\ndim = 256\nrope_scaling.factor = 9\n')
    assert config.model.overrides == {"dim": 256, "rope_scaling": {"factor": 9, "low_freq_factor": 2}}


def test_an_empty_table_as_an_option_resets_that_of_a_file(tmp_path):
    assert written(tmp_path, "[model.overrides]\ndim = 512\n", "--model.overrides", "{}").model.overrides == {}


@pytest.mark.parametrize("as_option", [False, True])
def test_a_table_with_a_rope_type_replaces_the_whole_scaling_of_the_layer_below(tmp_path, as_option):
    (tmp_path / "base.toml").write_text('[model.overrides.rope_scaling]\nrope_type = "yarn"\nfactor = 4.0\nbeta_fast = 16.0\n')
    table = '{ rope_type = "yarn", factor = 8.0 }'
    of_file = "" if as_option else f"[model.overrides]\nrope_scaling = {table}\n"
    options = ["--model.overrides.rope_scaling", table] if as_option else []
    config = written(tmp_path, f'base = "base.toml"\n{of_file}', *options)
    assert config.model.overrides == {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("False", False), ("true", True), (".5", 0.5), ("-2.", -2.0), ("1e-3", 1e-3), ("3", 3), ("2024-01-01", "2024-01-01"),
     ("a.b", "a.b"), ("'3'", "3"), ("[1, 2]", [1, 2])],
)  # fmt: skip
def test_an_option_of_a_users_own_code_is_read_as_the_same_text_for_a_key_of_the_schema(text, value):
    found = read_config(None, ["--training.dataset", "my_parts:Data", "--training.dataset_options.x", text])
    assert found.training.dataset_options == {"x": value} and type(found.training.dataset_options["x"]) is type(value)


@pytest.mark.parametrize(
    ("flavor", "value", "expected"),
    [
        ("8b", {"factor": 16}, SCALED._replace(factor=16.0)),
        ("8b", "none", None),
        ("debug", {"rope_type": "llama3", **SCALED._asdict()}, SCALED),
        ("debug", {"rope_type": "linear", "factor": 4}, LinearScaling(4.0)),
        ("8b", {"rope_type": "yarn", "factor": 4, "original_max_positions": 8192}, YarnScaling(4.0, 8192)),
    ],
)
def test_a_nested_table_changes_what_it_names_and_none_removes_it(flavor, value, expected):
    found = load_family("llama3", flavor, overrides={"rope_scaling": value}).config.rope_scaling
    assert found == expected and [*map(type, found or ())] == [*map(type, expected or ())]


def test_a_table_with_a_rope_type_is_a_whole_scaling_also_of_the_flavors_own_type():
    """Its other numbers had been the flavor's, such as the truncate = false of gpt-oss."""
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 4096}
    assert load_family("gpt_oss", "20b", overrides={"rope_scaling": table}).config.rope_scaling == YarnScaling(4.0, 4096)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"dimm": 512}, "model.overrides.dimm = 512: tests.tiny has no such dimension; did you mean model.overrides.dim?"),
        ({"dim": 0}, "model.overrides.dim = 0: must be greater than 0"),
        ({"rope_theta": float("inf")}, "model.overrides.rope_theta = Infinity: must be a number"),
        ({"rope_scaling": {"rope_type": "ntk"}}, 'rope_scaling = {"rope_type": "ntk"}: must be "none", or a table whose'),
        ({"rope_scaling": {"rope_type": "linear", "factr": 8}}, "factr = 8: LinearScaling has no such dimension; did you mean"),
        ({"rope_scaling": {"factor": 8}}, 'rope_scaling = {"factor": 8}: must be "none", or a table whose rope_type is one of'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling: lacks low_freq_factor, high_freq_factor,"),
    ],
)
def test_a_wrong_override_is_refused_by_its_key(overrides, expected):
    with pytest.raises(UserError) as caught:
        load_family("tests.tiny", "plain", overrides=overrides)
    assert expected in str(caught.value)


@dataclass(frozen=True)
class Own:
    """A fork's dimensions, with more types than those of models/."""

    dim: int
    experts: int = 0
    windows: tuple[int, ...] = (1, 2)
    kind: Literal["a", "b"] = "a"
    offset: int = -1
    bias: float | None = None
    derived: int = dataclasses.field(init=False, default=1)

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"dim = {self.dim} is odd")


def test_a_field_that_may_be_0_says_so_where_no_flavor_has_0():
    assert load_family("deepseek_v3", "debug", overrides={"dense_layers": 0}).config.dense_layers == 0
    for wrong in ({"dense_layers": -1}, {"shared_experts": 0}):
        with pytest.raises(UserError, match=r"must be (at least 0|greater than 0)"):
            load_family("deepseek_v3", "debug", overrides=wrong)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"experts": 3, "windows": [4, 5], "kind": "b", "offset": 0, "bias": 1}, Own(2, 3, (4, 5), "b", 0, 1.0)),
        ({"experts": 0, "offset": -1, "bias": "None"}, Own(2)),
        ({"dim": 3}, "model.overrides: own.model refuses these dimensions: ValueError('dim = 3 is odd')"),
        ({"experts": -1}, "model.overrides.experts = -1: must be at least 0"),
        ({"derived": 2}, "model.overrides.derived = 2: own.model has no such dimension"),
    ],
)
def test_a_forks_own_types_and_checks_hold(monkeypatch, overrides, expected):
    monkeypatch.setattr(family, "load_module", lambda name: SimpleNamespace(FLAVORS={"small": Own(2)}))
    if isinstance(expected, Own):
        assert load_family("own.model", "small", overrides=overrides).config == expected
    else:
        with pytest.raises(UserError) as caught:
            load_family("own.model", "small", overrides=overrides)
        assert expected in str(caught.value)


def test_the_check_names_every_wrong_override_and_dimensions_that_do_not_fit_together(tmp_path, caplog):
    def checked(**overrides: Any) -> None:
        keys = {"job": {"dump_folder": str(tmp_path)}, "training": {"seq_len": 64}, "model": {"overrides": overrides}}
        check(Config.model_validate(keys), "run.toml", 1)

    checked(dim=512, n_layers=8)
    with pytest.raises(Faults, match=r"(?s)2 faults.*overrides\.dimm.*overrides\.n_layers"):
        checked(dimm=512, n_layers=-1)
    with pytest.raises(Faults, match=r"(?s)1 fault\n.*model\.overrides: these dimensions do not fit.*models/llama3\.py, line"):
        checked(n_heads=6)
    assert not caplog.records
