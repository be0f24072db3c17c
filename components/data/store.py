"""A folder of an object store, or of another file system of fsspec. Drivers are imported only inside functions.

Drivers find credentials and endpoints themselves, in environment variables or files of the user.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from components.config import ConfigError
from components.config.bounds import redacted
from components.config.files import patiently

T = TypeVar("T")
_PIECE_BYTES = 1 << 25
"""Bytes of one request of a download; a failed request is repeated alone."""
_ANSWER_SECONDS = 60.0
_VERSIONS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated")
"""Names of a file's version in listings of drivers, best first."""


@dataclass(frozen=True)
class Entry:
    """A file of a store. The version changes with the content: its ETag, or else its size and time."""

    size: int
    version: str


class Store:
    """A folder of a store, by its URL. File names are relative to the folder, with / between folders.

    Each method raises FileNotFoundError if a file is missing, and OSError of one line for any other failure.
    """

    def __init__(self, url: str) -> None:
        self.url, self._root, self._driver = url, "", None

    def _fs(self) -> Any:
        if self._driver is None:
            import fsspec

            options: Any = {"auto_mkdir": True} if self.url.startswith("file:") else {}
            # Listings must be of now: driver and store are asked again each time.
            options |= {"use_listings_cache": False, "skip_instance_cache": True}
            self._driver, self._root = fsspec.url_to_fs(self.url, **options)
        return self._driver

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    @contextmanager
    def _asking(self, name: str = "") -> Iterator[Any]:
        """Yields the driver, and turns its errors, which are of any type, into OSError."""
        try:
            yield self._fs()
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such file in the store", f"{self.url}/{name}") from None
        except Exception as error:
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            raise OSError(code, _line(error), f"{self.url}/{name}".rstrip("/")) from None

    def files(self, below: str = "", depth: int | None = None) -> dict[str, Entry]:
        """Name -> entry of the files below a folder, at most `depth` names deep. Empty if there is no such folder.

        The name of a URL that is itself a file is the empty string. Raises ConfigError if a name could leave a folder.
        """
        found = {}
        with self._asking(below) as fs:
            listed = fs.find(self._path(below), maxdepth=depth, detail=True)
            root = fs._strip_protocol(self._root).rstrip("/")
            for path, info in listed.items():
                if not path.endswith("/"):  # consoles make such empty files to show a folder
                    found[path[len(root) :].lstrip("/")] = Entry(int(info["size"] or 0), _version(info))
        for name in found:
            if name and ({"", ".", ".."} & {*name.split("/")} or "\0" in name):
                raise ConfigError(f"{self.url} is refused: {name!r} is not the name of a file in a folder")
        return found

    def read(self, name: str) -> bytes:
        with self._asking(name) as fs:
            return fs.cat_file(self._path(name))

    def write(self, name: str, content: bytes) -> None:
        with self._asking(name) as fs:
            fs.pipe_file(self._path(name), content)

    def put(self, file: Path, name: str) -> None:
        """Copy a local file into the store."""
        with self._asking(name) as fs:
            fs.put_file(str(file), self._path(name))

    def get(self, name: str, entry: Entry, file: Path) -> None:
        """Copy a file of the store to a local path. Continues after the bytes that the local file has already."""
        with file.open("ab") as local:
            while (start := local.tell()) < entry.size:
                end = min(start + _PIECE_BYTES, entry.size)
                local.write(patiently(file, partial(self._piece, name, start, end)))

    def _piece(self, name: str, start: int, end: int) -> bytes:
        with self._asking(name) as fs:
            piece = fs.cat_file(self._path(name), start=start, end=end)
            if len(piece) != end - start:
                raise OSError(f"{len(piece)} bytes came, not {end - start}")
            return piece

    def remove(self, *names: str) -> None:
        """Remove files, and folders with all that is in them; a name that is not there is no error."""
        for name in names:
            with suppress(FileNotFoundError), self._asking(name) as fs:
                fs.rm(self._path(name), recursive=True)


def _version(info: dict[str, Any]) -> str:
    given = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return f"{info['size']}-{given}"


def _line(error: Exception) -> str:
    """The last cause of an error, in one line and without credentials."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return redacted(" ".join(str(text).split()))[:300]


def path_in(folder: Path, name: str) -> Path:
    """The local path of a file of a store."""
    return folder.joinpath(*PurePosixPath(name).parts)


def within(ask: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T:
    """Returns the result of ask. Raises its error, or OSError if it takes longer, because drivers retry for minutes."""
    results: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            results.append((ask(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise OSError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} s")
    value, error = results[0]
    if error:
        raise error
    return value
