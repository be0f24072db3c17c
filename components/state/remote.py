"""Copies of a run's checkpoints in a store (checkpoint.remote), and the way back to an empty machine.

    <remote>/step-20/...           the files of the local step-20; manifest.json is written last
    <remote>/step-20/.node-1       nodes without a shared folder: hash of the manifest whose files node 1 has copied

A copy counts if its manifest is there and every file has its size. Hashes are compared when a copy is brought back. The
local folder is the truth: a thread makes the store follow it, and an error of the store never reaches training.
"""

import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from components.config import Checkpoint
from components.config.files import digest, make_staging, publish
from components.data.store import Entry, Store, within
from components.state.choice import ABANDONED, put_aside
from components.state.folder import (
    Copy,
    Fault,
    Saved,
    beyond,
    fault,
    names_in,
    parse_manifest,
    plain_name,
    saved_in,
    step_of,
    surplus,
)

_AT_ONCE = 8
"""Files that are copied back at the same time."""
_MANIFEST = "manifest.json"


class Remote:
    """The copies of one folder of checkpoints. Without a shared folder, each node has one, and node 0 the manifests."""

    def __init__(self, folder: Path, config: Checkpoint, node: int = 0, nodes: int = 1) -> None:
        self.folder, self.keep, self.seconds = folder, config.keep_latest_k, config.remote_timeout_seconds
        self.store, self.node, self.nodes = Store(config.remote), node, nodes
        self.lock = threading.RLock()
        """Held while local checkpoints are listed, published or renamed."""
        self.held: set[Path] = set()
        """Local checkpoints whose copies have begun and not failed. Pruning spares them: a slow store may take long."""
        self._sent: dict[str, list] = {}
        """Name in the store -> size and hash of the files that this process has copied."""
        self._read: dict[str, tuple[Entry, Copy | Fault]] = {}
        self._failures, self._longest_pause = 0, 60.0
        self._thread: threading.Thread | None = None
        self._wake, self._caught_up, self._flags = threading.Event(), threading.Event(), threading.Lock()

    # ------------------------------------------------------------------------------------------- to the store

    def wake(self) -> None:
        """Let the thread copy what the store lacks. Returns at once."""
        with self._flags:
            self._caught_up.clear()
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint.remote", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the store has every copy, but not for longer than remote_timeout_seconds."""
        if self._thread is None:
            return
        self._longest_pause = 1.0
        self.wake()
        if not self._caught_up.wait(self.seconds):
            tries = f"{self._failures} attempts failed" if self._failures else "the copy is not finished"
            self._say(f"after {self.seconds} s {tries}; the next start copies what {self.store.url} lacks")

    def _run(self) -> None:
        pause = None
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            try:
                whole = self.sync()
            except Exception as error:
                self._failures += 1
                pause = min(self._longest_pause, 2.0**self._failures / 2)
                if self._failures == 1:
                    self._say(f"{_reason(error)}: not copied; training goes on, and the copy is tried again")
                continue
            if self._failures:
                self._say(f"{self.store.url} answers again after {self._failures} failed attempts: all is copied")
            self._failures, pause = 0, None if whole else 1.0
            with self._flags:
                if whole and not self._wake.is_set():
                    self._caught_up.set()

    def _say(self, what: str) -> None:
        print(f"checkpoint.remote: {what}", flush=True)

    def sync(self, newest_only: bool = False) -> bool:
        """Copy what the store lacks, newest first, then remove what keep_latest_k does not keep.

        Returns whether all is there: without a shared folder other nodes may be late. Raises OSError.
        """
        entries = self.store.files()
        copies = {copy.folder.name: copy for copy in self._copies(entries)[0]}
        with self.lock:
            local = [saved for saved in saved_in(self.folder) if saved.state is not None and self._is_whole(saved)]
        if not local:
            return True
        union = {saved.order: saved for saved in [*copies.values(), *local]}
        newest = union[max(union)]
        abandoned = beyond(newest.branch, [*union.values()])
        removed = surplus([saved for saved in union.values() if saved not in abandoned], newest, self.keep)
        kept = [saved for saved in reversed(local) if saved not in removed or saved.folder in self.held]
        wanted = [saved for saved in kept if saved not in abandoned][: 1 if newest_only else None]
        sent = [self._send(saved, entries, copies.get(saved.folder.name)) for saved in wanted]
        whole = all(sent)  # a list first: a checkpoint that waits for another node must not hold up older ones
        if whole and self.node == 0:
            for copy in copies.values():
                if copy.order in {saved.order for saved in removed}:
                    # The manifest first: a half removed copy must not count.
                    self.store.remove(f"{copy.folder.name}/{_MANIFEST}", copy.folder.name)
            if self.keep:
                self._remove_unfinished(entries, min(saved.step for saved in union.values() if saved not in removed))
        return whole

    def _remove_unfinished(self, entries: dict[str, Entry], before: int) -> None:
        """Remove what copies and removals that were broken off have left of steps before this one."""
        for name in {path.partition("/")[0] for path in entries}:
            step = step_of(name)
            if step is not None and step < before and f"{name}/{_MANIFEST}" not in entries:
                self.store.remove(name)

    def _is_whole(self, saved: Saved) -> bool:
        return fault(saved.folder, hashes=False, parts=self.nodes > 1) is None

    def _send(self, saved: Saved, entries: dict[str, Entry], copy: Copy | None) -> bool:
        """Copy one checkpoint, its manifest last; returns whether it is whole there."""
        with self.lock:
            if not saved.folder.is_dir():  # pruned since it was listed
                self.held.discard(saved.folder)
                return False
            self.held.add(saved.folder)
        try:
            whole = self._send_files(saved, entries, copy)
        except Exception as error:
            with self.lock:
                self.held.discard(saved.folder)
            if not isinstance(error, FileNotFoundError) or saved.folder.is_dir():
                raise
            return False  # put aside meanwhile
        if whole:
            with self.lock:  # older ones that still wait for another node are needed no more
                self.held = {folder for folder in self.held if (step_of(folder.name) or 0) > saved.step}
        return whole

    def _send_files(self, saved: Saved, entries: dict[str, Entry], copy: Copy | None) -> bool:
        name, raw = saved.folder.name, (saved.folder / _MANIFEST).read_bytes()
        if copy is not None and copy.manifest == raw:
            return True
        files = parse_manifest(raw)
        if isinstance(files, Fault):
            return True
        first, markers = self.node == 0, [_marker(node) for node in range(1, self.nodes)]
        left = {path.removeprefix(f"{name}/") for path in entries if path.startswith(f"{name}/")}
        if first and (foreign := left - {*files, *markers}):  # another save of this step, or what is left of one
            self.store.remove(*(f"{name}/{file}" for file in sorted(foreign, key=lambda file: file != _MANIFEST)))
        own = [file for file in files if (saved.folder / file).exists() and (first or file.startswith("__"))]
        for file in own:
            if self._sent.get(f"{name}/{file}") != files[file]:
                self.store.put(saved.folder / file, f"{name}/{file}")
                self._sent[f"{name}/{file}"] = files[file]
        there = self.store.files(name)
        there = {path.removeprefix(f"{name}/"): entry for path, entry in there.items()}
        for file in own:
            if file not in there or there[file].size != files[file][0]:
                del self._sent[f"{name}/{file}"]
                raise OSError(f"{name}/{file} did not arrive whole in {self.store.url}")
        signed = hashlib.blake2b(raw).hexdigest().encode()
        if not first:
            self.store.write(f"{name}/{_marker(self.node)}", signed)
            return True
        if any(each not in there or self.store.read(f"{name}/{each}") != signed for each in markers):
            return False
        if any(file not in there or there[file].size != size for file, (size, _) in files.items()):
            return False  # a node of that save is lost, and the nodes of now have confirmed theirs
        if (saved.folder / _MANIFEST).read_bytes() != raw:  # saved again meanwhile
            return False
        self.store.write(f"{name}/{_MANIFEST}", raw)
        self._read.pop(name, None)  # a fault of before: the same content has the same ETag
        return True

    # ------------------------------------------------------------------------------------------- from the store

    def offered(self) -> tuple[list[Copy], list[str]]:
        """The whole checkpoints of the store, and a line for each that is not whole. Raises OSError.

        Those that this machine has put aside as abandoned are left out.
        """
        copies, said = within(lambda: self._copies(self.store.files()))
        aside = [self.folder / name / _MANIFEST for name in names_in(self.folder) if name.startswith(ABANDONED)]
        left = {path.read_bytes() for path in aside if path.is_file()}
        return [copy for copy in copies if copy.manifest not in left], said

    def _copies(self, entries: dict[str, Entry]) -> tuple[list[Copy], list[str]]:
        found, said = list[Copy](), list[str]()
        manifests = {path.removesuffix(f"/{_MANIFEST}"): entry for path, entry in entries.items() if _MANIFEST in path}
        manifests = {name: entry for name, entry in manifests.items() if step_of(name) is not None}
        new = [name for name, entry in manifests.items() if self._read.get(name, (None,))[0] != entry]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            parsed = zip(new, threads.map(self._parsed, new), strict=True)
            self._read |= {name: (manifests[name], copy) for name, copy in parsed}
        for name in manifests:
            copy = self._read[name][1]
            if isinstance(copy, Copy):
                sizes = {each: entries[f"{name}/{each}"].size for each in copy.files if f"{name}/{each}" in entries}
                wrong = [each for each, (size, _) in copy.files.items() if sizes.get(each) != size]
                copy = Fault(f"{wrong[0]} is missing or torn") if wrong else copy
            if isinstance(copy, Fault):
                said.append(f"checkpoint {self.store.url}/{name} passed over: {copy}")
            else:
                found.append(copy)
        return found, said

    def _parsed(self, name: str) -> Copy | Fault:
        raw = self.store.read(f"{name}/{_MANIFEST}")
        files = parse_manifest(raw)
        if isinstance(files, Fault):
            return files
        for file in files:
            plain_name(self.folder / name, file)
        try:
            content = self.store.read(f"{name}/state.json")
            state = json.loads(content)
        except FileNotFoundError:
            return Fault("state.json is missing")
        except (ValueError, RecursionError):
            return Fault("state.json is corrupt")
        if hashlib.blake2b(content).hexdigest() != files["state.json"][1] or not isinstance(state, dict):
            return Fault("state.json is corrupt")
        return Copy(step_of(name) or 0, self.folder / name, state, raw, files)

    def bring(self, copy: Copy) -> Fault | None:
        """Make the local folder equal to the copy; files that are here already are kept. Returns why it cannot be used.

        Raises OSError if the store does not answer, or if the disk is full.
        """
        target = self.folder / copy.folder.name
        staging = make_staging(target)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                faults = [*threads.map(partial(self._bring_file, copy, staging), copy.files)]
            if wrong := next(filter(None, faults), None):
                return wrong
            (staging / _MANIFEST).write_bytes(copy.manifest)
            if (target / _MANIFEST).exists() and (target / _MANIFEST).read_bytes() != copy.manifest:
                put_aside(target, f"{ABANDONED}{target.name}")  # another save of this step
            shutil.rmtree(publish(staging, target), ignore_errors=True)
            return None
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _bring_file(self, copy: Copy, staging: Path, name: str) -> Fault | None:
        here, new, expected = self.folder / copy.folder.name / name, staging / name, copy.files[name]
        if here.is_file() and not here.is_symlink() and digest(here) == expected:
            try:
                os.link(here, new)
            except OSError:  # a file system without links
                shutil.copyfile(here, new)
            return None
        self.store.get(f"{copy.folder.name}/{name}", Entry(expected[0], ""), new)
        return None if digest(new) == expected else Fault(f"{name} in {self.store.url} is corrupt")


def _marker(node: int) -> str:
    return f".node-{node}"


def _reason(error: Exception) -> str:
    name, text = getattr(error, "filename", None), getattr(error, "strerror", None) or str(error)
    return f"{name}: {text}" if name else text
