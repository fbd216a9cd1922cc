"""A document that a tokenizer or template from elsewhere never finishes is named, and the others are tokenized."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from titanlite.data.prepare import limited, limits
from titanlite.data.prepare.chat import load_template
from titanlite.data.prepare.limited import LimitedTokenizer
from titanlite.data.prepare.limits import Limits
from titanlite.data.prepare.prepare import prepare
from titanlite.data.prepare.readers import BadDocument
from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import UserError
from titanlite.inference.generate import Sampling, continue_texts

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
def strict(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(limits, "DOCUMENT", Limits(seconds=1.0, bytes=2**28))
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))


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


# --------------------------------------------------------------------------- outside of the data preparation: limited.py

_GROWS = normalizers.Sequence([normalizers.Replace("b", "b" * 1000)] * 5)  # one letter becomes 10^15
_NEARLY = "a" * 20 + "!"  # some 10 ms for "(a+)+$"


def _huge(folder: Path) -> None:
    """A tokenizer that grows a text without end, when it normalises a "b"."""
    _change(folder, lambda saved: saved.update(normalizer=json.loads(_GROWS.__getstate__())))


def _change(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    change(saved)
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def _adds(folder: Path, tokens: Iterable[str]) -> None:
    """More tokens, which the library normalises when it loads the file."""

    def change(saved: dict[str, Any]) -> None:
        common = {**saved["added_tokens"][0], "normalized": True, "special": False}
        saved["added_tokens"] += [{**common, "id": 200 + number, "content": token} for number, token in enumerate(tokens)]

    _change(folder, change)


def huge_at_load(folder: Path) -> None:
    assets(folder)
    _huge(folder)
    _adds(folder, ["b"])


def slow_at_load(folder: Path) -> None:
    assets(folder)
    pattern = normalizers.Replace(Regex("(a+)+$"), "b").__getstate__()
    _change(folder, lambda saved: saved.update(normalizer=json.loads(pattern)))
    _adds(folder, (f"{number}{_NEARLY}" for number in range(500)))


def huge_vocabulary(folder: Path) -> None:
    assets(folder)
    steps = [{"type": "Replace", "pattern": {"String": "b"}, "content": "b" * 1000}] * 5
    _change(folder, lambda saved: saved.update(decoder={"type": "Sequence", "decoders": steps}))


def slow_template(folder: Path) -> None:
    assets(folder, template="{{a}}" * 100_000)


EXCESS = r"takes more than 0\.\d+ (GiB of memory|s of processor time)"  # where memory fills slowly, the time ends first
# what writes a tokenizer that takes all time or memory when it is loaded
AT_LOAD: dict[str, Callable[[Path], None]] = {
    "memory for an added token": huge_at_load,
    "time for many added tokens": slow_at_load,
    "memory for its vocabulary": huge_vocabulary,
    "time for its template": slow_template,
}
# name: (writes a tokenizer that loads, a text that it never encodes, what the message says)
AT_USE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "memory": (lambda folder: (assets(folder), _huge(folder)), "b", EXCESS),
    "time": (lambda folder: assets(folder, "(a+)+$|!"), f"{_NEARLY} " * 200, EXCESS),
    "a regular expression that gives up": (lambda folder: assets(folder, "(a+)+$"), "a" * 60 + "!", "retry-limit"),
}


@pytest.fixture
def fast(strict, monkeypatch) -> None:
    monkeypatch.setattr(limits, "DOCUMENT", Limits(seconds=0.3, bytes=2**28))


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_tokenizer_or_template_that_never_loads_is_a_message_with_the_file(tmp_path, fast, name):
    AT_LOAD[name](tmp_path / "assets")
    with pytest.raises(UserError, match=rf"its loading: the tokenizer, or its chat template, {EXCESS}.*/assets/tokenizer"):
        load_template(str(tmp_path / "assets"))


@pytest.mark.parametrize("name", AT_USE)
def test_a_prompt_that_a_tokenizer_never_encodes_is_a_message_with_text_and_file(tmp_path, fast, name):
    write, text, says = AT_USE[name]
    write(tmp_path / "assets")
    loaded = load_tokenizer(str(tmp_path / "assets"))
    with pytest.raises(UserError, match=rf"the text '{text[:5]}.*: the tokenizer.* {says}.*assets/tokenizer\.json"):
        continue_texts(None, loaded, [text], 1, Sampling(), 1)  # type: ignore[arg-type]  # no model: it is not reached
    assert loaded.tokenizer.encode("a") == [66]  # a new worker


def test_ids_that_a_tokenizer_never_decodes_are_named(tmp_path, fast):
    assets(tmp_path / "assets")
    steps = [{"type": "Replace", "pattern": {"String": "z" * 10}, "content": "z" * 10**5}] * 3  # of no two entries
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}, *steps]}
    _change(tmp_path / "assets", lambda saved: saved.update(decoder=decoder))
    loaded = load_tokenizer(str(tmp_path / "assets"))
    with pytest.raises(UserError, match=rf"the ids \[91, 91, .*{EXCESS}.*tokenizer\.json"):
        loaded.tokenizer.decode([91] * 100)


def test_a_file_is_tried_out_once_and_again_when_its_contents_change(tmp_path, fast, monkeypatch):
    started: list[str] = []
    worker = limited._Worker
    monkeypatch.setattr(limited, "_Worker", lambda source: started.append(source) or worker(source))
    for folder, count in (("one", 1), ("one", 1), ("other", 1), ("third", 2)):
        assets(tmp_path / folder, r"\d" if folder == "third" else r"\s", template="{{ messages }}")
        load_tokenizer(str(tmp_path / folder))
        assert len(started) == count, folder
    load_template(str(tmp_path / "one"))
    load_template(str(tmp_path / "third"))
    assert len(started) == 3


def test_a_worker_gives_the_ids_and_texts_of_the_library_and_ends_with_its_tokenizer(tmp_path, fast):
    loaded = load_tokenizer(assets(tmp_path / "assets"))
    inside = LimitedTokenizer(loaded.tokenizer.unlimited)
    for text in ("some text", "<eos> spelled", "", "a\nb\u2028c", "\ud800"):
        assert _result(loaded.tokenizer.encode, text) == _result(inside.encode, text), text
    for ids in ([1, 2, 3], [0, 5], [], [10**6]):
        assert _result(loaded.tokenizer.decode, ids) == _result(inside.decode, ids)
        assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == inside.decode(ids, skip_special_tokens=False)
    assert loaded.tokenizer.encode("<eos>") == [0] and loaded.tokenizer.unlimited.encode("<eos>").ids != [0]
    process = loaded.tokenizer._worker.process
    del loaded
    assert process.returncode is not None


def _result(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except UserError as error:
        return str(error).partition(" (")[0]


def test_only_these_files_use_a_tokenizer_without_limits():
    """And none of them for texts: for its tables, for workers that have limits, or after it was tried out."""
    root = Path(limited.__file__).parents[2]
    users = {str(path.relative_to(root)) for path in root.rglob("*.py") if ".unlimited" in path.read_text(encoding="utf-8")}
    prepare = {"data/prepare/limited.py", "data/prepare/prepare.py", "data/prepare/chat.py"}
    assert users == prepare | {"data/tokenizer.py", "hf/export.py"}
