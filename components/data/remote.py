"""Data in object stores: a start copies them into the cache folder, and ranks read the copies.

<cache_folder>/remote/<name>-<hash of the URL>/
    files/...       the files, under their names in the store
    index.jsonl     a line for each finished file: its name and version, the last line wins
"""

import glob
import hashlib
import json
import re
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.config import ConfigError, JobConfig, mistake
from components.config.bounds import is_url
from components.data.cache import DataSpec, data_spec
from components.data.rows import ChatSpec
from components.data.sources import Unread, chosen, covers, ending, is_data, unread_sizes
from components.data.store import Entry, Store, path_in, within
from components.launch.locks import locked

_AT_ONCE = 8
"""Files that are copied at the same time."""
_LISTING_SECONDS = 600.0
"""Time to list a folder: a store lists some thousand files a second."""


@dataclass
class Listed:
    """The data files of a URL."""

    store: Store
    """The folder before the first * ? or [ of the URL."""
    pattern: str
    """The rest of the URL; empty for a folder, or a file."""
    files: dict[str, Entry]
    left: Unread | None
    """Files that look like data and are not read."""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(entry.size for entry in self.files.values())


def list_data(url: str, endings: Collection[str]) -> Listed:
    """The files that a URL names: a file, a folder or a glob. Without endings, all files of a folder.

    Raises ConfigError if the store does not answer, or has no such files.
    """
    parts = url.split("/")
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    base, pattern = Store("/".join(parts[:first])), "/".join(parts[first:])
    depth = None if not pattern or "**" in pattern else len(parts) - first
    try:
        found = within(lambda: base.files(depth=depth), _LISTING_SECONDS)
    except OSError as error:
        raise ConfigError(f"data {url}: the store cannot be listed: {error.strerror}") from None
    if "" in found:  # the URL of a file
        base = Store(url.rpartition("/")[0])
        found = {url.rpartition("/")[2]: found[""]}
        pattern = glob.escape(url.rpartition("/")[2])
    seen = {name: entry for name, entry in found.items() if not any(part[0] == "." for part in name.split("/"))}
    if pattern:
        wanted = tuple(pattern.split("/"))
        wanted += ("*",) * (wanted[-1] == "**")
        seen = {name: entry for name, entry in seen.items() if covers(wanted, tuple(name.split("/")))}
    files = {name: entry for name, entry in seen.items() if entry.size}
    if endings:
        paths = [Path(name) for name in files]
        readable = [path for path in paths if ending(path) in endings and (len(seen) == 1 or is_data(path))]
        files = {path.as_posix(): files[path.as_posix()] for path in chosen(readable, endings)}
    left = unread_sizes({name: entry.size for name, entry in seen.items()}, {*files}, endings)
    if not files:
        what = f"no file that ends in {', '.join(sorted(endings))}" if endings else "no file"
        raise ConfigError(f"data {url}: {what} there" + (f"; {left}" if left else ""))
    return Listed(base, pattern, files, left)


def bring(url: str, endings: Collection[str], cache_folder: Path) -> tuple[Path, Listed, int]:
    """Copy the data of a URL into the cache folder: the files that are new or have another version there.

    Returns (path to read instead of the URL, files, number of copied files). Raises ConfigError.
    """
    listed = list_data(url, endings)
    name = re.sub(r"[^\w.-]+", "-", url.partition("://")[2])[-40:]
    folder = cache_folder / "remote" / f"{name}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), f"copy {url}"):
            copied = _update(listed, folder)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        again = "; the same command continues"
        raise ConfigError(f"data {url}: {error.strerror or error}{where}{again}") from None
    files = folder / "files"
    return (Path(glob.escape(str(files))) / listed.pattern if listed.pattern else files), listed, copied


def _update(listed: Listed, folder: Path) -> int:
    files, index = folder / "files", folder / "index.jsonl"
    have = _finished(index)
    stale = {
        name: entry
        for name, entry in listed.files.items()
        if have.get(name) != entry.version or not _has_size(path_in(files, name), entry.size)
    }
    if files.exists():
        for file in [file for file in files.rglob("*") if file.is_file()]:
            name = file.relative_to(files).as_posix()
            # A partial copy begins with a dot; one of this version is continued.
            if name not in listed.files and not any(file == _partial(files, *each) for each in stale.items()):
                file.unlink()
    files.mkdir(exist_ok=True)

    def copy(name: str) -> None:
        entry, target, partial = stale[name], path_in(files, name), _partial(files, name, stale[name])
        target.parent.mkdir(parents=True, exist_ok=True)
        listed.store.get(name, entry, partial)
        if listed.store.files(name).get(name) != entry:
            partial.unlink()
            raise ConfigError(f"data {listed.store.url}/{name}: changed while it was copied; start again")
        partial.replace(target)
        with index.open("a") as file:
            file.write(f"\n{json.dumps([name, entry.version])}\n")

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        work = [threads.submit(copy, name) for name in sorted(stale)]
        try:
            for each in work:
                each.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return len(stale)


def _partial(files: Path, name: str, entry: Entry) -> Path:
    """The path of an unfinished copy of this version of a file."""
    target = path_in(files, name)
    version = hashlib.blake2b(f"{target.name} {entry.version}".encode(), digest_size=12).hexdigest()
    return target.with_name(f".{version}.partial")


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _finished(index: Path) -> dict[str, str]:
    """Name -> version of the finished files. A torn line is skipped."""
    found: dict[str, str] = {}
    for line in index.read_text().splitlines() if index.exists() else ():
        try:
            name, version = json.loads(line)
            found[name] = version
        except ValueError:
            continue
    return found


def remote_data(config: JobConfig) -> dict[str, tuple[str, Collection[str]]]:
    """Key -> (URL, endings of data files there) of the job's data in stores."""
    training, validation = config.training, config.validation
    kinds: dict[str, Collection[str]] = {"text": DataSpec.endings, "tokens": ()}
    kinds |= dict.fromkeys(("chat", "preference"), ChatSpec.endings)
    own = kinds[training.dataset_format]
    given: dict[str, tuple[str | None, Collection[str]]] = {
        "training.dataset_path": (training.dataset_path, () if training.dataset_streaming else own),
        "validation.dataset_path": (validation.dataset_path if validation.enable else None, own),
        "validation.text_path": (validation.text_path if validation.enable else None, kinds["text"]),
    }
    for number, source in enumerate(training.mixture, 1):
        key = f"training.mixture[{number}].dataset_path"
        given[key] = source.dataset_path, kinds[source.dataset_format or training.dataset_format]
    return {key: (path, endings) for key, (path, endings) in given.items() if path and is_url(path)}


def localize(config: JobConfig) -> JobConfig:
    """The job with paths of local copies instead of URLs of data, which are copied here. Raises ConfigError."""
    local: dict[str, str] = {}
    for key, (url, endings) in remote_data(config).items():
        cache_folder = data_spec(config.training, config.model.hf_assets_path, url).cache_folder
        try:
            path, listed, copied = bring(url, endings, cache_folder)
        except ConfigError as error:
            raise ConfigError([mistake(config, key, message) for message in error.messages]) from None
        size = f"{len(listed.files):,} files, {listed.size / 2**30:.3f} GiB"
        print(f"{key}: {size} of {url} are in {path}, {copied:,} of them copied now", flush=True)
        if listed.left:
            print(f"warning: data {listed.left}", file=sys.stderr, flush=True)
        local[key] = str(path)

    def at(table: Any, key: str) -> Any:
        return replace(table, **{key.rpartition(".")[2]: local[key]}) if key in local else table

    mixture = [at(each, f"training.mixture[{n}].dataset_path") for n, each in enumerate(config.training.mixture, 1)]
    training = replace(at(config.training, "training.dataset_path"), mixture=mixture)
    validation = at(at(config.validation, "validation.dataset_path"), "validation.text_path")
    return replace(config, training=training, validation=validation) if local else config
