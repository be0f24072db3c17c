"""Object stores: a real S3 server on this machine, or a folder behind file://; what is copied, torn, lost and found."""

import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import pytest
import s3fs
import torch.distributed as dist
from moto.server import ThreadedMotoServer

from components.commands import check
from components.config import Checkpoint, ConfigError, files, load_config
from components.config.bounds import DRIVERS
from components.data.__main__ import prepare_all
from components.data.datasets import build_datasets
from components.data.remote import bring, list_data, localize
from components.data.sources import find_files
from components.data.store import Entry, Store, within
from components.launch.settings import read_settings
from components.state.remote import Remote
from tests.checkpoints import checkpointer, flip_a_bit, load, names, run, save, saved, small, value_of
from tests.harness import observe
from tests.jobs import refused
from tests.limits import wait_until
from tests.small import SMALL

# --------------------------------------------------------------------------------------------- stores


class Server:
    """An S3 server in this process. Its buckets outlive stop and start."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self.thread = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.thread.start()
        self.port = self.thread.get_host_and_port()[1]

    def stop(self) -> None:
        self.thread.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{started.port}", **keys}.items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)  # a server that is down is noticed at once
        patch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"max_attempts": 0}}})
        Store("s3://bucket/x")._fs().mkdir("bucket")
        yield started
    started.stop()


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that is not there yet, with a space in its name."""
    if request.param == "file":
        return f"file://{tmp_path}/a store/run"
    request.getfixturevalue("server")
    return f"s3://bucket/{tmp_path.name}/a run"


def test_files_go_there_and_back(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.data.store._PIECE_BYTES", 7)
    store, (here, back) = Store(url), (tmp_path / "here", tmp_path / "back")
    assert store.files() == {}
    here.write_bytes(bytes(range(30)))
    store.put(here, "sub/a b")
    store.write("c", b"")
    found = store.files()
    assert {name: entry.size for name, entry in found.items()} == {"sub/a b": 30, "c": 0}
    assert [*store.files("sub")] == ["sub/a b"]
    back.write_bytes(here.read_bytes()[:10])  # an earlier attempt
    store.get("sub/a b", found["sub/a b"], back)
    assert back.read_bytes() == here.read_bytes() == store.read("sub/a b")
    store.write("sub/a b", bytes(30))
    assert store.files()["sub/a b"].version != found["sub/a b"].version
    store.remove("c", "no such file", "sub")
    assert store.files() == {}
    with pytest.raises(FileNotFoundError):
        store.read("c")


def test_a_store_without_an_answer_is_not_waited_for() -> None:
    with pytest.raises(OSError, match="no answer within 0 s"):
        within(threading.Event().wait, 0.01)
    with pytest.raises(ValueError, match="its own"):
        within(lambda: int("its own"))
    assert within(lambda: 3) == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s4://bucket/run", "did you mean s3://?"),
        ("gcs://bucket/run", "did you mean gs://?"),
        ("abfss://bucket/run", "did you mean az://?"),
        ("ftp://host/run", "expected a URL that begins with s3://, gs://, az://, hf://, file://"),
        ("/local/folder", "expected a URL that begins with s3://"),
        ("s3://", "expected s3://bucket/folder"),
        ("s3://bucket/../run", "expected s3://bucket/folder"),
        ("s3://bucket/run::2", "without ::"),
        ("file:///*.txt", "expected file:///folder"),
        ("s3://*/run", "expected s3://bucket/folder"),
        ("s3://bucket/step-*", "expected a folder of a store, not a glob"),
        ("file://folder", "expected file:///folder"),
    ],
)
def test_a_wrong_url_is_refused(given: str, says: str) -> None:
    (message,) = refused("--checkpoint.enable", "--checkpoint.remote", given)
    assert message.startswith(f'command line: checkpoint.remote = "{given}": ')
    assert says in message


def test_no_rank_waits_for_copies_longer_than_its_group_allows() -> None:
    words = ("--checkpoint.enable", "--checkpoint.remote", "file:///folder", "--checkpoint.remote_timeout_seconds")
    (message,) = refused(*words, "3601")
    assert "of 3000 or less" in message


@pytest.mark.parametrize("key", ["checkpoint.remote", "training.dataset_path", "checkpoint.initial_load_path"])
@pytest.mark.parametrize(
    "given",
    ["s3://AKIA:sec/ret@bucket/run", "s3://secret@bucket/run", "s3://AKIA:secret", "az://box/run?sv=1&sig=secret"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(key: str, given: str) -> None:
    (message,) = refused("--checkpoint.enable", f"--{key}", given)
    assert "***" in message
    assert not any(part in message for part in ("sec/ret", "ret@", "AKIA:s", "=secret", "secret@"))
    assert "credentials" in message or key == "checkpoint.initial_load_path"
    (word,) = refused(given)
    assert "***" in word
    assert "ret" not in word.partition(": expected")[0]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_missing_driver_is_refused(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    lacks = DRIVERS[scheme]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacks else find(name))
    (message,) = refused("--training.dataset_path", f"{scheme}://bucket/texts")
    assert message.endswith(f"{scheme}:// needs the package {lacks}: pip install {lacks}")


# --------------------------------------------------------------------------------------------- data

TEXTS = {
    "one.txt": "In the beginning. " * 40,
    "sub/two.txt": "And the evening. " * 30,
    "three.jsonl": '{"text": "a"}\n',
}


def fill(url: str, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        Store(url).write(name, text.encode())


def data_job(url: str, cache: Path, *more: str) -> Any:
    words = ["--training.dataset_path", url, "--training.dataset_cache", str(cache), "--validation.no_enable", *more]
    return load_config([*SMALL, *words])


def test_data_are_the_same_as_local_ones(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/{tmp_path.name}/some texts"
    fill(url, {**TEXTS, ".hidden/x.txt": "hidden", "not.csv": "a,b\n" * 9, "empty.txt": ""})
    local = tmp_path / "local"
    for name, text in TEXTS.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(text)
    cache = tmp_path / "cache"
    job = prepare_all(data_job(url, cache))
    said = capfd.readouterr()
    assert f"training.dataset_path: 3 files, 0.000 GiB of {url} are in" in said.out
    assert "3 of them copied now" in said.out
    assert "not read: 1 file, 36 bytes (not.csv)" in said.err
    assert build_datasets(data_job(url, cache), 1024)[0].num_tokens > 100  # without a launcher
    monkeypatch.setattr("components.data.store.Store.files", None)  # ranks need no store
    there = build_datasets(job, 1024)[0]
    here = build_datasets(data_job(str(local), tmp_path / "another"), 1024)[0]
    assert there.key == here.key
    for of_store, of_folder in zip(there.get(np.arange(len(there))), here.get(np.arange(len(here))), strict=True):
        assert np.array_equal(of_store, of_folder)


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        ("", ["one.txt", "sub/two.txt", "three.jsonl"]),
        ("/", ["one.txt", "sub/two.txt", "three.jsonl"]),
        ("/*.txt", ["one.txt"]),
        ("/**/*.txt", ["one.txt", "sub/two.txt"]),
        ("/sub/*", ["sub/two.txt"]),
        ("/one.txt", ["one.txt"]),
    ],
)
def test_a_folder_a_glob_or_a_file_is_read_as_local_ones(pattern: str, read: list[str], tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / "there1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there1" / name).write_text(text)
    url = f"file://{tmp_path}/there1"
    path, listed, _ = bring(f"{url}{pattern}".rstrip("/"), (".txt", ".jsonl"), tmp_path / "cache[x]")
    assert sorted(listed.files) == sorted(name.removeprefix("sub/" if pattern == "/sub/*" else "") for name in read)
    assert sorted(file.read_text() for file in find_files(str(path))) == sorted(TEXTS[name] for name in read)


def test_only_what_has_changed_is_copied_again(url: str, tmp_path: Path) -> None:
    fill(url, TEXTS)
    texts = (".txt", ".jsonl")
    path, _, copied = bring(url, texts, tmp_path)
    assert copied == 3
    assert bring(url, texts, tmp_path)[2] == 0
    fill(url, {"one.txt": TEXTS["one.txt"].upper()})  # of the same size: its ETag or its time has changed
    (path / "three.jsonl").write_text("torn")
    Store(url).remove("sub/two.txt")
    assert bring(url, texts, tmp_path)[2] == 2
    assert (path / "one.txt").read_text() == TEXTS["one.txt"].upper()
    assert (path / "three.jsonl").read_text() == TEXTS["three.jsonl"]
    assert not (path / "sub/two.txt").exists()
    with (path.parent / "index.jsonl").open("a") as file:
        file.write('["one.txt", "torn')  # killed while it was written
    assert bring(url, texts, tmp_path)[2] == 0


def test_a_copy_that_was_interrupted_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = f"file://{tmp_path}/there", []
    fill(url, {"one.txt": "abcdefghij" * 10})
    monkeypatch.setattr("components.data.store._PIECE_BYTES", 10)
    monkeypatch.setattr("components.config.files.WAITS_SECONDS", [])
    piece = Store._piece

    def fail_after_three(self: Store, name: str, start: int, end: int) -> bytes:
        asked.append(start)
        if len(asked) == 4:
            raise OSError(5, "the connection is lost", name)
        return piece(self, name, start, end)

    monkeypatch.setattr(Store, "_piece", fail_after_three)
    with pytest.raises(ConfigError, match=r"the connection is lost.*the same command continues"):
        bring(url, (".txt",), tmp_path / "cache")
    path, _, _ = bring(url, (".txt",), tmp_path / "cache")
    assert asked == [0, 10, 20, 30, *range(30, 100, 10)]
    assert (path / "one.txt").read_text() == "abcdefghij" * 10


def test_a_file_that_changes_while_it_is_copied_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/there"
    fill(url, {"one.txt": "before"})
    get = Store.get

    def changed_meanwhile(self: Store, name: str, entry: Entry, file: Path) -> None:
        get(self, name, entry, file)
        self.write(name, b"after!")

    monkeypatch.setattr(Store, "get", changed_meanwhile)
    with pytest.raises(ConfigError, match="changed while it was copied"):
        bring(url, (".txt",), tmp_path / "cache")


def test_sources_and_validation_are_copied_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    fill(url, TEXTS)
    mixture = [f"--training.mixture[{n}].{key}" for n in (1, 2) for key in ("name", "dataset_path")]
    values = ["a", str(tmp_path), "b", f"{url}/*.txt"]
    words = [word for pair in zip(mixture, values, strict=True) for word in pair]
    words += ["--validation.enable", "--validation.dataset_path", f"{url}/sub", "--validation.text_path", f"{url}/sub"]
    job = localize(load_config([*words, "--training.dataset_cache", str(tmp_path / "cache")]))
    assert job.training.mixture[0].dataset_path == str(tmp_path)
    assert Path(job.training.mixture[1].dataset_path or "").is_relative_to(tmp_path / "cache/remote")
    assert job.validation.dataset_path
    assert job.validation.text_path == job.validation.dataset_path
    assert [file.name for file in Path(job.validation.dataset_path).iterdir()] == ["two.txt"]


def test_the_empty_files_that_consoles_make_for_folders_are_no_data(server: Server) -> None:
    for name in ("marked/", "marked/sub/"):
        Store("s3://bucket").write(name, b"")
    fill("s3://bucket/marked", {"sub/one.txt": "one"})
    assert [*list_data("s3://bucket/marked", (".txt",)).files] == ["sub/one.txt"]


def test_data_that_are_not_there_are_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the store cannot be listed"):
        bring("s3://no-such-bucket/x", (".txt",), tmp_path)
    with pytest.raises(ConfigError, match=r"no file that ends in \.txt there"):
        bring("s3://bucket/no such folder", (".txt",), tmp_path)


def test_a_name_that_leaves_the_folder_is_refused(server: Server) -> None:
    fill("s3://bucket/hostile", {"x/../../../evil.txt": "evil"})
    with pytest.raises(ConfigError, match="is refused"):
        list_data("s3://bucket/hostile", (".txt",))


# --------------------------------------------------------------------------------------------- checkpoints


def _save(folder: Path, url: str, *steps: int, **config: Any) -> None:
    """Save steps with a copy of each."""
    for step in steps:
        saver = checkpointer(folder, step, remote=url, **config)
        saver.save(step, {"sequences": step * 7})
        saver.close()


def _load(folder: Path, url: str, step: int = -1, **config: Any) -> int | None:
    return load(folder, step, remote=url, **config)


def store_of(tmp_path: Path) -> tuple[str, Path]:
    return f"file://{tmp_path}/store", tmp_path / "store"


def test_an_empty_machine_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20, 30, world=2)
    assert names(store) == {"step-10", "step-20", "step-30"}
    assert names(store / "step-30") == names(tmp_path / "one/step-30")
    (outcome, _) = run(_load, tmp_path / "two", url, world=2)
    assert outcome.value == 30, outcome
    assert f"step-30 was taken from {url}" in outcome.printed
    assert names(tmp_path / "two") == {"step-30"}
    assert value_of(_load, tmp_path / "two", url, 20) == 20  # load_step finds it there too


def test_it_resumes_at_another_layout_with_the_losses_of_the_unbroken_run(tmp_path: Path) -> None:
    words = ("--checkpoint.enable", "--checkpoint.remote", f"file://{tmp_path}/store")
    whole = observe(steps=4)
    observe(*words, steps=2, folder=str(tmp_path / "one"))
    shutil.rmtree(tmp_path / "one")
    resumed = observe(
        *words, "--parallelism.tensor_parallel_degree", "2", ranks=2, steps=2, folder=str(tmp_path / "two")
    )
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert names(tmp_path / "store") == {"step-2", "step-4"}


TORN = {
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "a file is missing": lambda step: (step / "__0_0.distcp").unlink(),
    "a file is short": lambda step: (step / "__0_0.distcp").write_bytes(b"x"),
    "half a manifest": lambda step: (step / "manifest.json").write_text('{".metadata": ['),
    "a bit has flipped": flip_a_bit,
    "another state": lambda step: (step / "state.json").write_text(
        (step / "state.json").read_text().replace('"step": 20', '"step": 90')
    ),
}


@pytest.mark.parametrize("how", TORN)
def test_a_torn_copy_is_never_taken(how: str, tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20)
    TORN[how](store / "step-20")
    (outcome,) = run(_load, tmp_path / "two", url)
    assert outcome.value == 10, outcome
    assert ("step-20 passed over: " in outcome.printed) == (how != "no manifest")
    assert names(tmp_path / "two") == {"step-10"}


def test_weights_alone_are_not_brought(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10)
    value_of(partial(save, model_only=True), tmp_path / "one", 20)
    assert value_of(_load_and_close, tmp_path / "one", url) == 10
    assert names(store) == {"step-10", "step-20"}
    (outcome,) = run(_load, tmp_path / "two", url)
    assert outcome.value == 10, outcome
    assert "step-20 passed over: it holds only weights" in outcome.printed
    assert names(tmp_path / "two") == {"step-10"}


def test_the_newer_of_both_is_taken_and_said(tmp_path: Path) -> None:
    url, _store = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20)
    saved(tmp_path / "one", 30)
    (outcome,) = run(_load, tmp_path / "one", url)
    assert outcome.value == 30
    assert f"step-30 is taken: the newest in {url} is step-20" in outcome.printed
    for step in (20, 30):
        shutil.rmtree(tmp_path / "one" / f"step-{step}")
    (outcome,) = run(_load, tmp_path / "one", url)
    assert outcome.value in (20, 30)  # 30 if the first load has caught up before it ended
    assert f"was taken from {url}" in outcome.printed


def test_a_damaged_checkpoint_is_repaired_from_its_copy(tmp_path: Path) -> None:
    url, _ = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20)
    flip_a_bit(tmp_path / "one/step-20")
    (outcome,) = run(_load, tmp_path / "one", url)
    assert outcome.value == 20, outcome
    assert names(tmp_path / "one") == {"step-10", "step-20"}


@pytest.mark.parametrize("keep", [1, 2, 0])
def test_copies_are_pruned_by_the_rule_of_checkpoints(keep: int, tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    value_of(partial(_save, keep_latest_k=keep), tmp_path / "one", url, 10, 20, 30)
    kept = {f"step-{step}" for step in (10, 20, 30)[-keep:]}
    assert names(store) == names(tmp_path / "one") == kept
    value_of(partial(_load, keep_latest_k=keep), tmp_path / "two", url)  # has 30 alone
    value_of(partial(_save, keep_latest_k=keep), tmp_path / "two", url, 40)
    assert names(store) == {f"step-{step}" for step in (10, 20, 30, 40)[-keep:]}


def remote_of(folder: Path, url: str, **config: Any) -> Remote:
    return Remote(folder, Checkpoint(enable=True, remote=url, **config))


def test_a_store_that_is_killed_in_a_copy_loses_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10, 20)
    url = f"s3://bucket/{tmp_path.name}"
    remote, sent = remote_of(tmp_path, url, remote_timeout_seconds=1), list[str]()
    put = remote.store.put

    def killed_after_one(file: Path, name: str) -> None:
        put(file, name)
        sent.append(name)
        if len(sent) == 1:
            server.stop()

    write = remote.store.write
    monkeypatch.setattr(remote.store, "put", killed_after_one)

    def noted(name: str, raw: bytes) -> None:
        write(name, raw)
        sent.append(name)

    monkeypatch.setattr(remote.store, "write", noted)
    remote.wake()
    try:
        wait_until(lambda: remote._failures > 0)
        started = time.monotonic()
        remote.finish()
        assert time.monotonic() - started < 5
    finally:
        server.start()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2, said
    assert "not copied; training goes on" in said[0]
    assert "attempts failed; the next start copies what" in said[1]
    remote.seconds = 60
    remote.finish()
    (again,) = capsys.readouterr().out.splitlines()
    assert "answers again after" in again
    copies, torn = remote.offered()
    assert ([copy.step for copy in copies], torn) == ([10, 20], [])
    assert len(sent) == len({*sent}) == 2 * 4  # what had arrived was not sent twice
    assert [at for at, name in enumerate(sent) if name.endswith("manifest.json")] == [3, 7]  # after all files
    for copy in copies:
        for name in copy.files:
            assert remote.store.read(f"step-{copy.step}/{name}") == (copy.folder / name).read_bytes()


def fail_after(remote: Remote, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store take this many files more."""
    put, left = remote.store.put, iter(range(count))

    def failing(file: Path, name: str) -> None:
        if next(left, None) is None:
            raise OSError(28, "the bucket is full", name)
        put(file, name)

    monkeypatch.setattr(remote.store, "put", failing)


def test_nothing_is_removed_before_newer_copies_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, store = store_of(tmp_path)
    remote = remote_of(saved(tmp_path / "one", 10), url, keep_latest_k=1)
    assert remote.sync()
    saved(tmp_path / "one", 20)
    fail_after(remote, 1, monkeypatch)
    with pytest.raises(OSError, match="the bucket is full"):
        remote.sync()
    assert [copy.step for copy in remote.offered()[0]] == [10]
    assert not remote.held  # a store that takes nothing does not fill the disk
    monkeypatch.undo()
    assert remote.sync()
    assert names(store) == {"step-20"}


def test_a_copy_that_is_being_replaced_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = store_of(tmp_path)
    assert remote_of(saved(tmp_path / "one", 20), url).sync()
    remote = remote_of(saved(tmp_path / "two", 20, world=2), url)
    fail_after(remote, 1, monkeypatch)
    with pytest.raises(OSError, match="the bucket is full"):
        remote.sync()
    assert remote.offered() == ([], [])


def test_what_a_broken_copy_or_removal_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, store = store_of(tmp_path)
    remote = remote_of(saved(tmp_path / "one", 10), url, keep_latest_k=1)
    assert remote.sync()
    saved(tmp_path / "one", 20)
    remove = remote.store.remove

    def lost(*files: str) -> None:
        remove(files[0])  # the manifest
        raise OSError(5, "the connection is lost", url)

    monkeypatch.setattr(remote.store, "remove", lost)
    with pytest.raises(OSError, match="the connection is lost"):
        remote.sync()
    monkeypatch.undo()
    for name in ("step-15", "step-90", "other"):  # another machine may be about to finish 90
        (store / name).mkdir()
        (store / name / "__0_0.distcp").write_text("left by an upload that was killed")
    assert remote.sync()
    assert names(store) == {"step-20", "step-90", "other"}


def test_copies_are_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, the requests for hundreds of copies would outlast the time to answer."""
    url, _ = store_of(tmp_path)
    assert remote_of(saved(tmp_path / "one", 10, 20), url).sync()
    remote = remote_of(tmp_path / "two", url)
    read, both = remote.store.read, threading.Barrier(2, timeout=5)

    def waits_for_another(name: str) -> bytes:
        both.wait()
        return read(name)

    monkeypatch.setattr(remote.store, "read", waits_for_another)
    assert [copy.step for copy in remote.offered()[0]] == [10, 20]


def test_a_copy_counts_again_once_it_is_repaired(url: str, tmp_path: Path) -> None:
    """The manifest that is written again has the ETag of before."""
    assert remote_of(saved(tmp_path / "one", 10), url).sync()
    Store(url).write("step-10/state.json", (tmp_path / "one/step-10/state.json").read_bytes().replace(b"10", b"11"))
    remote = remote_of(tmp_path / "one", url)
    assert remote.offered()[0] == []
    assert remote.sync()
    assert [copy.step for copy in remote.offered()[0]] == [10]


def test_the_next_start_copies_what_the_store_lacks(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    saved(tmp_path / "one", 10, 20)
    (store / "step-20").mkdir(parents=True)
    (store / "step-20/__9_9.distcp").write_text("left by an upload that was killed")

    for how in (None, "a file is short", "no manifest", "another state"):
        if how:
            TORN[how](store / "step-20")
        assert value_of(_load_and_close, tmp_path / "one", url) == 20
        for file in (tmp_path / "one").glob("step-*/*"):
            assert (store / file.relative_to(tmp_path / "one")).read_bytes() == file.read_bytes()
        assert names(store / "step-20") == names(tmp_path / "one/step-20")


def _load_and_close(folder: Path, url: str) -> int:
    loader = checkpointer(folder, 99, remote=url)
    state = loader.load()
    loader.close()
    assert state
    return state["step"]


def test_a_store_that_is_down_at_the_start(tmp_path: Path) -> None:
    (outcome,) = run(_load_from_nowhere, tmp_path / "one")
    assert "the run may have been saved there, and no checkpoint is here" in outcome.error
    saved(tmp_path / "one", 10)
    (outcome,) = run(_load_from_nowhere, tmp_path / "one")
    assert outcome.value == 10, outcome
    assert "are taken" in outcome.printed


def _load_from_nowhere(folder: Path) -> int | None:
    os.environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    s3fs.S3FileSystem.retries = 1
    fsspec.config.conf["s3"] = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    return _load(folder, "s3://bucket/run")


def test_a_checkpoint_is_not_pruned_while_it_is_copied(tmp_path: Path) -> None:
    url, _store = store_of(tmp_path)
    value_of(_save_while_sending, tmp_path / "one", url)
    assert names(tmp_path / "one") == {"step-10", "step-30"}
    value_of(_save_while_sending, tmp_path / "two", url, 1, 2, 3, 4, 5)
    assert names(tmp_path / "two") == {"step-3", "step-4", "step-5", "step-30"}  # not without bound


def _save_while_sending(folder: Path, url: str, *begun: int) -> None:
    save(folder, *(begun or (10,)))
    for step in (20, 30):
        saver = checkpointer(folder, step, keep_latest_k=1, remote=url)
        assert saver.remote
        saver.remote.held |= {folder / f"step-{each}" for each in begun or (10,)}
        vars(saver.remote)["wake"] = lambda: None
        saver.save(step, {"sequences": step * 7})


def test_another_branch_replaces_a_copy(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20, 30)
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    value_of(_branch, tmp_path / "one", url)
    states = {name: json.loads((store / name / "state.json").read_text())["branch"]["number"] for name in names(store)}
    assert states == {"step-10": 0, "step-20": 1, "step-30": 0}  # 30 is abandoned
    assert value_of(_load, tmp_path / "two", url) == 20
    assert value_of(_load, tmp_path / "one", url) == 20
    assert value_of(_load, tmp_path / "three", url) == 20
    assert "abandoned-step-20" in names(tmp_path / "three")  # its own save of that step is kept


def _branch(folder: Path, url: str) -> None:
    """Go back to step 10 and save step 20 again."""
    saver = checkpointer(folder, 20, remote=url, load_step=10)
    saver.load()
    model, saver.optimizer = small(20)
    saver.stages = [model]
    saver.save(20, {"sequences": 140})
    saver.close()


def test_an_abandoned_copy_is_not_taken(tmp_path: Path) -> None:
    url, _ = store_of(tmp_path)
    value_of(_save, tmp_path / "one", url, 10, 20)
    (tmp_path / "one/step-20").rename(tmp_path / "one/abandoned-step-20")
    assert value_of(_load, tmp_path / "one", url) == 10


# --------------------------------------------------------------------------------------------- nodes apart


def _own(folders: list[Path]) -> Path:
    os.environ["LOCAL_RANK"] = "0"
    files.WAITS_SECONDS.clear()  # for a file that is late on a shared file system
    folders[dist.get_rank()].mkdir(exist_ok=True)
    os.chdir(folders[dist.get_rank()])  # so that the folder of each node has the same name
    return Path("checkpoint")


def _save_apart(folders: list[Path], url: str, *steps: int, **config: Any) -> None:
    _save(_own(folders), url, *steps, **config)


def _load_apart(folders: list[Path], url: str, **config: Any) -> int | None:
    return _load(_own(folders), url, **config)


def nodes_of(tmp_path: Path, count: int) -> tuple[list[Path], list[Path]]:
    """The folders of nodes, and of their checkpoints."""
    nodes = [tmp_path / f"node {number}" for number in range(count)]
    return nodes, [node / "checkpoint" for node in nodes]


def test_nodes_without_a_shared_folder_resume(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    nodes, there = nodes_of(tmp_path, 3)
    value_of(partial(_save_apart, keep_latest_k=2), nodes[:2], url, 10, 20, 30, world=2)
    assert names(there[0]) == names(there[1]) == names(store) == {"step-20", "step-30"}
    assert "__1_0.distcp" not in names(there[0] / "step-30")
    assert "__0_0.distcp" not in names(there[1] / "step-30")
    assert {"__0_0.distcp", "__1_0.distcp", "manifest.json"} < names(store / "step-30")
    shutil.rmtree(nodes[1])  # a node is lost, and another comes; then a third, and then one node is left
    assert value_of(_load_apart, [nodes[0], nodes[2]], url, world=2) == 30
    assert names(there[0] / "step-30") == names(there[2] / "step-30")
    assert value_of(_load_apart, nodes, url, world=3) == 30
    assert value_of(_load, tmp_path / "new", url) == 30


def test_a_start_first_copies_what_each_node_has(tmp_path: Path) -> None:
    url, _ = store_of(tmp_path)
    nodes, _ = nodes_of(tmp_path, 2)
    value_of(_save_apart, nodes, url, 10, world=2)
    value_of(_save_apart, nodes, f"file://{tmp_path}/elsewhere", 20, world=2)
    assert value_of(_load_apart, nodes, url, world=2) == 20


def test_a_checkpoint_whose_node_is_lost_is_not_taken(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    nodes, there = nodes_of(tmp_path, 2)
    value_of(_save_apart, nodes, url, 10, world=2)
    value_of(_save_apart, nodes, f"file://{tmp_path}/elsewhere", 20, world=2)
    shutil.rmtree(there[1] / "step-20")
    assert value_of(_load_apart, nodes, url, world=2) == 10
    assert not (store / "step-20/manifest.json").exists()
    assert names(there[0]) == {"step-10", "abandoned-step-20"}


def test_a_copy_that_lacks_a_lost_nodes_files_replaces_nothing(tmp_path: Path) -> None:
    """After the loss of the third node, the two that are left have confirmed all that they have."""
    url, store = store_of(tmp_path)
    nodes, _ = nodes_of(tmp_path, 3)
    value_of(partial(_save_apart, keep_latest_k=1), nodes, url, 10, world=3)
    value_of(_save_apart, nodes, f"file://{tmp_path}/elsewhere", 20, world=3)
    assert value_of(partial(_load_apart, keep_latest_k=1), nodes[:2], url, world=2) == 10
    assert not (store / "step-20/manifest.json").exists()


def test_nodes_with_parts_that_are_whole_nowhere_do_not_begin_anew(tmp_path: Path) -> None:
    url, _ = store_of(tmp_path)
    nodes, there = nodes_of(tmp_path, 2)
    value_of(_save_apart, nodes, f"file://{tmp_path}/elsewhere", 10, world=2)
    shutil.rmtree(there[1])
    (outcome, _) = run(_load_apart, nodes, url, world=2)
    assert "of the checkpoints there none can be continued" in outcome.error


def test_nodes_that_only_load_leave_the_store_as_it_is(tmp_path: Path) -> None:
    url, store = store_of(tmp_path)
    nodes, _ = nodes_of(tmp_path, 2)
    value_of(_save_apart, nodes, url, 10, world=2)
    value_of(_save_apart, nodes, f"file://{tmp_path}/elsewhere", 20, world=2)
    assert value_of(partial(_load_apart, load_only=True, keep_latest_k=1), nodes, url, world=2) == 10
    assert names(store) == {"step-10"}


def test_a_slow_node_gets_its_copies_whole(tmp_path: Path) -> None:
    """Node 0 keeps a checkpoint whose files node 1 is still copying, beyond keep_latest_k."""
    url, store = store_of(tmp_path)
    nodes, there = nodes_of(tmp_path, 2)
    value_of(_save_while_node_1_is_slow, nodes, url, world=2)
    assert names(there[0]) == {"step-10", "step-20"}
    whole = {step: (store / step / "manifest.json").exists() for step in names(store)}
    assert whole == {"step-5": True, "step-10": True, "step-20": False}


def _save_while_node_1_is_slow(nodes: list[Path], url: str) -> None:
    folder, first = _own(nodes), dist.get_rank() == 0
    saver = checkpointer(folder, 0, remote=url, keep_latest_k=1)
    remote = saver.remote
    assert remote
    vars(remote)["wake"] = lambda: None  # the passes are made here
    saver.save(5, {})
    for node in (False, True):
        if first == node:
            assert remote.sync()
        dist.barrier()
    saver.save(10, {})
    if first:
        assert not remote.sync()  # waits for node 1
    else:
        remote.held.add(folder / "step-10")  # has begun
    saver.save(20, {})
    if not first:
        (folder / "step-20").rename(folder / "later")  # has not begun
        remote.sync()
    dist.barrier()
    if first:
        assert not remote.sync()


# --------------------------------------------------------------------------------------------- check


def checked(*words: str) -> check.Job:
    argv = [*SMALL, *words]
    config = load_config(argv)
    return check.Job(config, read_settings(config, {"NGPU": "1"}))


def test_check_tries_the_store(server: Server, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    words = ("--checkpoint.enable", "--checkpoint.remote")
    fill(url, {"step-10/manifest.json": "{}"})
    assert check.storage(checked(*words, url)) == f"1 checkpoints in {url}; a small file was written there"
    assert [*Store(url).files()] == ["step-10/manifest.json"]
    assert check.storage(checked()) == "no store"
    with pytest.raises(ConfigError, match=r'checkpoint\.remote = "s3://no-such-bucket/x": '):
        check.storage(checked(*words, "s3://no-such-bucket/x"))
    fill(f"{url}/texts", TEXTS)
    said = check.data(checked("--training.dataset_path", f"{url}/texts", "--validation.no_enable"))
    assert said == f"the start copies 3 files, 0.000 GiB of {url}/texts"
