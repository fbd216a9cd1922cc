"""The tokenizer: which one a configuration names, which of its settings apply, and how the default one is trained."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from titanlite.data.prepare import cache
from titanlite.data.prepare.cache import train_tokenizer
from titanlite.data.sources import open_tokenizer
from titanlite.data.tokenizer import byte_lengths, describe, load_tokenizer, tokenizer_digest
from titanlite.ground.errors import UserError

_TEXTS = ["def add(a, b):\n    return a + b\n", "naïve café, 数学, 🙂\r\n\ttabs\n", "", "x = 1\n" * 20]


@pytest.fixture
def default_files(tmp_path, monkeypatch, cache) -> list[Path]:
    """Three small files in place of the standard library."""
    files = [tmp_path / f"{number}.py" for number in range(3)]
    for number, file in enumerate(files):
        file.write_text(_TEXTS[0] * (number + 1) + f"\nname_{number} = naïve\n" * 5, encoding="utf-8")
    monkeypatch.setattr("titanlite.data.prepare.cache.stdlib_files", lambda: files)
    return files


# ------------------------------------------------------------------------------------------------------------- training


def test_default_tokenizer_is_trained_once_on_the_default_data(default_files, monkeypatch):
    first = open_tokenizer("")
    assert first.tokenizer.to_str() == train_tokenizer(file.read_text(encoding="utf-8") for file in default_files).to_str()
    monkeypatch.setattr(cache, "train_tokenizer", None)
    second = open_tokenizer("")
    assert (tokenizer_digest(second), second.end_of_text) == (tokenizer_digest(first), first.end_of_text)


# -------------------------------------------------------------------------------------------------------------- loading


def test_the_vocabulary_size_follows_the_largest_id_if_some_are_unused(assets):
    path = assets / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].append({**content["added_tokens"][0], "content": "<far>", "id": 5000})
    content["model"]["vocab"]["<far>"] = 5000
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(str(assets)).vocabulary == 5001


@pytest.mark.parametrize("end", ["Ġ", {"content": "Ġ", "lstrip": False}])
def test_end_of_text_is_the_one_that_tokenizer_config_names(assets, end):
    (assets / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}), encoding="utf-8")
    loaded = load_tokenizer(str(assets))
    assert loaded.tokenizer.id_to_token(loaded.end_of_text) == "Ġ"


@pytest.mark.parametrize("newer", [{}, {"added_tokens_decoder": {}}])
@pytest.mark.parametrize("named", [{}, {"eos_token": "<|endoftext|>"}])
def test_the_special_tokens_of_an_older_folder_are_those_of_transformers(assets, named, newer):
    """transformers 4.30 saved a token that was set later in special_tokens_map.json alone."""
    (assets / "tokenizer_config.json").write_text(json.dumps(named | newer))
    (assets / "special_tokens_map.json").write_text('{"eos_token": {"content": "\u0120", "lstrip": false}}', encoding="utf-8")
    loaded, theirs = load_tokenizer(str(assets)), PreTrainedTokenizerFast.from_pretrained(assets).eos_token
    assert loaded.tokenizer.id_to_token(loaded.end_of_text) == (theirs or "<|endoftext|>")
    assert theirs == (named.get("eos_token") if newer else "Ġ")


@pytest.mark.parametrize(
    ("generation", "model", "others"),
    [
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 7}, {1, 106}),
        ({"temperature": 0.6}, {"eos_token_id": 7}, {7}),
        (None, None, set()),
    ],
)
def test_a_text_also_ends_where_the_model_beside_the_tokenizer_ends_it(assets, generation, model, others):
    for name, table in (("generation_config.json", generation), ("config.json", model)):
        if table is not None:
            (assets / name).write_text(json.dumps(table))
    loaded = load_tokenizer(str(assets))
    assert loaded.ends == {loaded.end_of_text} | others


def test_a_model_file_that_only_generation_needs_does_not_end_training(assets):
    (assets / "generation_config.json").write_text("version https://git-lfs.github.com/spec/v1")
    loaded = load_tokenizer(str(assets))
    with pytest.raises(UserError, match=r"generation_config\.json"):
        _ = loaded.ends


def test_truncation_and_padding_in_a_tokenizer_file_are_not_applied(assets):
    path = assets / "tokenizer.json"
    plain = load_tokenizer(str(assets)).tokenizer
    cutting = Tokenizer.from_file(str(path))
    cutting.enable_truncation(5)
    cutting.enable_padding()
    cutting.save(str(path))
    loaded = load_tokenizer(str(assets)).tokenizer
    expected = [encoding.ids for encoding in plain.encode_batch(_TEXTS)]
    assert [encoding.ids for encoding in loaded.encode_batch(_TEXTS)] == expected


def test_the_end_of_text_token_is_recognized_in_a_prompt_but_not_in_documents(assets):
    loaded = load_tokenizer(str(assets))
    text = "a<|endoftext|>"
    ids = loaded.encode(text)
    assert ids[-1] == loaded.end_of_text and loaded.decode(ids) == "a" and loaded.decode(ids, skip_special_tokens=False) == text
    ids = loaded.tokenizer.encode(text).ids
    assert loaded.end_of_text not in ids and loaded.tokenizer.decode(ids) == text


# --------------------------------------------------------------------------------------------------- what is known of it


def test_the_digest_distinguishes_tokenizers_but_not_their_files(assets, tmp_path):
    digest = tokenizer_digest(load_tokenizer(str(assets)))
    other = tmp_path / "other"
    other.mkdir()
    Tokenizer.from_file(str(assets / "tokenizer.json")).save(str(other / "tokenizer.json"), pretty=True)
    assert tokenizer_digest(load_tokenizer(str(other))) == digest
    train_tokenizer(["other other other"]).save(str(other / "tokenizer.json"))
    assert tokenizer_digest(load_tokenizer(str(other))) != digest


def _byte_fallback() -> Tokenizer:
    """As in Llama 2: a space is part of an entry, and a character without an entry is encoded as bytes."""
    entries = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *string.ascii_lowercase, "▁", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def _with_added_entries() -> Tokenizer:
    tokenizer = train_tokenizer(_TEXTS)
    tokenizer.add_tokens(["<think>", "    "])  # text entries in a vocabulary whose other entries are bytes
    return tokenizer


@pytest.mark.parametrize(
    ("make", "texts", "leading"),
    [
        (_byte_fallback, ["the thin cat", "naïve 数学 the 🙂", "x"], 1),
        (_with_added_entries, ["a <think>    cat", " naïve 数学 🙂\r\n\ttabs\n", ""], 0),
    ],
    ids=["byte fallback", "added entries"],
)
def test_bytes_of_ids_sum_to_those_of_the_decoded_text_for_every_kind_of_vocabulary(make, texts, leading):
    """Except for the space before a word, with which a text does not begin."""
    tokenizer = make()
    loaded = describe(tokenizer, None, "a test")
    lengths = byte_lengths(loaded)
    assert lengths.shape == (loaded.vocabulary,) and lengths[loaded.end_of_text] == 0
    for text in texts:
        ids = tokenizer.encode(text).ids
        decoded = tokenizer.decode(ids)
        assert decoded == text
        assert lengths[np.array(ids, int)].sum() == len(decoded.encode()) + leading
