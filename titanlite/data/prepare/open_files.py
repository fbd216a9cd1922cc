"""Opens files and URLs, decompressed where their suffix says so; and optional packages."""

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from titanlite.ground.errors import UserError
from titanlite.ground.untrusted import open_file

_BYTES_AT_ONCE = 2**20
DAMAGES = (EOFError, zlib.error, gzip.BadGzipFile)  # raised by a read of a damaged compressed file


def is_url(path: str) -> bool:
    return "://" in path


def plain_name(path: str) -> str:
    """A file or URL in lower case, without what follows the suffix of a URL."""
    return path.lower() if not is_url(path) else path.lower().partition("?")[0]  # a signature or a version follows


def packing_of(path: str) -> str:
    """The suffix of a compressed file or URL, a key of PACKINGS; else empty."""
    return next((suffix for suffix in PACKINGS if plain_name(path).endswith(suffix)), "")


def open_bytes(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens a file or URL for reading. Raises UserError."""
    if not is_url(path):
        return open_file(path)
    fsspec = need("fsspec", "a URL")
    try:
        # without this buffer, fsspec finds line ends in Python
        return io.BufferedReader(fsspec.open(path, "rb").open(), _BYTES_AT_ONCE)
    except Exception as error:
        raise UserError(f"{path}: cannot be opened: {type(error).__name__}: {error}") from None


@contextlib.contextmanager
def open_unpacked(path: str) -> Iterator[BinaryIO]:
    """Opens a file or URL, decompressed."""
    with open_bytes(path) as file:
        yield PACKINGS[packing](file) if (packing := packing_of(path)) else file


def need(module: str, what: str) -> Any:
    """Imports an optional package. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{what} needs {package}: pip install 'titanlite[data]'") from None


class _ZstdFile(io.RawIOBase):
    """A decompressed .zst file. The package's own reader accepts a truncated file as complete; pyarrow's rejects --long=31."""

    def __init__(self, file: BinaryIO):
        self._blocks, self._ready = _decompressed(file), b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = block
        count = min(len(target), len(self._ready))
        target[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The contents of a .zst file in blocks. Raises EOFError where it is truncated or damaged, as gzip does."""
    zstandard = need("zstandard", ".zst")
    frame = None
    while block := file.read(_BYTES_AT_ONCE // 8):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise EOFError(error) from None
            block = frame.unused_data  # the beginning of the next frame
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a frame")


PACKINGS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".zst": lambda file: io.BufferedReader(_ZstdFile(file), _BYTES_AT_ONCE),
}
