"""Chats as tokens: the tokenizer's own chat template writes the text, and says which of it is the assistant's.

A template is a program in Jinja that comes with a model, as Hugging Face's tokenizers have them. It is run in a sandbox.
Training asks only for what the assistant says, with the token that ends its turn. Where the template marks that by
`{% generation %}` tags, these decide; elsewhere it is what a turn adds to the chat before it, the prompt that opens the turn
apart. Nothing here imports torch: worker processes start faster without.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer, processors

from titanlite.data.tokenizer import load_tokenizer
from titanlite.errors import UserError

# What a template is told when it asks for the date, so that the same chats are the same tokens every day: the date that Llama's
# templates write where they are told none.
_TODAY = datetime(2024, 7, 26)
# Around what {% generation %} tags enclose, and cut out again. Unicode keeps these two free for such use inside a program.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_USE_TAGS = "put {% generation %} and {% endgeneration %} around what the assistant says in the template"


class ChatTemplate:
    """A chat template with the tokenizer that it was written for. Can be pickled.

    source: text that differs between templates that write differently, for fingerprints; it leaves out the tokenizer.
    """

    def __init__(self, template: str, variables: dict[str, str], tokenizer: Tokenizer):
        """variables: what the template may use beside the messages.

        Raises jinja2.TemplateSyntaxError. The tokenizer is changed: special tokens are recognised in what it encodes.
        """
        self._state = (template, variables, tokenizer)
        self.source = json.dumps([template, variables], sort_keys=True)
        self._environment = _environment()
        self._template = self._environment.from_string(template)
        self._variables = variables
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = False
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets of all characters, of spaces too
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {number: token.content for number, token in added if token.special and token.content}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, self._state  # what Jinja has compiled cannot be pickled

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
        """The chat's token ids, and for each whether the assistant says it.

        messages: {"role", "content", ...} each, as JSON has them; what else there is, such as "tool_calls", is the template's
        business, and keys whose value is None are left out. Raises ValueError with the reason for a chat that cannot be used.
        """
        self._check(messages)
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text, spans = self._marked(messages) if self._environment.has_tags else self._by_prefixes(messages)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = [start for start, _ in found.offsets], [end for _, end in found.offsets]
        said = [False] * len(found.ids)
        for start, end in spans:
            first, last = bisect_right(ends, start), bisect_left(starts, end)
            # A special token may swallow spaces beside it. Where they are the assistant's, it still is a header itself.
            while first < last and starts[first] < start and found.ids[first] in self._special:
                first += 1
            while first < last and ends[last - 1] > end and found.ids[last - 1] in self._special:
                last -= 1
            said[first:last] = [True] * (last - first)
        return found.ids, said

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
            for text in _strings(message):
                for token in self._special.values():
                    if token in text:
                        raise ValueError(f"message {number} spells {token}, which is a special token of the tokenizer")
                if _OPEN in text or _CLOSE in text:
                    raise ValueError(f"message {number} holds U+FDD0 or U+FDD1, which are no characters")
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, no tokenizer can read it
                    raise ValueError(f"message {number} is not Unicode text: {error}") from None
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message is the assistant's, so there is nothing to learn")

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False, mark: bool = False) -> str:
        """The text of the messages. prompt: with what opens the assistant's turn. mark: what tags enclose is marked."""
        self._environment.mark = mark
        try:
            return self._template.render(
                self._variables, messages=messages, tools=None, documents=None, add_generation_prompt=prompt
            )
        except Exception as error:  # whatever a program may raise
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template refuses it: {reason}") from None

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans of characters in it that are the assistant's) by the template's generation tags."""
        text, spans = "", []
        for piece in self._render(messages, mark=True).split(_OPEN):
            said, closed, rest = piece.partition(_CLOSE)
            if closed:
                spans.append((len(text), len(text) + len(said)))
            text += said + rest
        if text != self._render(messages):
            raise ValueError("the chat template changes what stands between its generation tags: they must print it themselves")
        if not spans:
            raise ValueError("the generation tags of the chat template enclose nothing of it")
        return text, spans

    def _by_prefixes(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The same by what each of the assistant's turns adds to the turns before it."""
        text, spans = self._render(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:number], prompt=True), self._render(messages[: number + 1])
            if not after.startswith(before):
                raise ValueError(f"the chat template opens message {number + 1} otherwise than by its own prompt; {_USE_TAGS}")
            if not text.startswith(after):
                raise ValueError(f"the chat template rewrites message {number + 1} when others follow; {_USE_TAGS}")
            said, content = after[len(before) :], message.get("content")
            header = isinstance(content, str) and not said.lstrip().startswith(content.strip())
            if header and before == self._render(messages[:number]):
                raise ValueError(
                    f"the chat template does not heed add_generation_prompt, so headers cannot be told; {_USE_TAGS}"
                )
            # What follows the token that ends the turn, often a line's end, is the template's.
            if said.rstrip().endswith(tuple(self._special.values())):
                said = said.rstrip()
            spans.append((len(before), len(before) + len(said)))
        return text, spans


def load_template(folder: str) -> ChatTemplate | None:
    """The chat template of a tokenizer's folder, None where it has none.

    chat_template.jinja, or else "chat_template" in tokenizer_config.json: a text, or several by name of which "default" is
    taken. The special tokens that the latter file names are variables of the template. Raises UserError for what is broken.
    """
    path, settings = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
    try:
        keys = json.loads(_read(settings)) if settings.is_file() else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{settings}: not JSON: {error}") from None
    if not isinstance(keys, dict):
        raise UserError(f"{settings}: not a JSON object")
    if path.is_file():
        template = _read(path)
    else:
        path, template = settings, _default(keys.get("chat_template"), settings)
    if template is None:
        return None
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in keys.items()}
    variables = {name: text for name, text in tokens.items() if name.endswith("_token") and isinstance(text, str)}
    try:
        return ChatTemplate(template, variables, load_tokenizer(folder).tokenizer)
    except TemplateSyntaxError as error:
        raise UserError(f"{path}: broken chat template: line {error.lineno}: {error.message}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from None


def _default(found: Any, path: Path) -> str | None:
    """The template among what "chat_template" may hold."""
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            raise UserError(f'{path}: none of its chat templates is called "default"; there are: {", ".join(map(str, named))}')
        found = named["default"]
    if not isinstance(found, str | None):
        raise UserError(f'{path}: "chat_template" must be a text, or a list of objects with "name" and "template"')
    return found


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


# ----------------------------------------------------------------------------------------------------------- the sandbox


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face's templates expect it, out of which nothing of the machine can be reached."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
    )
    # Jinja's own globals beside `range` are classes and functions of its own; a template needs these two of them.
    environment.globals = {
        "range": environment.globals["range"],
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _TODAY.strftime,
    }
    environment.filters["tojson"] = _tojson  # Jinja's escapes what HTML could mistake
    return environment


class _GenerationTags(Extension):
    """{% generation %} ... {% endgeneration %}: prints what it encloses, between marks where the environment says so."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

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


class _Namespace(Namespace):
    """Jinja's namespace without names that Python gives a meaning to."""

    def __init__(*args: Any, **kwargs: Any):  # a template may say namespace(self=...)
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace's names may not begin with an underscore: {name}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
