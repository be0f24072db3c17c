"""Checkpoints from a stranger: nothing in them runs, and nothing outside the folder is read."""

import copyreg
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from components.config import Checkpoint, ConfigError
from components.state import checkpoint
from components.state.checkpoint import Checkpointer
from tests.checkpoints import checkpointer, resign, saved, small, value_of


class _Payload:
    """Loading its pickle makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return (os.mkdir, (str(self.mark),))


Change = Callable[[Metadata, Path], Any]


def _metadata(change: Change) -> Callable[[Path, Path], None]:
    """A checkpoint whose table of contents is changed, with a manifest that fits."""

    def make(folder: Path, mark: Path) -> None:
        table = pickle.loads((folder / ".metadata").read_bytes())
        changed = change(table, mark)
        (folder / ".metadata").write_bytes(pickle.dumps(table if changed is None else changed))
        resign(folder)

    return make


def _places(attribute: str, value: Any) -> Callable[[Path, Path], None]:
    def change(table: Metadata, mark: Path) -> None:
        place = next(iter(table.storage_data.values()))
        setattr(place, attribute, value(mark) if callable(value) else value)

    return _metadata(change)


def _planner_data(table: Metadata, mark: Path) -> None:
    table.planner_data = {"model.0.weight": _Payload(mark)}


def _part_missing(table: Metadata, mark: Path) -> None:
    entry: Any = table.state_dict_metadata["model.0.weight"]
    entry.chunks[0].sizes = torch.Size([4, 6])


def _part_outside(table: Metadata, mark: Path) -> None:
    entry: Any = table.state_dict_metadata["model.0.weight"]
    entry.chunks[0].offsets = torch.Size([1, 0])


def _negative_size(table: Metadata, mark: Path) -> None:
    entry: Any = table.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([5, 6, -1])


def _class_of_torch_changed(folder: Path, mark: Path) -> None:
    """BUILD with attributes for a class, not an instance: in torch's own unpickler every later table has them."""
    attributes = pickle.dumps((None, {"version": "changed"}), 2)[2:-1]
    raw = b"\x80\x02c" + Metadata.__module__.encode() + b"\nMetadata\n" + attributes + b"b."
    (folder / ".metadata").write_bytes(raw)
    resign(folder)


def _extension(folder: Path, mark: Path) -> None:
    """A class by its number in copyreg's registry."""
    copyreg.add_extension("os", "mkdir", 77)
    (folder / ".metadata").write_bytes(b"\x80\x02\x82\x4dX" + _length(mark) + b"\x85R.")
    resign(folder)


def _length(mark: Path) -> bytes:
    return len(str(mark)).to_bytes(4, "little") + str(mark).encode()


def _dotted(folder: Path, mark: Path) -> None:
    """A name with a dot in it, for what an allowed class can reach."""
    module, name = b"torch.distributed.checkpoint.metadata", b"os.mkdir"
    strings = b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name))
    (folder / ".metadata").write_bytes(b"\x80\x04" + strings + b"\x93X" + _length(mark) + b"\x85R.")
    resign(folder)


def _bytes_entry(folder: Path, mark: Path) -> None:
    model, _ = small(10)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    dcp.save({**tensors, "model.0.weight": _Payload(mark)}, storage_writer=checkpoint._Writer(folder))
    resign(folder)


def _tensor_file(folder: Path, mark: Path) -> None:
    write = torch.save

    def write_payload(tensor: Tensor, file: Any) -> None:
        write(_Payload(mark), file)

    filesystem.torch.save = write_payload  # type: ignore[assignment]
    model, optimizer = small(10)
    dcp.save(Checkpointer(folder, Checkpoint(), [model], optimizer)._tensors(True), checkpoint_id=folder)
    filesystem.torch.save = write
    resign(folder)


def _manifest(name: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    """A manifest that lists a file elsewhere, with its true size and hash."""

    def make(folder: Path, mark: Path) -> None:
        files = json.loads((folder / "manifest.json").read_text())
        secret = mark.with_name("secret")
        files[name(secret)] = checkpoint.digest(secret)
        (folder / "manifest.json").write_text(json.dumps(files))

    return make


def _unlisted_shard(folder: Path, mark: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())
    del files["__0_0.distcp"]
    (folder / "manifest.json").write_text(json.dumps(files))


def _link(name: str, relative: bool) -> Callable[[Path, Path], None]:
    def make(folder: Path, mark: Path) -> None:
        elsewhere = mark.with_name("elsewhere")
        shutil.move(folder / name, elsewhere)
        target = os.path.relpath(elsewhere, folder) if relative else elsewhere
        (folder / name).symlink_to(target)

    return make


def _folder_is_a_link(folder: Path, mark: Path) -> None:
    shutil.move(folder, mark.with_name("elsewhere"))
    folder.symlink_to(mark.with_name("elsewhere"))


def _pipe(folder: Path, mark: Path) -> None:
    os.mkfifo(folder / "pipe")
    files = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**files, "pipe": [0, ""]}))


def _nested_manifest(folder: Path, mark: Path) -> None:
    (folder / "manifest.json").write_text('{"a": ' + "[" * 100_000)


_ASKS = f"its .metadata asks for {os.mkdir.__module__}.mkdir"
_NO_TABLE = "its .metadata is no table of contents"
FORMS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "payload for metadata": (_metadata(lambda _, mark: _Payload(mark)), _ASKS),
    "payload inside metadata": (_metadata(_planner_data), _ASKS),
    "payload for a path": (_places("relative_path", _Payload), _ASKS),
    "payload by number": (_extension, "its .metadata asks for os.mkdir"),
    "payload by a dotted name": (_dotted, "metadata.os.mkdir"),
    "class of torch changed": (_class_of_torch_changed, _NO_TABLE),
    "object instead of a tensor": (_bytes_entry, "model.0.weight is no tensor there"),
    "payload for a tensor": (_tensor_file, "Weights only load failed"),
    "absolute path in metadata": (_places("relative_path", lambda mark: str(mark.with_name("secret"))), "not the name"),
    "path upwards in metadata": (_places("relative_path", "../secret"), "'../secret' is not the name of a file in it"),
    "path down and up": (_places("relative_path", "a/../../secret"), "is not the name of a file in it"),
    "the folder itself": (_places("relative_path", ".."), "'..' is not the name of a file in it"),
    "NUL in a path": (_places("relative_path", "a\0b"), "is not the name of a file in it"),
    "compressed by an extension": (_places("transform_descriptors", ["rot13"]), "compressed tensors are not read"),
    "negative offset": (_places("offset", -1), "-1 is not a size"),
    "negative size": (_metadata(_negative_size), "-1 is not a size"),
    "part of a tensor missing": (_metadata(_part_missing), "the parts of a tensor are not the whole of it"),
    "part outside of its tensor": (_metadata(_part_outside), "a part of a tensor is outside of it"),
    "absolute path in the manifest": (_manifest(str), "is not the name of a file in it"),
    "path upwards in the manifest": (_manifest(lambda secret: f"../{secret.name}"), "is not the name of a file in it"),
    "shard that the manifest leaves out": (_unlisted_shard, ".metadata names __0_0.distcp, which manifest.json does"),
    "shard is a link out": (_link("__0_0.distcp", True), "__0_0.distcp is a symbolic link"),
    "metadata is a link out": (_link(".metadata", False), ".metadata is a symbolic link"),
    "state is a link out": (_link("state.json", True), "state.json is a symbolic link"),
    "manifest is a link out": (_link("manifest.json", False), "manifest.json is a symbolic link"),
    "folder is a link out": (_folder_is_a_link, "a symbolic link"),
    "pipe": (_pipe, "pipe is no plain file"),
    "nested manifest": (_nested_manifest, "manifest.json unreadable"),
}


def _load_hostile(folder: Path, mark: Path, form: str, words: dict[str, Any]) -> str:
    """What loading it raised; nothing was made, and no file outside was opened."""
    FORMS[form][0](folder, mark)
    opened: list[str] = []

    def hook(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            opened.append(os.fspath(args[0]))

    sys.addaudithook(hook)
    loader = checkpointer(mark.with_name("run") if words else folder.parent, 99, **words)
    error = ""
    try:
        loader.load_initial() if words else loader.load()
    except ConfigError as failure:
        error = str(failure)
    assert not mark.exists(), "it ran"
    outside = [path for path in opened if Path(path).name in ("secret", "elsewhere")]
    assert not outside, "a file outside the folder was opened"
    assert Metadata.version is None, "a class of torch's was changed"
    pickle.Unpickler(io.BytesIO(pickle.dumps(_Payload(mark)))).load()
    assert mark.exists(), "the payload would have worked"
    return error


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("honest"), 10) / "step-10"


@pytest.mark.parametrize("form", FORMS)
def test_a_hostile_checkpoint_is_refused_and_nothing_runs(tmp_path: Path, honest: Path, form: str) -> None:
    folder = tmp_path / "stranger" / "step-10"
    shutil.copytree(honest, folder)
    (tmp_path / "secret").write_text("of this machine")
    # Every second one as the checkpoint that a run starts from, the others in the run's own folder.
    words = {"initial_load_path": str(folder.parent)} if [*FORMS].index(form) % 2 else {}
    error = value_of(_load_hostile, folder, tmp_path / "mark", form, words)
    assert FORMS[form][1] in error
    assert str(folder) in error
