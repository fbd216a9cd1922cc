"""A checkpoint opened for inference: with the tokenizer of its run, and after the folder of its tokenizer has moved."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.hf_folders import change_json
from titanlite.checkpoint import manifest
from titanlite.data.tokenizer import load_tokenizer, tokenizer_digest
from titanlite.ground.errors import UserError
from titanlite.hf.export import export
from titanlite.tools.open_model import LoadedModel, family_at, open_model


@pytest.fixture
def checkpoint(pools, source, tmp_path) -> Path:
    """As of a run with the folder `source` in model.hf_assets_path, which alone has its dimensions."""
    change_json(source / "config.json", rms_norm_eps=1e-3)
    folder = tmp_path / "weights"
    pools[1].run("tests.hf_folders:import_here", source=source, output=folder, model="tests.tiny")
    found = manifest.read(folder)
    assert found.numbers["config"]["model"]["flavor"] == "hf"
    trained_with = {"tokenizer": tokenizer_digest(load_tokenizer(str(source)))}
    manifest.write(folder, found._replace(numbers=found.numbers | {"data": trained_with}))
    return folder


def opened(checkpoint: Path, assets: str = "") -> LoadedModel:
    return open_model(checkpoint, torch.device("cpu"), assets=assets, name="tests.tiny")


def test_another_tokenizer_than_that_of_the_run_is_refused_by_generation_as_by_exports(
    checkpoint, source, tmp_path, group_of_one
):
    assert opened(checkpoint).tokenizer.source == str(source / "tokenizer.json")
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<more>"])
    tokenizer.save(str(other / "tokenizer.json"))
    with pytest.raises(UserError, match=r"weights: trained with another tokenizer than \S+other; .* --tokenizer"):
        opened(checkpoint, str(other))
    tokenizer.save(str(source / "tokenizer.json"))  # the folder of the run has changed
    with pytest.raises(UserError, match=r"weights: trained with another tokenizer than \S+source; .* --tokenizer"):
        opened(checkpoint)
    with pytest.raises(UserError, match=r"weights: trained with another tokenizer than \S+source; .* --assets"):
        export(checkpoint, tmp_path / "out", named="tests.tiny")


def test_the_folder_of_tokenizer_and_dimensions_may_have_moved(checkpoint, source, tmp_path, group_of_one):
    before = opened(checkpoint)
    moved = source.rename(tmp_path / "moved")
    for act in (opened, family_at):
        with pytest.raises(UserError, match=r'model\.hf_assets_path = "\S+source": no such folder; .* --tokenizer'):
            act(checkpoint, **({} if act is opened else {"model": "tests.tiny"}))
    assert family_at(checkpoint, "tests.tiny", str(moved)).config.norm_eps == 1e-3
    after = opened(checkpoint, str(moved))
    assert after.tokenizer.source == str(moved / "tokenizer.json")
    assert all(map(torch.equal, after.model.parameters(), before.model.parameters()))
    assert export(checkpoint, tmp_path / "out", assets=str(moved), named="tests.tiny")


def test_a_folder_with_a_tokenizer_alone_leaves_the_dimensions_to_that_of_the_run(checkpoint, source, tmp_path, group_of_one):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert opened(checkpoint, str(alone)).tokenizer.source == str(alone / "tokenizer.json")
    (alone / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"alone: there is no tokenizer\.json in it; .* --tokenizer"):
        opened(checkpoint, str(alone))
