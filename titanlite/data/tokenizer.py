"""The tokenizer: the user's tokenizer.json, or a small one that `prepare/cache.py` trains on the default data."""

import contextlib
import hashlib
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BeforeValidator
from tokenizers import Tokenizer

from titanlite.config.schema import Config
from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import MIB, Absent, FileSchema, read_json, read_text, reading

DEFAULT_VOCABULARY = 4096
_LIMIT = 512 * MIB  # Gemma 3's tokenizer.json has 32 MiB
_LARGEST = 2**24  # ids; the largest vocabularies have 2**18
END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = ("<|end_of_text|>", END_OF_TEXT, "</s>", "<eos>")


def _token_text(value: Any) -> Any:
    """The text of a token, which may also be a table with its text."""
    return value.get("content", value) if isinstance(value, dict) else value


_Token = Annotated[str | None, BeforeValidator(_token_text)]


class _Template(FileSchema):
    name: str
    template: str


class _Settings(FileSchema):
    """What tokenizer_config.json must hold."""

    eos_token: _Token = None
    bos_token: _Token = None
    chat_template: str | list[_Template] | None = None


class _Model(FileSchema):
    """What generation_config.json or config.json say of the end of a text."""

    eos_token_id: int | list[int] | None = None


class LoadedTokenizer(NamedTuple):
    """A tokenizer with the facts that training and inference need."""

    tokenizer: Tokenizer  # as documents are encoded: special tokens that a text spells are text
    source: str  # its file
    end_of_text: int  # the id that ends every document
    vocabulary: int  # one more than the largest id
    bos: tuple[int, ...] = ()  # its beginning-of-text ids: one, or none where it has no such token, seldom two
    add_bos: bool = False  # whether they begin every document and prompt
    bos_token: int | None = None  # the id that tokenizer_config.json calls so, also where the post-processor adds another
    model_folder: str = ""  # of the files that say where its model ends texts; "": that of `source`

    @property
    def beginning(self) -> tuple[int, ...]:
        """The ids that begin every document and prompt."""
        return self.bos if self.add_bos else ()

    @property
    def ends(self) -> frozenset[int]:
        """The ids at which generation stops: `end_of_text`, and others of its model, such as the end of a turn."""
        return frozenset((self.end_of_text, *_ends_of_model(Path(self.model_folder or Path(self.source).parent))))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: special tokens are recognized in it, none are added. Raises UserError."""
        with refusing(UserError, f"{self.source}: cannot encode the text {reprlib.repr(text)}"):
            self.tokenizer.encode_special_tokens = False
            try:
                return self.tokenizer.encode(text, add_special_tokens=False).ids
            finally:
                self.tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Raises UserError."""
        with refusing(UserError, f"{self.source}: cannot decode the ids {reprlib.repr(ids)}"):
            return self.tokenizer.decode(ids, skip_special_tokens)

    def begun(self, ids: list[int]) -> list[int]:
        """The ids of a document or prompt with `beginning` in front, once."""
        return ids if tuple(ids[: len(self.beginning)]) == self.beginning else [*self.beginning, *ids]

    def spelled(self, ids: Iterable[int]) -> str:
        """These ids of special tokens, for messages."""
        return " ".join(self.tokenizer.id_to_token(number) or str(number) for number in ids) or "no BOS"


def load_tokenizer(folder: str, key: str = "model.hf_assets_path =", add_bos: bool | None = None) -> LoadedTokenizer:
    """The tokenizer of a folder. Raises UserError where the folder has none, or the tokenizer no end-of-text token.

    key: names the folder in messages. add_bos: as training.add_bos; UserError if the tokenizer has no such token.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = read_tokenizer(path)
    except Absent:
        raise UserError(f'{key} "{folder}": there is no tokenizer.json in it') from None
    # the file may ask for the lengths of another model's batches, which would truncate or pad documents
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = read_settings(Path(folder))
    loaded = describe(tokenizer, _token_text(settings.get("eos_token")), str(path))
    with refusing(UserError, f"{path}: cannot encode an empty text"), reading(path):
        loaded = _with_bos(loaded, _token_text(settings.get("bos_token")))
    if add_bos and not loaded.bos:
        why = 'its post-processor adds none, and tokenizer_config.json has no "bos_token"'
        raise UserError(f"{path}: has no beginning-of-text token, which add_bos = true needs: {why}")
    return loaded if add_bos is None else loaded._replace(add_bos=add_bos)


@contextlib.contextmanager
def refusing(kind: type[ValueError], what: str) -> Iterator[None]:
    """Raises `kind` for any exception of the library, also for a panic of its Rust code, which is no Exception: a regular
    expression that gives up after millions of steps. A UserError passes.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        raise kind(f"{what}: {error}") from None


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file, with its settings. Raises UserError."""
    text = read_text(path, _LIMIT)
    with refusing(UserError, f"{path}: not a tokenizer"), reading(path):
        return Tokenizer.from_str(text)


def _with_bos(loaded: LoadedTokenizer, name: str | None) -> LoadedTokenizer:
    """With its beginning-of-text ids, and whether it adds them to every text.

    name: "bos_token" of tokenizer_config.json, which counts where the post-processor adds nothing before a text.
    """
    named = None if name is None else loaded.tokenizer.token_to_id(name)
    encoding = loaded.tokenizer.encode("")  # nothing but what the post-processor adds, before and after a text
    added = [number for number, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if special]
    if added[-1:] == [loaded.end_of_text] and (len(added) > 1 or named != loaded.end_of_text):
        added.pop()
    bos = tuple(added) or (() if named is None else (named,))
    return loaded._replace(bos=bos, add_bos=bool(added), bos_token=named)


def _ends_of_model(folder: Path) -> tuple[int, ...]:
    """The ids at which the model of a folder stops: those of generation_config.json, or else of config.json, as in
    transformers. Instruct models have several: the end of a turn beside the end of a text.
    """
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(Absent):
            ends = read_json(folder / name, _Model, _LIMIT).get("eos_token_id")
            if ends is not None:
                return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()


def read_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a tokenizer's folder; {} if there is none. Raises UserError for a broken file.

    As in transformers, the tokens in special_tokens_map.json replace those of a tokenizer_config.json without
    "added_tokens_decoder": up to about version 4.33, it saved a token that was set later in that file alone.
    """
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        with contextlib.suppress(Absent):
            if "added_tokens_decoder" not in settings:
                settings |= read_json(folder / name, _Settings, _LIMIT)
    return settings


def tokenizer_digest(loaded: LoadedTokenizer) -> str:
    """32 hex digits; equal ones mean equal ids for equal texts."""
    return digest(loaded.tokenizer.to_str())


def digest(*texts: str) -> str:
    """32 hex digits that identify these texts."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()


def describe(tokenizer: Tokenizer, end: str | None, source: str) -> LoadedTokenizer:
    """A tokenizer with its end-of-text id, looked up by name or among the usual names."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = [end] if end else _KNOWN_ENDS
    ids = [vocabulary[name] for name in names if name in vocabulary]
    if not ids:
        named = ", which tokenizer_config.json names" if end else ""
        raise UserError(f"{source}: has no end-of-text token; looked for {', '.join(names)}{named}")
    if (largest := max(vocabulary.values())) >= _LARGEST:
        raise UserError(f"{source}: has the id {largest:,}; ids must be below {_LARGEST:,}")
    tokenizer.encode_special_tokens = True  # text that spells the token out does not end a document
    return LoadedTokenizer(tokenizer, source, ids[0], largest + 1)


def byte_lengths(loaded: LoadedTokenizer) -> np.ndarray:
    """The bytes of text that each id stands for, (vocabulary,) int64; 0 for special tokens.

    They are what the id adds to a decoded text. A word that begins a text counts the space that it has elsewhere. A part of a
    character is counted by its bytes: in a byte-level vocabulary each character of an entry is one, in others "<0x0A>" is one.
    """
    tokenizer = loaded.tokenizer
    lengths = np.zeros(loaded.vocabulary, np.int64)
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    byte_level = any(b'"ByteLevel"' in part.__getstate__() for part in parts if part)
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    vocabulary = {token: number for token, number in tokenizer.get_vocab().items() if not added.get(token)}
    first = next(iter(vocabulary.values()))
    with refusing(UserError, f"{loaded.source}: cannot decode its vocabulary"):
        before = len(tokenizer.decode([first], skip_special_tokens=False).encode())
        after = tokenizer.decode_batch([[first, number] for number in vocabulary.values()], skip_special_tokens=False)
    for (token, number), text in zip(vocabulary.items(), after, strict=True):
        if byte_level:
            lengths[number] = len(token.encode()) if token in added else len(token)
        else:
            lengths[number] = 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else len(text.encode()) - before
    lengths[[loaded.end_of_text, *loaded.bos]] = 0  # also where tokenizer.json does not call them special
    return lengths


def faults(config: Config, vocabulary: int) -> Iterator[str]:
    """A tokenizer with more ids than the vocabulary of the model has. Raises UserError for one that cannot be read."""
    folder, model = config.model.hf_assets_path, config.model.title
    ids = load_tokenizer(folder, add_bos=config.training.add_bos).vocabulary if folder else DEFAULT_VOCABULARY
    if ids > vocabulary:
        source = f'"{folder}"' if folder else "the default tokenizer (model.hf_assets_path is empty)"
        remedy = f"take the tokenizer of the model, or set model.overrides.vocab_size = {ids}"
        yield f"model.hf_assets_path: {source} has ids up to {ids - 1}, and {model} has a vocabulary of {vocabulary}; {remedy}"
