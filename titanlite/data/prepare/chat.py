"""Chats as tokens: the tokenizer's chat template renders the text, and determines which tokens are the assistant's.

A template is a Jinja program that comes with a model, as in Hugging Face's tokenizers. It runs in a sandbox. The loss is
computed on the assistant's tokens only, with the token that ends each turn. They are the text inside the template's
`{% generation %}` tags; in a template without these tags, the text that a turn adds to the chat before it, without the prompt
that opens the turn.
Nothing here imports torch, so that worker processes start fast.
"""

import json
from bisect import bisect_left, bisect_right
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, processors

from titanlite.data.tokenizer import load_tokenizer, read_settings
from titanlite.errors import UserError

# The date that templates get, so that the same chats give the same tokens every day: the default of Llama's templates.
_TODAY = datetime(2024, 7, 26)
# Marks around the text inside {% generation %} tags, removed again. Unicode reserves these two for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_USE_TAGS = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"


class ChatTemplate:
    """A chat template with the tokenizer that it was written for. Can be pickled.

    source: the template and its variables, for fingerprints; without the tokenizer.
    """

    def __init__(self, template: str, variables: dict[str, str], tokenizer: Tokenizer):
        """variables: what the template may use beside the messages.

        Raises jinja2.TemplateSyntaxError. Changes the tokenizer: it then recognises special tokens in the text that it encodes.
        """
        self._state = (template, variables, tokenizer)
        self.source = json.dumps([template, variables], sort_keys=True)
        self._environment = _environment()
        self._template = self._environment.from_string(template)
        self._variables = variables
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = False
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets of all characters, including spaces
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {number: token.content for number, token in added if token.special and token.content}
        # in a message as JSON
        self._spellings = {json.dumps(token, ensure_ascii=False)[1:-1]: token for token in self._special.values()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, self._state  # a compiled Jinja template cannot be pickled

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """The chat's token ids, and for each whether it is the assistant's.

        messages: {"role", "content", ...} each, as in JSON. Other keys, such as "tool_calls", are passed to the template; keys
        whose value is None are left out. Raises ValueError with the reason for a chat that cannot be used.
        """
        self._check(messages)
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text, spans = self._marked(messages) if self._environment.has_tags else self._by_prefixes(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, starts, ends = encoding.ids, *([offset[side] for offset in encoding.offsets] for side in (0, 1))
        said = [False] * len(ids)
        for start, end in spans:
            first, last = bisect_right(ends, start), bisect_left(starts, end)
            # A special token may include spaces beside it. Where the assistant wrote the spaces, the token still is a header.
            while first < last and starts[first] < start and ids[first] in self._special:
                first += 1
            while first < last and ends[last - 1] > end and ids[last - 1] in self._special:
                last -= 1
            said[first:last] = [True] * (last - first)
        return ids, said

    def _check(self, messages: Any) -> None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("messages must be a list of objects")
        if not messages:
            raise ValueError("there are no messages")
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str):
                raise ValueError(f'message {number} must have a string under "role"')
            if not ("content" in message or "tool_calls" in message):
                raise ValueError(f'message {number} must have "content"')
            if not isinstance(message.get("content"), str | list | None):
                raise ValueError(f'message {number}: "content" must be a string, not {message["content"]!r}')
            text = json.dumps(message, ensure_ascii=False, default=str)
            for spelling, token in self._spellings.items():
                if spelling in text:
                    raise ValueError(f"message {number} spells {token}, which is a special token of the tokenizer")
            if _OPEN in text or _CLOSE in text:
                raise ValueError(f"message {number} holds U+FDD0 or U+FDD1, which are not characters")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so it has no labels")

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False, mark: bool = False) -> str:
        """The text of the messages. prompt: add the prompt that opens the assistant's turn. mark: mark the text inside tags."""
        self._environment.mark = mark
        try:
            return self._template.render(
                self._variables, messages=messages, tools=None, documents=None, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template refuses it: {reason}") from None

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """(text, the assistant's spans of characters in it), by the template's generation tags."""
        text, spans = "", []
        for piece in self._render(messages, mark=True).split(_OPEN):
            said, closed, rest = piece.partition(_CLOSE)
            if closed:
                spans.append((len(text), len(text) + len(said)))
            text += said + rest
        if text != self._render(messages):
            raise ValueError(
                "the chat template changes the text between its generation tags; the tags must print it themselves"
            )
        if not spans:
            raise ValueError("the generation tags of the chat template enclose no text of this chat")
        return text, spans

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The same, by the text that each of the assistant's turns adds to the turns before it."""
        text, spans = self._render(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:number], prompt=True), self._render(messages[: number + 1])
            if not after.startswith(before):
                raise ValueError(f"the chat template opens message {number + 1} differently from its own prompt; {_USE_TAGS}")
            if not text.startswith(after):
                raise ValueError(f"the chat template rewrites message {number + 1} when others follow; {_USE_TAGS}")
            said, content = after[len(before) :], message.get("content")
            header = isinstance(content, str) and not said.lstrip().startswith(content.strip())
            if header and before == self._render(messages[:number]):
                raise ValueError(
                    f"the chat template ignores add_generation_prompt, so headers cannot be recognised; {_USE_TAGS}"
                )
            # The text after the token that ends the turn, often a newline, is the template's.
            if said.rstrip().endswith(tuple(self._special.values())):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        return text, spans


def load_template(folder: str) -> ChatTemplate | None:
    """The chat template of a tokenizer's folder, None where it has none.

    It is chat_template.jinja, or else "chat_template" in tokenizer_config.json: a text, or several named texts, of which
    "default" is used. The special tokens in tokenizer_config.json are variables of the template. Raises UserError for a broken
    file.
    """
    template: Any  # as in a file from outside
    settings, path = read_settings(Path(folder)), Path(folder) / "chat_template.jinja"
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    variables = {name: text for name, text in tokens.items() if name.endswith("_token") and isinstance(text, str)}
    tokenizer = load_tokenizer(folder).tokenizer
    try:
        if path.is_file():
            template = path.read_text(encoding="utf-8")
        else:
            path, template = Path(folder) / "tokenizer_config.json", settings.get("chat_template")
            if isinstance(template, list):
                named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
                template = named.get("default", template)
        if template is None:
            return None
        if not isinstance(template, str):
            raise ValueError('it must be a text, or a list of objects with "name" and "template", one of them called "default"')
        return ChatTemplate(template, variables, tokenizer)
    except TemplateSyntaxError as error:
        raise UserError(f"{path}: broken chat template: line {error.lineno}: {error.message}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: broken chat template: {error}") from None


# ----------------------------------------------------------------------------------------------------------- the sandbox


def _environment() -> Any:  # `_GenerationTags` adds attributes
    """Jinja as Hugging Face's templates expect it, without access to the machine."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _TODAY.strftime}
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    return environment


class _GenerationTags(Extension):
    """{% generation %} ... {% endgeneration %}: prints the enclosed text, between marks if the environment's `mark` is set."""

    tags = {"generation"}  # noqa: RUF012, Jinja declares it this way

    environment: Any

    def __init__(self, environment: ImmutableSandboxedEnvironment):
        super().__init__(environment)
        environment.extend(has_tags=False, mark=False)

    def parse(self, parser: Parser) -> nodes.Node:
        self.environment.has_tags = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}" if self.environment.mark else caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
