"""Chat templates in the style of well-known models, tokenizers for them, and chats, for tests."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from titanlite.data.prepare.chat import ChatTemplate, load_template

# Written for these tests, in the style of well-known models.
CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CHATML_TAGGED = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{{ '\\n' }}
{%- else %}
{{ message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
    {%- if message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- '[SYSTEM] ' + message['content'] + ' [/SYSTEM]' }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"ChatML": CHATML, "ChatML, tagged": CHATML_TAGGED, "Llama": LLAMA, "Mistral": MISTRAL}
# Before and after the assistant's text.
AROUND = {
    "ChatML": ("<|im_start|>assistant\n", "<|im_end|>"),
    "ChatML, tagged": ("<|im_start|>assistant\n", "<|im_end|>"),
    "Llama": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "Mistral": ("[/INST]", "</s>"),
}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[SYSTEM]", "[/SYSTEM]"),
]

USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "It is 4."}
CHATS = {
    "one turn": [USER, ASSISTANT],
    "several turns": [USER, ASSISTANT, {"role": "user", "content": "And 3?\n\nSay."}, {"role": "assistant", "content": "6"}],
    "a system message": [{"role": "system", "content": "Be terse."}, USER, ASSISTANT, USER, ASSISTANT],
    "the user's word is the last": [USER, ASSISTANT, USER],
    "unicode": [
        {"role": "user", "content": "¿Qué significa 猫? 🐈"},
        {"role": "assistant", "content": "„Katze“ 猫 🐈\u200d⬛, naïve e\u0301"},
        {"role": "user", "content": "\u05e9\u05dc\u05d5\u05dd"},
        {"role": "assistant", "content": "🐈"},
    ],
    "spaces and lines": [USER, {"role": "assistant", "content": "a\n\n  b  c\t\td\n    e"}, USER, ASSISTANT],
}
_TEXT = ["What is 2 + 2? It is 4. user assistant system Be terse. And 3? Say. the user's word is the last one"] * 20


def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3 and Qwen; its offsets exclude leading spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As in Llama 2 and Mistral: spaces are letters, and unknown characters are encoded as bytes."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted({*"".join(_TEXT).replace(" ", "▁"), "▁"})]
    merges = [("I", "t"), ("▁", "i"), ("▁i", "s"), ("▁", "4"), ("▁", "It")]
    tokens += ["".join(pair) for pair in merges]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", tokens.index("<s>"))])
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "sentence piece": sentence_piece}


def write(folder, template: object, tokenizer: Tokenizer, **keys: object) -> str:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "add_bos_token": True, **keys}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def load(folder, template: str, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    found = load_template(write(folder, template, tokenizer or byte_level()))
    assert found is not None
    return found


def said(chat: ChatTemplate, messages: list[dict]) -> list[str]:
    """The text of each run of labeled tokens."""
    ids, counted = chat.encode(messages)
    assert len(ids) == len(counted)
    runs, last = [], False
    for number, counts in zip(ids, counted, strict=True):
        if counts and not last:
            runs.append([])
        if counts:
            runs[-1].append(number)
        last = counts
    return [chat._tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def oracle(folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
