"""Chats become the same tokens as in transformers, and only the assistant's text is learned."""

import itertools
from pathlib import Path

import pytest

from tests.chat_templates import (
    AROUND,
    ASSISTANT,
    CHATML,
    CHATML_TAGGED,
    CHATS,
    LLAMA,
    MISTRAL,
    TEMPLATES,
    TOKENIZERS,
    USER,
    byte_level,
    load,
    oracle,
    said,
    write,
)
from titanlite.data.prepare.chat import load_template
from titanlite.ground.errors import UserError

# --------------------------------------------------------------------------------------------- the same as transformers


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_the_tokens_and_those_between_generation_tags_are_those_of_transformers(tmp_path, template, tokenizer, messages):
    ids, counted = load(tmp_path, TEMPLATES[template], TOKENIZERS[tokenizer]()).encode(CHATS[messages])
    tagged = TEMPLATES[template] == CHATML_TAGGED
    found = oracle(tmp_path).apply_chat_template(CHATS[messages], return_assistant_tokens_mask=tagged, return_dict=True)
    assert ids == found["input_ids"]
    assert not tagged or counted == [bool(mask) for mask in found["assistant_masks"]]
    assert any(counted) and not all(counted)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_labels_are_every_assistant_turn_and_the_token_that_ends_it(tmp_path, template, messages):
    expected = [message["content"] for message in CHATS[messages] if message["role"] == "assistant"]
    before, after = AROUND[template]
    space = " " if template == "Mistral" else ""
    chat = load(tmp_path, TEMPLATES[template])
    assert said(chat, CHATS[messages]) == [space + text + after for text in expected]
    ids, counted = chat.encode(CHATS[messages])
    for number in range(1, len(ids)):
        if counted[number] and not counted[number - 1]:
            assert chat._tokenizer.decode(ids[:number], skip_special_tokens=False).endswith(before)


# ---------------------------------------------------------------------------------------------------- tools and weights

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [[TOOL], []])
def test_tools_beside_the_messages_give_the_tokens_of_transformers(tmp_path, template, tools):
    ids, learned = load(tmp_path, WITH_TOOLS + TEMPLATES[template]).encode(CHATS["several turns"], tools)
    assert ids == oracle(tmp_path).apply_chat_template(CHATS["several turns"], tools=tools, return_dict=True)["input_ids"]
    assert sum(learned) == sum(load(tmp_path, TEMPLATES[template]).encode(CHATS["several turns"])[1])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("zeros", [{3}, {1, 5}])
def test_a_turn_of_weight_0_is_not_learned_and_the_others_are_as_without_weights(tmp_path, template, zeros):
    chat, turns = load(tmp_path, TEMPLATES[template]), [*CHATS["several turns"], USER, ASSISTANT]
    weighted = [
        {**turn, "weight": float(n not in zeros)} if n % 2 else {**turn, "weight": None} for n, turn in enumerate(turns)
    ]
    (ids, learned), (plain_ids, plain) = chat.encode(weighted), chat.encode(turns)
    assert ids == plain_ids
    kept = [text for number, text in enumerate(said(chat, turns)) if 2 * number + 1 not in zeros]
    assert said(chat, weighted) == kept and sum(learned) < sum(plain)
    assert chat.encode([{**turn, "weight": 1} if n % 2 else turn for n, turn in enumerate(turns)]) == (plain_ids, plain)


# -------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_without_a_template_has_none(tmp_path):
    assert load_template(write(tmp_path, None, byte_level())) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_template(str(tmp_path)) is None


def test_a_file_of_its_own_comes_before_the_settings_and_default_among_several(tmp_path):
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    assert said(load_template(write(tmp_path, several, byte_level())), CHATS["one turn"]) == ["It is 4.<|im_end|>"]
    (tmp_path / "chat_template.jinja").write_text(MISTRAL, encoding="utf-8")
    assert said(load_template(str(tmp_path)), CHATS["one turn"]) == [" It is 4.</s>"]


def test_a_template_ends_turns_with_the_end_of_texts_where_the_settings_name_none(tmp_path):
    turn = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    chat = load_template(write(tmp_path, template, byte_level(), eos_token=None, bos_token=None))
    assert said(chat, CHATS["one turn"]) == ["It is 4.</s>"]


_HEADER = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "header"),
    [
        *((template, "") for template in TEMPLATES.values()),
        (CHATML_TAGGED.partition("{% if add_generation_prompt")[0], "<|im_start|>assistant\n"),
        (_HEADER, "assistant:"),
        (_HEADER + "{% if add_generation_prompt %}assistant:{% endif %}", ""),
        (_HEADER + "{{ messages | length }}", ""),  # no prompt for a turn can follow
        (_HEADER.replace("{{ m.role }}:", "{{ ' ' }}"), ""),  # a blank, as in "[/INST] text"
        (_HEADER.replace("{{ m.role }}:{% generation %}", "{% generation %}{{ m.role }}:"), ""),  # learned
        (_HEADER.replace("{{ m.role }}:", "{{ raise_exception('other roles') }}"), ""),
    ],
)
def test_the_header_of_a_turn_that_neither_a_prompt_nor_a_label_has_is_found(tmp_path, template, header):
    """Served, such a model must begin its turn with a header that it never learned to write."""
    assert load(tmp_path, template).unprompted() == header


def test_the_prompt_for_a_turn_in_the_tutorial_has_the_tokens_before_a_learned_turn(tmp_path):
    page = (Path(__file__).parents[2] / "docs/tutorials/chat.md").read_text(encoding="utf-8")
    template = page.partition("chat_template.jinja <<'END'\n")[2].partition("\nEND\n")[0]
    chat = load(tmp_path, template)
    ids, learned = chat.encode(CHATS["one turn"])
    prompt = oracle(tmp_path).apply_chat_template(CHATS["one turn"][:-1], add_generation_prompt=True, return_dict=True)
    assert chat.unprompted() == "" and prompt["input_ids"] == ids[: learned.index(True)]


@pytest.mark.parametrize(
    ("template", "reason"),
    [("a\n{% for x in %}", "line 2"), ([{"name": "rag", "template": "x"}], "none of its templates is called")],
)
def test_a_broken_template_is_reported_with_its_file_and_fault(tmp_path, template, reason):
    with pytest.raises(UserError, match=rf"tokenizer_config\.json.*{reason}"):
        load_template(write(tmp_path, template, byte_level()))


# -------------------------------------------------------------------------------------------------- what cannot be used


_WHOLE = "<s>{{ m.role }}:{{ m.content }}</s>"
_CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
_OTHER = {"role": "assistant", "content": "6"}


def each(body: str) -> str:
    """A template that renders this for each message m."""
    return "{% for m in messages %}" + body + "{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, [USER, ASSISTANT | {"weight": 0.5}], 'message 2: "weight" must be 0 or 1, not 0.5'),
        (CHATML, [USER | {"weight": 1}, ASSISTANT], 'message 1: "weight" is 1, but only turns of the assistant are learned'),
        (LLAMA, [USER], "no message is the assistant's"),
        (LLAMA, [{"role": "user", "content": "a</s>b"}, ASSISTANT], "message 1 spells </s>"),
        (LLAMA, [USER, {"role": "assistant", "content": "\ufdd0"}], "U\\+FDD0"),
        (LLAMA, [{"role": "wizard", "content": ""}, ASSISTANT], "the chat template refuses it: unknown role wizard"),
        # a turn that would be learned is left out
        (CHATML, [USER, _CALL], '"tool_calls" of message 2'),
        (each("{% if m.role != 'assistant' or loop.last %}" + _WHOLE + "{% endif %}"), [USER, ASSISTANT, USER, _OTHER],
         '"content" of message 2'),
        (each("{{ m.role }}:{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
              "{% endif %};"), [USER, _OTHER, USER, {"role": "assistant", "content": "4, 6"}], '"content" of message 2'),
        (each("{{ m.content }}{% if loop.last %}{% generation %}!{% endgeneration %}{% endif %}"),
         [USER, _OTHER, USER, ASSISTANT], "enclose no text of message 4, or of one before it"),
        # the assistant's text cannot be recognized; the first template drops earlier thoughts once other messages follow
        (each("<s>{{ m.role }}:{{ m.content if loop.last or m.role == 'user' else m.content.split('.')[0] }}</s>")
         + "{% if add_generation_prompt %}<s>assistant:{% endif %}", CHATS["several turns"],
         "rewrites message 2 when others follow; put {% generation %}"),
        (each(_WHOLE), CHATS["one turn"], "ignores add_generation_prompt, so headers cannot be recognized; put {%"),
        ("{% set x %}{% generation %} x {% endgeneration %}{% endset %}{{ x | trim }}", CHATS["one turn"],
         "changes the text between its generation tags"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_learned_is_refused_with_the_reason(tmp_path, template, messages, reason):
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, template).encode(messages)


def test_tools_that_a_template_does_not_render_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not render the tools"):
        load(tmp_path, CHATML).encode(CHATS["one turn"], [TOOL])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ range(100000000) | list }}",
    ],
)
def test_a_template_cannot_reach_the_machine(tmp_path, attack):
    """Each attempt is refused or gives nothing: Jinja returns an undefined value for what may not be read."""
    plain = load(tmp_path, CHATML).encode(CHATS["one turn"])
    messages = [dict(message) for message in CHATS["one turn"]]
    try:
        found = load(tmp_path, attack + CHATML).encode(messages)
    except ValueError as error:
        assert "the chat template refuses it" in str(error)
    else:
        assert found == plain
    assert messages == CHATS["one turn"]


def test_features_that_hugging_face_templates_use_are_supported(tmp_path):
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ [ns.n, m] | tojson }}{% endgeneration %}{{ dict(a=1) | tojson(indent=1) }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{{ tools is none }}{{ documents is none }}"
    )
    messages = [USER, {"role": "skip", "content": ""}, {"role": "assistant", "content": "<é>"}, {**ASSISTANT, "weight": 0}]
    ids, _ = load(tmp_path, template).encode(messages)
    assert ids == oracle(tmp_path).apply_chat_template(messages, return_dict=True)["input_ids"]


# -------------------------------------------------------------------------------------------- every type in every field


_END = "</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
_FIELDS = "{{ m.name if m.name is defined }}{{ m.thinking if m.thinking is defined }}"
_CALLS = "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
_TOOLS = "{{ tools | tojson if tools }}"
_SHAPES = {
    "concatenates": CHATML,
    "trims": LLAMA,
    "prints": f"{_TOOLS}{{% for m in messages %}}{{{{ m.role }}}}: {_FIELDS}{_CALLS}{{{{ m.content }}}}{_END}",
    # like templates of models that also read images
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
    """(messages, tools) with a value in each field."""
    chats: list[tuple[list[dict] | object, object]] = [(value, None), ([value], None), ([USER, ASSISTANT], value)]
    for field, place in itertools.product(FIELDS, (0, 1)):
        messages = [dict(USER), dict(ASSISTANT)]
        messages[place][field] = value
        chats.append((messages, None))
    return chats


def _plain(messages: list[dict], joined: bool) -> list[dict]:
    """The chat for transformers: without null keys and weights, and without lists of parts if the template takes strings."""
    found = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if joined and isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        found.append(message)
    return found


@pytest.mark.parametrize("template", _SHAPES)
def test_every_json_type_in_every_field_gives_transformers_tokens_or_a_reason(tmp_path, template):
    chat, refused, rendered = load(tmp_path, _SHAPES[template]), [], 0
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
