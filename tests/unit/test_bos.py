"""The beginning-of-text token: which it is, and that training, validation and inference add it by the same rule."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests import hf_folders
from tests.token_files import TEXTS, write_jsonl
from titanlite.config.schema import Config
from titanlite.data.batch import to_batch
from titanlite.data.mixture import Data, open_data
from titanlite.data.prepare import prepare
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.tokenizer import load_tokenizer
from titanlite.ground.errors import UserError
from titanlite.hf.export import Exported
from titanlite.loop.loss import summed_loss
from titanlite.registry.family import vocabulary_of

pytestmark = pytest.mark.usefixtures("cache")
BEGIN, BOTH = "<s> $A", "<s> $A </s>"


def assets(folder: Path, single: str = BEGIN, **settings: object) -> Path:
    """A tokenizer with the post-processor `single`; settings: those of tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_tokenizer(["a few words of text"])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    names = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=names)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    return folder


def opened(folder: Path, path: Path, add_bos: bool | None = None, **training: object) -> Data:
    keys = {"seq_len": 16, "dataset_path": str(path), "add_bos": add_bos, **training}
    model = {"name": "tests.tiny", "flavor": "plain", "hf_assets_path": str(folder)}
    config = Config.model_validate({"training": keys, "model": model})
    return open_data(config, vocabulary_of(config.model))


def tokens_of(data: Data) -> list[int]:
    return [number for rows in data.sources[0].rows for number in rows.file.ids[:].tolist()]


def torchtitan_stream(folder: Path, texts: list[str]) -> list[int]:
    """torchtitan 0.2.2 (hf_datasets/text_datasets.py): encode(text, add_bos=True, add_eos=True), one after the other."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(name) for name in ("<s>", "</s>"))
    plain = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    return [number for ids in plain for number in [bos, *ids, eos]]


# ----------------------------------------------------------------------------------------------------- the token, the rule


@pytest.mark.parametrize(
    ("single", "settings"),
    [
        (BEGIN, {}),
        (BOTH, {"bos_token": "<s>"}),
        ("$A </s>", {"bos_token": "<s>"}),
        ("</s> $A", {"bos_token": "</s>"}),  # one token for both, as in OPT
        (BEGIN, {"bos_token": "<s>", "add_bos_token": False}),
        ("$A", {"bos_token": None}),
    ],
)
def test_by_default_a_text_begins_as_in_transformers(tmp_path, single, settings):
    loaded = load_tokenizer(str(assets(tmp_path, single, **settings)))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))("some text").input_ids
    plain = loaded.tokenizer.encode("some text", add_special_tokens=False).ids
    assert loaded.begun(plain) == (theirs[:-1] if "</s>" in single[2:] else theirs)
    assert loaded.begun(loaded.begun(plain)) == loaded.begun(plain)


def test_bos_can_be_added_if_the_tokenizer_only_names_it_but_not_if_it_has_none(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(str(assets(tmp_path, "$A")), add_bos=True)
    loaded = load_tokenizer(str(assets(tmp_path, "$A", bos_token="<s>")), add_bos=True)
    assert loaded.spelled(loaded.beginning) == "<s>"
    assert load_tokenizer(str(assets(tmp_path)), add_bos=False).beginning == ()


# ---------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("single", [BOTH, "$A"])
def test_continued_training_of_a_llama_reads_torchtitans_tokens_and_has_transformers_loss(tmp_path, single):
    hf_folders.write(tmp_path / "llama", "tests.tiny", "plain")
    folder = assets(tmp_path / "llama", single, bos_token="<s>")
    data = opened(folder, write_jsonl(tmp_path / "a.jsonl"), add_bos=True)
    stream = torchtitan_stream(folder, TEXTS)
    assert tokens_of(data) == stream
    count = data.sources[0].samples
    arrays = data.read(np.zeros(count, int), np.arange(count))
    windows = np.array([stream[16 * row : 16 * row + 17] for row in range(count)])
    assert arrays.counted is None and np.array_equal(arrays.tokens, windows)  # every token is a label, BOS as well
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = hf_folders.read(folder, "tests.tiny", "plain")
    with torch.no_grad():
        logits = theirs(torch.tensor(windows[:, :-1])).logits
        expected = F.cross_entropy(logits.flatten(0, 1), torch.tensor(windows[:, 1:]).flatten())
        loss = summed_loss(ours, to_batch(arrays, count).microbatches()[0]) / (16 * count)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_under_a_mask_each_document_starts_at_bos_which_is_never_a_label_and_has_no_bytes(tmp_path):
    data = opened(
        assets(tmp_path / "assets"), write_jsonl(tmp_path / "a.jsonl"), document_policy="best_fit", document_mask=True
    )
    count = data.sources[0].samples
    arrays = data.read(np.zeros(count, int), np.arange(count))
    bos = torchtitan_stream(tmp_path / "assets", [""])[0]
    assert (arrays.tokens == bos).sum() == len(TEXTS)
    assert not arrays.counted[arrays.tokens == bos].any()
    starts = np.diff(arrays.documents, axis=1, prepend=0) > 0
    assert starts[arrays.tokens[:, :-1] == bos].all()
    assert data.byte_lengths[bos] == 0
    assert data.byte_lengths[tokens_of(data)].sum() == sum(len(text.encode()) for text in TEXTS)


def test_the_cache_keeps_texts_with_and_without_bos_apart_and_validation_follows(tmp_path):
    folder, path = assets(tmp_path / "assets"), write_jsonl(tmp_path / "a.jsonl")
    stream = torchtitan_stream(folder, TEXTS)
    bos = stream[0]
    for add_bos in (None, True, False):
        data = opened(folder, path, add_bos)
        assert tokens_of(data) == [number for number in stream if number != bos or add_bos is not False]
        expected = "no BOS" if add_bos is False else "<s>"
        assert data.describe()["beginning"] == data.derived_values(data.timeline(1), 1)["texts begin with"] == expected
    keys = {
        "training": {"add_bos": False},
        "validation": {"enable": True, "dataset_path": str(path)},
        "model": {"hf_assets_path": str(folder)},
    }
    config = Config.model_validate(keys)
    assert bos not in tokens_of(open_data(config, vocabulary_of(config.model), "validation"))


@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_a_chat_begins_with_bos_once_and_it_is_no_label(tmp_path, template):
    folder = assets(tmp_path / "assets", bos_token="<s>")
    turns = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + turns)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "some text " * 9}]}))
    [rows] = opened(folder, tmp_path / "chats.jsonl").sources[0].rows
    bos = torchtitan_stream(folder, [""])[0]
    assert rows.file.ids[:].tolist().count(bos) == 1 and rows.file.ids[:][0] == bos
    assert rows.file.loss[:].tolist() == [0] + [1] * (rows.file.tokens - 1)


# ------------------------------------------------------------------------------------------------------------- token files


def test_token_files_with_another_beginning_are_refused_with_the_key_that_allows_them(tmp_path):
    folder, text = assets(tmp_path / "assets"), write_jsonl(tmp_path / "for-tokens.jsonl")
    for add_bos in (True, False):
        output = tmp_path / f"tokens-{add_bos}"
        loaded = load_tokenizer(str(folder), add_bos=add_bos)
        options = {"append_eos": True, "workers": 1, "shard_tokens": 10**9, "on_error": "fail"}
        manifest = prepare.prepare([str(text)], output, loaded, **options)
        assert manifest["beginning_of_text"] == list(loaded.beginning)
        assert opened(folder, output, add_bos)
        words = "<s>, and those of this run with no BOS" if add_bos else "no BOS, and those of this run with <s>"
        with pytest.raises(UserError, match=rf"tokens-{add_bos}: its texts begin with {words}.* set training.add_bos = "):
            opened(folder, output, not add_bos)
    assert opened(folder, tmp_path / "tokens-True")
    with pytest.raises(UserError, match=r"training\.add_bos"):
        opened(folder, tmp_path / "tokens-False")


# ----------------------------------------------------------------------------------------------------------------- the API


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_prompt_in_python_begins_as_the_run_was_trained(tmp_path, add_bos):
    exported = Exported.__new__(Exported)  # without the checkpoint
    exported.assets, exported._given = str(assets(tmp_path)), ""
    numbers = {"data": {}, "config": {"training": {"add_bos": add_bos}}}
    exported.stored = SimpleNamespace(source=tmp_path, manifest=SimpleNamespace(numbers=numbers))
    assert bool(exported.tokenizer().beginning) == add_bos
