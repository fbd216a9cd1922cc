"""Chats become the tokens that transformers makes of them, and only what the assistant says is to be learnt."""

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

# ----------------------------------------------------------------------------------------------- the same as transformers


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_the_tokens_are_those_of_transformers(tmp_path, template, tokenizer, messages):
    ids, _ = load(tmp_path, TEMPLATES[template], TOKENIZERS[tokenizer]()).encode(CHATS[messages])
    assert ids == oracle(tmp_path).apply_chat_template(CHATS[messages], return_dict=True)["input_ids"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("messages", CHATS)
def test_generation_tags_count_the_tokens_that_they_count_in_transformers(tmp_path, tokenizer, messages):
    ids, counted = load(tmp_path, CHATML_TAGGED, TOKENIZERS[tokenizer]()).encode(CHATS[messages])
    found = oracle(tmp_path).apply_chat_template(CHATS[messages], return_assistant_tokens_mask=True, return_dict=True)
    assert ids == found["input_ids"]
    assert counted == [bool(mask) for mask in found["assistant_masks"]]
    assert any(counted) and not all(counted)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_what_counts_is_every_turn_of_the_assistant_and_the_token_that_ends_it(tmp_path, template, messages):
    expected = [message["content"] for message in CHATS[messages] if message["role"] == "assistant"]
    before, after = AROUND[template]
    space = " " if template == "Mistral" else ""
    chat = load(tmp_path, TEMPLATES[template])
    assert said(chat, CHATS[messages]) == [space + text + after for text in expected]
    ids, counted = chat.encode(CHATS[messages])
    for number in range(1, len(ids)):
        if counted[number] and not counted[number - 1]:
            assert chat._tokenizer.decode(ids[:number], skip_special_tokens=False).endswith(before)


# ------------------------------------------------------------------------------------------------------ tools and weights

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [[TOOL], [], None])
def test_tools_beside_the_messages_give_the_tokens_of_transformers(tmp_path, template, tools):
    ids, learnt = load(tmp_path, WITH_TOOLS + TEMPLATES[template]).encode(CHATS["several turns"], tools)
    assert ids == oracle(tmp_path).apply_chat_template(CHATS["several turns"], tools=tools, return_dict=True)["input_ids"]
    assert sum(learnt) == sum(load(tmp_path, TEMPLATES[template]).encode(CHATS["several turns"])[1])


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([TOOL], "does not render the tools"),
        ("[]", "tools must be a list of objects, not '\\[\\]'"),
    ],
)
def test_tools_that_cannot_be_given_to_the_template_are_refused(tmp_path, tools, reason):
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, CHATML).encode(CHATS["one turn"], tools)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("zeros", [{1}, {3}, {1, 5}])
def test_a_turn_of_weight_0_is_not_learnt_and_the_others_are_as_without_weights(tmp_path, template, zeros):
    chat, turns = load(tmp_path, TEMPLATES[template]), [*CHATS["several turns"], USER, ASSISTANT]
    weighted = [
        {**turn, "weight": float(n not in zeros)} if n % 2 else {**turn, "weight": None} for n, turn in enumerate(turns)
    ]
    (ids, learnt), (plain_ids, plain) = chat.encode(weighted), chat.encode(turns)
    assert ids == plain_ids
    kept = [text for number, text in enumerate(said(chat, turns)) if 2 * number + 1 not in zeros]
    assert said(chat, weighted) == kept and sum(learnt) < sum(plain)
    assert chat.encode([{**turn, "weight": 1} if n % 2 else turn for n, turn in enumerate(turns)]) == (plain_ids, plain)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([None, 0.5], 'message 2: "weight" must be 0 or 1, not 0.5'),
        ([1, 1], 'message 1: "weight" is 1, but only turns of the assistant are learnt'),
    ],
)
def test_a_weight_that_means_nothing_is_refused(tmp_path, weights, reason):
    turns = [{**turn, "weight": weight} for turn, weight in zip(CHATS["one turn"], weights, strict=True)]
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, CHATML).encode(turns)


_CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
_WHOLE = "<s>{{ m.role }}:{{ m.content }}</s>"


@pytest.mark.parametrize(
    ("template", "turn", "reason"),
    [
        (CHATML, _CALL, '"tool_calls" of message 2'),
        ("{% for m in messages %}{% if m.role != 'assistant' or loop.last %}" + _WHOLE + "{% endif %}{% endfor %}", ASSISTANT,
         '"content" of message 2'),
        ("{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}"
         "{% endgeneration %}{% endif %};{% endfor %}", {"role": "assistant", "content": "6"}, '"content" of message 2'),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}{% generation %}!{% endgeneration %}{% endif %}{% endfor %}",
         ASSISTANT, "enclose no text of message 4, or of one before it"),
    ],
)  # fmt: skip
def test_a_template_that_leaves_out_a_turn_that_would_be_learnt_is_refused(tmp_path, template, turn, reason):
    chat = load(tmp_path, template)
    with pytest.raises(ValueError, match=reason):
        chat.encode([USER, turn, USER, {"role": "assistant", "content": "4, 6"}])


# ---------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_without_a_template_has_none(tmp_path):
    assert load_template(write(tmp_path, None, byte_level())) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_template(str(tmp_path)) is None


def test_a_file_of_its_own_comes_before_the_settings_and_default_among_several(tmp_path):
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    chat = load_template(write(tmp_path, several, byte_level()))
    assert chat is not None and said(chat, CHATS["one turn"]) == ["It is 4.<|im_end|>"]
    (tmp_path / "chat_template.jinja").write_text(MISTRAL, encoding="utf-8")
    chat = load_template(str(tmp_path))
    assert chat is not None and said(chat, CHATS["one turn"]) == [" It is 4.</s>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% for x in %}", ["tokenizer_config.json", "line 2", "Expected an expression"]),
        (
            [{"name": "rag", "template": "x"}],
            ["tokenizer_config.json: broken chat template", "none of its templates is called"],
        ),
        (5, ["tokenizer_config.json: chat_template", "must be a valid string"]),
    ],
)
def test_a_broken_template_is_told_with_its_file_and_fault(tmp_path, template, words):
    with pytest.raises(UserError) as raised:
        load_template(write(tmp_path, template, byte_level()))
    assert all(word in str(raised.value) for word in words), raised.value


# ---------------------------------------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER], "no message is the assistant's"),
        ([{"role": "user", "content": "a</s>b"}, ASSISTANT], "message 1 spells </s>"),
        ([USER, {"role": "assistant", "content": "\ufdd0"}], "U\\+FDD0"),
        ([{"role": "wizard", "content": ""}, ASSISTANT], "the chat template refuses it: unknown role wizard"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_used_is_refused_with_the_reason(tmp_path, messages, reason):
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, LLAMA).encode(messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # earlier thoughts are dropped once others follow
        (
            "{% for m in messages %}<s>{{ m.role }}:"
            "{{ m.content if loop.last or m.role == 'user' else m.content.split('.')[0] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant:{% endif %}",
            "rewrites message 2 when others follow; put {% generation %}",
        ),
        (
            "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}",
            "ignores add_generation_prompt, so headers cannot be recognized; put {% generation %}",
        ),
        (
            "{% set x %}{% generation %} x {% endgeneration %}{% endset %}{{ x | trim }}",
            "changes the text between its generation tags",
        ),
    ],
)
def test_a_template_that_does_not_tell_what_the_assistant_says_is_refused(tmp_path, template, reason):
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, template).encode(CHATS["several turns"])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ range(100000000) | list }}",
    ],
)
def test_a_template_cannot_reach_the_machine(tmp_path, attack):
    """What it tries is refused, or is nothing: Jinja has an undefined value for what may not be read."""
    plain = load(tmp_path, CHATML).encode(CHATS["one turn"])
    messages = [dict(message) for message in CHATS["one turn"]]
    try:
        found = load(tmp_path, attack + CHATML).encode(messages)
    except ValueError as error:
        assert "the chat template refuses it" in str(error)
    else:
        assert found == plain
    assert messages == CHATS["one turn"]


def test_what_templates_of_hugging_face_use_is_there(tmp_path):
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ [ns.n, m] | tojson }}{% endgeneration %}{{ dict(a=1) | tojson(indent=1) }}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{{ tools is none }}{{ documents is none }}"
    )
    messages = [USER, {"role": "skip", "content": ""}, {"role": "assistant", "content": "<é>"}, {**ASSISTANT, "weight": 0}]
    ids, _ = load(tmp_path, template).encode(messages)
    assert ids == oracle(tmp_path).apply_chat_template(messages, return_dict=True)["input_ids"]
