"""`titanlite convert-config` on the 23 TOML files of torchtitan 0.2.2: each line is converted, or is a comment with the
reason.
"""

import re
from pathlib import Path

import pytest

from models import deepseek_v3, llama3, qwen3
from tests.hostile.arguments import run_command
from tests.torchtitan_files import FILES, settings, toml
from titanlite.config.effects import Hardware
from titanlite.config.read import KEYS, read_config, toml_value
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.ground.untrusted import parse_toml, read_toml
from titanlite.loop.checks import check
from titanlite.registry.family import family_of
from titanlite.tools.convert_config import INSTEAD, RENAMED, convert

ROOT = Path(__file__).parents[2]
LETTERS = {name: letter for letter, name in FILES.items()}
# Files that run with the paths of a machine: the flavor that replaces theirs, and their ranks.
DENSE = {
    "llama3/debug_model": (llama3.FLAVORS["debugmodel"], 1),
    "llama3/llama3_70b": (llama3.FLAVORS["70b"], 256),
    "qwen3/qwen3_0.6b": (qwen3.FLAVORS["0.6b"], 1),
    "deepseek_v3/deepseek_v3_671b": (deepseek_v3.FLAVORS["671b"], 64),
}


def converted(folder: Path, text: str) -> Path:
    """The converted file of torchtitan's text."""
    path = folder / "run.toml"
    path.write_text(convert(parse_toml(text)), encoding="utf-8")
    return path


def by_section(text: str) -> dict[str, list[str]]:
    """The lines of each section, including comments."""
    lines: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        if header := re.fullmatch(r"(?:# )?\[(\w+)\]", line):
            section = lines.setdefault(header[1], [])
        else:
            section.append(line)
    return lines


def own_paths(folder: Path) -> list[str]:
    """Options with paths of this machine, as a user gives them. The tokenizer has fewer than 2,048 entries, as torchtitan's."""
    (folder / "text.txt").write_text("Some words to read. " * 100)
    train_tokenizer(["a few words of text"]).save(str(folder / "tokenizer.json"))
    return [
        *("--training.dataset_path", str(folder / "text.txt"), "--model.hf_assets_path", str(folder)),
        *("--job.dump_folder", str(folder / "out")),
    ]


@pytest.mark.parametrize("name", LETTERS)
def test_each_line_is_converted_or_becomes_a_comment_with_the_reason(tmp_path, name):
    path = converted(tmp_path, toml(LETTERS[name]))
    config = read_config(path, [])
    assert not {f"{key.section}.{key.name}" for key in config.idle(Hardware())} & config.layers.keys()
    lines = by_section(path.read_text())
    for key, value in settings(LETTERS[name]).items():
        section, _, rest = {"model.converters": "float8.enable", **RENAMED}.get(key, key).partition(".")
        expected = value if key != "model.converters" else True
        if (section, rest) == ("activation_checkpoint", "selective_ac_option"):
            expected = int(value) if value.isdecimal() else value
        setting = f"{rest} = {toml_value(expected)}"
        found = [line for line in lines[section] if line.removesuffix("  # titanlite has no such family") == setting]
        found += [line for line in lines[section] if line.startswith(f"# {setting}  (") and line.endswith(")")]
        assert len(found) == 1, key
        if not found[0].startswith("#"):
            assert getattr(getattr(config, section), rest) == expected and f"{section}.{rest}" in config.layers
    assert sum(map(len, lines.values())) == len(settings(LETTERS[name]))


@pytest.mark.parametrize("name", DENSE)
def test_a_converted_file_runs_with_paths_of_this_machine(tmp_path, name):
    dimensions, ranks = DENSE[name]
    config = read_config(converted(tmp_path, toml(LETTERS[name])), own_paths(tmp_path))
    check(config, name, ranks, open_files=False)
    assert family_of(config.model).config == dimensions


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ('model.converters = ["float8"]', "enable = true"),
        ('model.converters = ["mx"]', '# converters = ["mx"]  (use float8.enable'),
        ("training.compile = true", "enable = true"),
        ("debug.seed = -1", "# seed = -1  (must be greater than or equal to 0)"),
        ("training.seed = 2\ndebug.seed = 1", "# seed = 1  (another name of training.seed, which is set too)"),
        ("training.dataloader.num_workers = 2", "workers = 2"),
        ("metrics.log_frequency = 7", "# log_frequency = 7  (no such key; did you mean metrics.log_freq?)"),
        ("job.wxyz = 1", "# wxyz = 1  (no such key)"),
        ("own.things.here = 1", "# things.here = 1  (no such section)"),
        ("[[job]]\nx = 1", "# job = [{ x = 1 }]  (no such key"),
        ("job.description = 2026-01-01", '# description = "2026-01-01"  (must be a valid string)'),
        ('model.name = "flux"', 'name = "flux"  # titanlite has no such family'),
        ('own."a\\nb\\u007f" = "c\\nd"', '# "a\\nb\\u007f" = "c\\nd"  (no such section)'),
    ],
)
def test_a_setting_becomes_a_line(tmp_path, theirs, line):
    path = converted(tmp_path, theirs)
    read_config(path, [])
    lines = path.read_text().splitlines()
    assert [each for each in lines if each == line or (line[:1] == "#" and each.startswith(line))], lines


@pytest.mark.parametrize("recipe", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_a_file_of_titanlite_means_the_same_afterwards(tmp_path, recipe):
    theirs = read_toml(recipe)
    theirs.pop("base", None)
    (tmp_path / "before.toml").write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in theirs.items()))
    after = read_config(converted(tmp_path, (tmp_path / "before.toml").read_text()), [])
    assert after.settled(Hardware()) == read_config(tmp_path / "before.toml", []).settled(Hardware())


def test_the_command_prints_the_file_or_writes_a_new_one_and_prints_nothing_else(tmp_path, capfd):
    theirs, new = tmp_path / "theirs.toml", tmp_path / "new" / "ours.toml"
    theirs.write_text(toml("o"))
    expected = convert(parse_toml(toml("o")))
    for words, printed in (([], expected), (["--output", str(new)], "")):
        run_command("convert-config", str(theirs), *words)
        assert tuple(capfd.readouterr()) == (printed, "")
    assert new.read_text() == expected


def test_the_tables_match_the_keys_that_titanlite_has_and_lacks():
    assert set(RENAMED.values()) <= set(KEYS)
    assert not (set(INSTEAD) | set(RENAMED)) & set(KEYS)
