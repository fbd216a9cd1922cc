"""Chats with every JSON type in every field: transformers' tokens, or a refusal; never a list as Python writes it."""

import itertools

import pytest

from tests.chat_templates import ASSISTANT, CHATML, LLAMA, USER, load, oracle

_END = "</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
_FIELDS = "{{ m.name if m.name is defined }}{{ m.thinking if m.thinking is defined }}"
_CALLS = "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
_TOOLS = "{{ tools | tojson if tools }}"
TEMPLATES = {
    "concatenates": CHATML,
    "trims": LLAMA,
    "prints": f"{_TOOLS}{{% for m in messages %}}{{{{ m.role }}}}: {_FIELDS}{_CALLS}{{{{ m.content }}}}{_END}",
    # as those of models that also read images
    "reads parts": (
        f"{_TOOLS}{{% for m in messages %}}{{{{ m.role }}}}: {_FIELDS}{_CALLS}{{% if m.content is string %}}{{{{ m.content }}}}"
        f"{{% else %}}{{% for part in m.content or [] %}}{{{{ part.text }}}}{{% endfor %}}{{% endif %}}{_END}"
    ),
}
ONE, TWO = [{"type": "text", "text": "a part"}], [{"type": "text", "text": "a part"}, {"type": "text", "text": "another"}]
VALUES = [
    *(None, True, False, 0, 1, -1.5, "", "text", [], {}, ["text"], [None], [[]], {"a": 1}, {"text": "x"}, ONE, TWO),
    *([{"type": "image_url", "image_url": {"url": "x"}}], [*ONE, {"type": "image"}], [{"type": "text"}]),
    *([{"type": "text", "text": None}], [{"type": "text", "text": ["x"]}], [{"name": "f", "arguments": {"b": [1]}}]),
]
FIELDS = ["role", "content", "weight", "name", "thinking", "tool_calls"]


def _chats(value: object) -> list[tuple[list[dict] | object, object]]:
    """(messages, tools) with a value in each place."""
    chats: list[tuple[list[dict] | object, object]] = [(value, None), ([value], None), ([USER, ASSISTANT], value)]
    for field, place in itertools.product(FIELDS, (0, 1)):
        messages = [dict(USER), dict(ASSISTANT)]
        messages[place][field] = value
        chats.append((messages, None))
    return chats


def _plain(messages: list[dict], joined: bool) -> list[dict]:
    """The chat as transformers must get it: no keys of null, no weights, and where the template wants it no parts."""
    found = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if joined and isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        found.append(message)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_json_type_in_every_field_gives_transformers_tokens_or_a_reason(tmp_path, template):
    chat, refused, rendered = load(tmp_path, TEMPLATES[template]), [], 0
    theirs = oracle(tmp_path)
    for value in VALUES:
        for messages, tools in _chats(value):
            try:
                ids, said = chat.encode(messages, tools)
            except ValueError as error:
                refused.append(str(error))
                assert "Traceback" not in refused[-1]
                continue
            rendered += 1
            expected = theirs.apply_chat_template(
                _plain(messages, template != "reads parts"), tools=tools, return_dict=True, tokenize=True
            )
            assert ids == expected["input_ids"], (messages, tools)
            assert len(said) == len(ids)
            if value and isinstance(value, list | dict):
                assert str(value) not in chat._tokenizer.decode(ids, skip_special_tokens=False), messages
    assert len(refused) > 100 and rendered > 50, (len(refused), rendered)
    assert any('a part of "content" must be {"type": "text", "text": "..."}' in reason for reason in refused)
