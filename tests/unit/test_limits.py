"""A document that a tokenizer or template from elsewhere never finishes is named, and the others are tokenized."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from titanlite.data.prepare import limits
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.limits import Limits
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import BadDocument
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import UserError

# What a template computes for the message "go" alone.
EXPLODING = {
    "a loop without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "a power": "{{ 2**3000000000 }}",
    "a product": "{{ 'x' * 100000000000 }}",
    "a filter": "{{ 'x'|center(100000000000) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
TEMPLATE = "{%% for m in messages %%}{%% if m.content == 'go' %%}%s{%% endif %%}{{ m.content }}<eos>{%% endfor %%}"


def assets(folder: Path, pattern: str = r"\s", template: str | None = None) -> str:
    """A tokenizer's folder: it splits text by a pattern."""
    letters = {letter: number for number, letter in enumerate(["<eos>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return str(folder)


def tokenize(folder: Path, tokenizer: str, entries: list[dict[str, Any]], on_error: str = "fail") -> dict[str, Any]:
    (folder / "a.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return prepare(
        [str(folder / "a.jsonl")], folder / "out", load_tokenizer(tokenizer), append_eos=True, workers=1, shard_tokens=10**9,
        on_error=on_error, chat=load_template(tokenizer),
    )  # fmt: skip


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(autouse=True)
def strict(monkeypatch) -> None:
    monkeypatch.setattr(limits, "DOCUMENT", Limits(seconds=1.0, bytes=2**28))


@pytest.mark.parametrize("name", EXPLODING)
def test_a_template_that_takes_all_time_or_memory_is_loaded_at_once_and_its_document_is_named(tmp_path, name):
    folder = assets(tmp_path / "assets", template=TEMPLATE % EXPLODING[name])
    begun = time.process_time()
    assert load_template(folder) is not None
    assert time.process_time() - begun < 1.0
    with pytest.raises(BadDocument, match=r"a\.jsonl, line 2: ") as raised:
        tokenize(tmp_path, folder, [chat("stay"), chat("go")])
    assert "template" in str(raised.value)


def test_documents_that_explode_are_skipped_and_listed_and_the_others_are_tokenized(tmp_path):
    folder = assets(tmp_path / "assets", template=TEMPLATE % EXPLODING["a loop without end"])
    entries = [chat("a"), chat("go"), {"text": "b"}, chat("go"), chat("c")]
    manifest = tokenize(tmp_path, folder, entries, on_error="skip")
    listed = [json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in listed] == [2, 4] and manifest["documents"] == 3
    assert all("1 s of processor time" in entry["reason"] and "tokenizer.json" in entry["reason"] for entry in listed)


def test_a_regular_expression_that_explodes_is_a_message_with_file_and_line(tmp_path):
    with pytest.raises(BadDocument, match=r"a\.jsonl, line 2: the tokenizer cannot encode it: .*retry-limit"):
        tokenize(tmp_path, assets(tmp_path / "assets", "(a+)+$"), [{"text": "b"}, {"text": "a" * 60 + "!"}])


def test_a_tokenizer_that_explodes_while_it_is_loaded_is_a_message_with_the_file(tmp_path):
    folder = Path(assets(tmp_path / "assets"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "b")
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"].append({**saved["added_tokens"][0], "id": 200, "content": "a" * 60 + "!", "normalized": True})
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer: .*retry-limit"):
        load_tokenizer(str(folder))
