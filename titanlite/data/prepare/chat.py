"""Chats as tokens: the tokenizer's chat template renders the text, and determines which tokens the assistant wrote.

A template is a Jinja program that comes with a model, as in Hugging Face's tokenizers. It runs in a sandbox. The loss is
computed on the assistant's tokens only, including the token that ends each turn. They are the text inside the template's
`{% generation %}` tags; in a template without these tags, the text that a turn adds to the chat before it, without the prompt
that opens the turn. A turn with "weight": 0 is not learned (OpenAI's format for fine-tuning).
Nothing here imports torch, so that worker processes start fast.
"""

import contextlib
import functools
import itertools
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

from titanlite.data.tokenizer import load_tokenizer, read_settings, refusing
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import MIB, Absent, read_text

# The date that templates get, so that the same chats give the same tokens every day. It is the default of Llama's templates.
_TODAY = datetime(2024, 7, 26)
# Marks around the text inside {% generation %} tags, removed again. Unicode reserves these two for use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_SHOWN = 80  # characters of a wrong value in a message
_LIMIT = 4 * MIB  # of a template's file; published ones have up to 100 KiB
_Spans = list[tuple[int, int]]  # ranges of characters in a text
_USE_TAGS = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"


class ChatTemplate:
    """A chat template with the tokenizer that it was written for. Can be pickled.

    source: the template and its variables, for fingerprints; without the tokenizer.
    """

    def __init__(self, template: str, variables: dict[str, str], tokenizer: Tokenizer):
        """variables: what the template may use besides the messages.

        Raises jinja2.TemplateSyntaxError. Changes the tokenizer: it then recognizes special tokens in the text that it encodes.
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
        # as spelled in a message in JSON
        self._spellings = {json.dumps(token, ensure_ascii=False)[1:-1]: token for token in self._special.values()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, self._state  # a compiled Jinja template cannot be pickled

    def encode(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[bool]]:
        """The chat's token ids, and for each whether it is learned.

        messages: {"role", "content", ...} each, as in JSON. Other keys, such as "tool_calls", are passed to the template; keys
        whose value is None are left out, and so is "weight", which is 0 for a turn of the assistant that is not learned. tools:
        a list of the functions that the assistant may call, for the template. Raises ValueError with the reason for a chat
        that cannot be used, and for a turn that would be learned, or tools, that the template leaves out.
        """
        self._check(messages, tools)
        learned = [number for number, message in enumerate(messages) if _is_learned(message)]
        messages = [
            {key: value if key == "tool_calls" else _unprinted(value) for key, value in message.items() if value is not None}
            for message in messages
        ]
        for message in messages:
            message.pop("weight", None)
        messages = self._with_readable_contents(messages, tools)
        find = self._by_tags if self._environment.has_tags else self._by_prefixes
        text, spans = find(messages, tools, learned)
        if tools and self._is_same_without(messages, None, text):
            raise ValueError("the chat template does not render the tools; remove them, or change the template")
        with refusing(ValueError, "the tokenizer cannot encode it"):
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

    def unprompted(self) -> str:
        """The header by which a template with tags opens the turn of the assistant, neither learned nor in prompts, since the
        template ignores add_generation_prompt; else "".
        """
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text, spans = self._enclosed(chat, None)
            prompt = self._render(chat[:1], None, prompt=True)
            ignored = prompt == self._render(chat[:1], None) and text.startswith(prompt)
        except ValueError:  # a template that needs other messages
            return ""
        header = text[len(prompt) : next((start for start, _ in spans if start >= len(prompt)), 0)]
        return header if ignored and header.strip() else ""

    def _check(self, messages: Any, tools: Any) -> None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("messages must be a list of objects")
        if not messages:
            raise ValueError("there are no messages")
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str):
                raise ValueError(f'message {number} must have a string under "role"')
            if not ("content" in message or "tool_calls" in message):
                raise ValueError(f'message {number} must have "content"')
            if not isinstance(content := message.get("content"), str | list | None):
                raise ValueError(f'message {number}: "content" must be a string or a list of text parts, not {content!r}')
            for part in content if isinstance(content, list) else []:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    what = '{"type": "text", "text": "..."}, since models here read only text'
                    raise ValueError(f'message {number}: a part of "content" must be {what}, not {json.dumps(part)[:_SHOWN]}')
            if (weight := message.get("weight")) is not None and weight not in (0, 1):
                raise ValueError(f'message {number}: "weight" must be 0 or 1, not {weight!r}')
            if weight and message["role"] != "assistant":
                raise ValueError(f'message {number}: "weight" is {weight}, but only turns of the assistant are learned')
            self._check_text(f"message {number}", message)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"tools must be a list of objects, not {tools!r}")
        self._check_text("tools", tools)
        if not any(map(_is_learned, messages)):
            raise ValueError("no message is the assistant's with a weight other than 0, so the chat has no labels")

    def _check_text(self, name: str, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, default=str)
        for spelling, token in self._spellings.items():
            if spelling in text:
                raise ValueError(f"{name} spells {token}, which is a special token of the tokenizer")
        if _OPEN in text or _CLOSE in text:
            raise ValueError(f"{name} holds U+FDD0 or U+FDD1, which are not characters")

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False, mark: bool = False) -> str:
        """The text of the messages. prompt: add the prompt that opens the assistant's turn. mark: mark the text inside tags."""
        self._environment.mark = mark
        try:
            return self._template.render(
                self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is a program and may raise anything
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template refuses it: {reason}") from None

    def _with_readable_contents(self, messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Messages whose contents are lists of text parts stay lists if the template renders each text, else become strings.

        Templates of models that also read images take lists. Others take strings; vLLM and llama.cpp then join with newlines.
        """
        texts = [part["text"] for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
        with contextlib.suppress(ValueError):  # the template takes only strings; any other fault is raised again later
            rendered = self._render(messages, tools) if texts else ""
            if all(text.strip() in rendered for text in texts):
                return messages
        return [
            {**m, "content": "\n".join(part["text"] for part in m["content"])} if isinstance(m.get("content"), list) else m
            for m in messages
        ]

    def _by_tags(self, messages: list[dict[str, Any]], tools: Any, learned: list[int]) -> tuple[str, _Spans]:
        """(text, the spans that are learned), from the template's generation tags.

        Usually each turn of the assistant has one span. Otherwise, rendering the chat up to each turn counts its spans.
        """
        text, spans = self._enclosed(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        one_each = len(spans) == len(turns)
        ends = [*range(1, len(turns) + 1)]
        if not one_each:
            ends = [len(self._enclosed(messages[: number + 1], tools)[1]) for number in turns]
        kept = spans[ends[-1] :]  # of later messages, which the template marks too
        for number, (first, last) in zip(turns, itertools.pairwise([0, *ends]), strict=True):
            if number in learned:
                of_turn = spans[first:last]
                said = "".join(text[start:end] for start, end in of_turn) if one_each else ""
                self._refuse_unrendered(messages, tools, number, text, said)
                if not of_turn:
                    raise ValueError(f"the generation tags enclose no text of message {number + 1}, or of one before it")
                kept += of_turn
        return text, kept

    def _enclosed(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, _Spans]:
        """(text, all spans inside generation tags)."""
        text, spans = "", []
        for piece in self._render(messages, tools, mark=True).split(_OPEN):
            said, closed, rest = piece.partition(_CLOSE)
            if closed:
                spans.append((len(text), len(text) + len(said)))
            text += said + rest
        if text != self._render(messages, tools):
            raise ValueError("the chat template changes the text between its generation tags, which must print it themselves")
        return text, spans

    def _by_prefixes(self, messages: list[dict[str, Any]], tools: Any, learned: list[int]) -> tuple[str, _Spans]:
        """As `_by_tags`, from the text that each learned turn adds to the turns before it."""
        text, spans = self._render(messages, tools), []
        for number in learned:
            before = self._render(messages[:number], tools, prompt=True)
            after = self._render(messages[: number + 1], tools)
            is_prefix = after.startswith(before) and text.startswith(after)
            said, content = after[len(before) :] if is_prefix else "", messages[number].get("content")
            self._refuse_unrendered(messages, tools, number, text, said)
            if not after.startswith(before):
                raise ValueError(f"the chat template opens message {number + 1} differently from its own prompt; {_USE_TAGS}")
            if not is_prefix:
                raise ValueError(f"the chat template rewrites message {number + 1} when others follow; {_USE_TAGS}")
            header = isinstance(content, str) and not said.lstrip().startswith(content.strip())
            if header and before == self._render(messages[:number], tools):
                raise ValueError(f"the template ignores add_generation_prompt, so headers cannot be recognized; {_USE_TAGS}")
            # The template writes the text after the token that ends the turn, often a newline.
            if said.rstrip().endswith(tuple(self._special.values())):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        return text, spans

    def _refuse_unrendered(self, messages: list[dict[str, Any]], tools: Any, number: int, text: str, said: str) -> None:
        """Raises ValueError if the template leaves out the contents of a turn: then the text is the same without them.

        text: of the chat; said: the part of it that certainly belongs to the turn.
        """
        for key in ("content", "tool_calls"):
            value = messages[number].get(key)
            if not value or (isinstance(value, str) and value.strip() in said):
                continue
            others = [*messages[:number], {**messages[number], key: type(value)()}, *messages[number + 1 :]]
            if self._is_same_without(others, tools, text):
                what = f'"{key}" of message {number + 1}, which would be learned'
                raise ValueError(f'the chat template does not render {what}; change it, or give the message "weight": 0')

    def _is_same_without(self, messages: list[dict[str, Any]], tools: Any, text: str) -> bool:
        """Whether a chat with something removed has the same text; not if the template refuses it, since then it reads it."""
        try:
            return self._render(messages, tools) == text
        except ValueError:
            return False


class _Unprinted:
    """Lists and objects of a message, which a template may read, but not print in Python's notation."""

    def __repr__(self) -> str:
        raise TemplateError("it prints a list or an object of a message in Python's notation; it must print text")

    __str__ = __repr__


_List: Any = type("list", (_Unprinted, list), {})  # the names that error messages show
_Object: Any = type("dict", (_Unprinted, dict), {})


def _unprinted(value: Any) -> Any:
    if isinstance(value, list):
        return _List(map(_unprinted, value))
    return _Object((key, _unprinted(each)) for key, each in value.items()) if isinstance(value, dict) else value


def _is_learned(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def load_template(folder: str) -> ChatTemplate | None:
    """The chat template of a tokenizer's folder, None where it has none.

    It is chat_template.jinja, or else "chat_template" in tokenizer_config.json: a string, or named strings, of which "default"
    is used. The special tokens in tokenizer_config.json are variables of the template; where it names no `eos_token` or
    `bos_token`, those of texts are. Raises UserError for a broken file.
    """
    template: Any  # of any type, since the file is not trusted
    settings, path = read_settings(Path(folder)), Path(folder) / "chat_template.jinja"
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    variables = {name: text for name, text in tokens.items() if name.endswith("_token") and isinstance(text, str)}
    loaded = load_tokenizer(folder)
    try:
        try:
            template = read_text(path, _LIMIT)
        except Absent:
            path, template = Path(folder) / "tokenizer_config.json", settings.get("chat_template")
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry["name"] == "default"), template)
        if template is None:
            return None
        if not isinstance(template, str):
            raise ValueError('none of its templates is called "default"')
        for name, ids in (("eos_token", (loaded.end_of_text,)), ("bos_token", loaded.bos)):
            if name in template and ids:  # Jinja prints nothing for a name that is not defined
                variables.setdefault(name, loaded.tokenizer.id_to_token(ids[0]) or "")
        return ChatTemplate(template, variables, loaded.tokenizer)
    except TemplateSyntaxError as error:
        raise UserError(f"{path}: broken chat template: line {error.lineno}: {error.message}") from None
    except UserError:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last three for nesting that is too deep
        raise UserError(f"{path}: broken chat template: {error}") from None


# ----------------------------------------------------------------------------------------------------------- the sandbox


def _environment() -> Any:  # `_GenerationTags` adds attributes
    """A Jinja sandbox with what Hugging Face's templates expect."""
    extensions = [_GenerationTags, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _TODAY.strftime}
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
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
