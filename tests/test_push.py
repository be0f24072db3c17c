"""Uploads to the Hugging Face hub: what arrives, what is refused before a run, and what a failure leaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hf_xet
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils._xet import get_xet_session
from safetensors.torch import save_file

from components.commands.check import CHECKS, Job, upload
from components.commands.start import check_job, check_upload
from components.config import ROOT, ConfigError, load_config
from components.config.bounds import PathError, hub_repository
from components.launch.settings import Settings
from components.state.push import check_push, push, push_last
from tests.hub_uploads import Uploads, taking_uploads

Hub = tuple[Path, type[Uploads]]
NOWHERE = "http://127.0.0.1:9"
ALONE = """
import sys
from pathlib import Path
from components.state.push import push
push(Path(sys.argv[1]), "org/model", True)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The folder of its models, and its state. Large files arrive by Git LFS."""
    with taking_uploads(tmp_path / "hub") as (address, state):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield tmp_path / "hub/models", state


def exported(folder: Path, *files: str) -> Path:
    """A folder that looks like an export; its files of weights are these."""
    folder.mkdir(parents=True)
    for number, name in enumerate(files):
        save_file({name: torch.full((1000,), float(number))}, folder / name)
    (folder / "config.json").write_text(json.dumps({"files": files}))
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model\n")
    (folder / "loss.png").write_bytes(b"\x89PNG" + bytes(1000))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_files_arrive_and_a_second_upload_replaces_them(hub: Hub, tmp_path: Path) -> None:
    models, state = hub
    folder = exported(tmp_path / "a folder", *SHARDS)
    for name in (".cache", "more"):
        (folder / name).mkdir()
    (folder / "model.safetensors.index.json").write_text("{}")
    address = push(folder, "org/model", True)
    assert "/commit/" in address
    assert contents(models / "org/model") == {
        file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()
    }
    assert state.private == {"org/model"}
    (models / "org/model/LICENSE").write_text("a person's")
    again = exported(tmp_path / "again", "model.safetensors")
    push(again, "org/model", True)
    assert contents(models / "org/model") == contents(again) | {"LICENSE": b"a person's"}
    push(again, "org/model", True)  # nothing to do
    assert contents(models / "org/model") == contents(again) | {"LICENSE": b"a person's"}
    push(again, "ann/open", False)
    assert state.private == {"org/model"}


def test_files_arrive_by_xet(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub's own library writes into the store can be read from there."""
    models, state = hub
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    folder = exported(tmp_path / "export", *SHARDS)
    push(folder, "org/model", True)
    assert not state.store
    for name in SHARDS:
        (found,) = hf_xet.hash_files([str(folder / name)])
        info = hf_xet.XetFileInfo(found.hash, (folder / name).stat().st_size)
        with get_xet_session().new_file_download_group(endpoint=f"local://{state.cas}") as group:
            group.start_download_file(info, str(tmp_path / name))
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert (models / "org/model/config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_an_upload_that_is_killed_changes_nothing_and_the_next_one_does(hub: Hub, tmp_path: Path) -> None:
    models, state = hub
    push(exported(tmp_path / "old", "model.safetensors"), "org/model", True)
    before = contents(models / "org/model")
    state.reached.clear()
    state.goes_on.clear()
    folder = exported(tmp_path / "new", *SHARDS)
    more = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-c", ALONE, str(folder)], env={**os.environ, **more}, cwd=tmp_path)
    try:
        assert state.reached.wait(120)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
        state.goes_on.set()
    assert contents(models / "org/model") == before
    push(folder, "org/model", True)
    assert contents(models / "org/model") == contents(folder)


def words(*more: str) -> list[str]:
    return ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--checkpoint.hf_repo", "org/model", *more]


PUBLIC = "--checkpoint.no_hf_repo_private"


@pytest.mark.parametrize(
    ("token", "more", "told"),
    [
        ("hf_write", [], "org/model will be made, private, by ann"),
        ("hf_write", [PUBLIC], "org/model will be made, public, by ann"),
        ("hf_write", ["--checkpoint.hf_repo", "ann/model"], "ann/model will be made, private, by ann"),
        ("hf_fine", [], "org/model will be made, private, by ann"),
        ("hf_write", ["--checkpoint.hf_repo", "org/open", PUBLIC], "org/open is there, and the token may write it"),
        ("hf_read", [], "!the token of ann may only read: make one that may write"),
        ("hf_else", [], "!the token of bob may write to bob"),
        ("hf_wrong", [], "!the token may not write there: "),
        ("", [], "!no token: set HF_TOKEN"),
        ("hf_else", ["--checkpoint.hf_repo", "org/open", PUBLIC], "!the token may not write there: "),
        ("hf_write", ["--checkpoint.hf_repo", "org/open"], "!org/open is public: to upload there, use hf_repo_private"),
        ("hf_write", ["--checkpoint.hf_repo", "org/shut", PUBLIC], "!org/shut is private: to upload there, use"),
        ("hf_else", ["--checkpoint.hf_repo", "org/shut"], "!the token of bob may write to bob"),
    ],
)
def test_the_hub_is_asked_before_a_run(
    hub: Hub, token: str, more: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models, state = hub
    (models / "org/open").mkdir(parents=True)
    (models / "org/shut").mkdir()
    state.private.add("org/shut")
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    config = load_config(words(*more))
    if told.startswith("!"):
        with pytest.raises(ConfigError) as caught:
            check_upload(config)
        (message,) = caught.value.messages
        assert message.startswith("command line: checkpoint.hf_repo = ")
        assert told[1:] in message
        assert "\n" not in message
    else:
        check_upload(config)
        assert upload(Job(config, Settings.__new__(Settings))) == told
    assert {path.name for path in (models / "org").iterdir()} == {"open", "shut"}


def test_the_start_and_the_check_ask(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    with pytest.raises(ConfigError, match="may only read"):
        check_job(words("--job.dump_folder", str(tmp_path)), {"NGPU": "1"})
    assert CHECKS["upload"] is upload


def test_a_run_without_an_upload_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    check_upload(load_config([]))
    assert check_push(load_config([])) == ""


def test_a_hub_that_is_down_is_a_warning_and_a_cross(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    config = load_config(words())
    check_upload(config)
    said = capsys.readouterr().err
    assert said.startswith("warning: org/model: the hub cannot be reached: ")
    assert said.count("\n") == 1
    with pytest.raises(ConfigError, match=r'checkpoint.hf_repo = "org/model": org/model: the hub cannot be reached'):
        upload(Job(config, Settings.__new__(Settings)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids the upload"):
        check_upload(config)


def test_weights_never_go_to_a_repository_that_others_can_read(hub: Hub, tmp_path: Path) -> None:
    models, _ = hub
    (models / "org/open").mkdir(parents=True)
    with pytest.raises(ConfigError, match="org/open is public: to upload there, use hf_repo_private = false"):
        push(exported(tmp_path / "export", "model.safetensors"), "org/open", True)
    assert contents(models / "org/open") == {}


@pytest.mark.parametrize("refused", ["/repos/create", "/preupload/", "/lfs/", "/commit/"])
def test_a_failed_upload_is_told_with_the_command_that_repeats_it(
    hub: Hub, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, state = hub
    folder = exported(tmp_path / "my run", *SHARDS)
    state.refuses.add(refused)
    push_last(folder, "org/model", False)
    begun, failed, command = capsys.readouterr().out.splitlines()
    repeats = f"python -m components.state push '{folder}' org/model --public"
    assert begun == f"uploading {folder} to org/model; if this is interrupted: {repeats}"
    assert failed.startswith("not uploaded: org/model: ")
    assert command == f"The weights are in {folder}. To upload them: {repeats}"
    assert not (models / "org/model").exists() or contents(models / "org/model") == {}
    state.refuses.clear()
    push_last(folder, "org/model", False)
    assert "uploaded: http" in capsys.readouterr().out
    assert contents(models / "org/model") == contents(folder)


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors", "all"])
def test_a_folder_that_is_no_export_is_refused(hub: Hub, lacks: str, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    if lacks != "all":
        (exported(folder, "model.safetensors") / lacks).unlink()
    with pytest.raises(ConfigError, match="no exported weights there"):
        push(folder, "org/model", True)
    assert not hub[0].exists()


def test_names_of_repositories() -> None:
    for name in ("org/name", "a/b", "Org_1/a.b-c_d", "_x/y_", f"o/{'n' * 94}"):
        assert hub_repository(name) == name
    wrong = ["", "name", "a/b/c", "/name", "org/", "org/a b", "org/a--b", "org/a..b", "org/-a", "org/a.", "org/a.git"]
    for name in (*wrong, "org/é", "https://huggingface.co/org/name", "org/name\n", f"o/{'n' * 95}", "../x"):
        with pytest.raises(PathError, match="org/name"):
            hub_repository(name)
