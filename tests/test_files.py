"""Folders that are written beside their place and published by a rename: complete at any moment, also after a kill."""

from pathlib import Path

import pytest

from components.config import files
from components.config.files import grouped, make_staging, publish, replaced_of, staging_of


def write(path: Path, text: str) -> Path:
    """The folder that was replaced."""
    staging = make_staging(path)
    (staging / "text").write_text(text)
    return publish(staging, path)


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "export"
    assert not write(path, "first").exists()
    replaced = write(path, "second")
    assert (path / "text").read_text() == "second"
    assert (replaced / "text").read_text() == "first"


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "export"
    (make_staging(path) / "half").write_text("")
    assert not [*make_staging(path).iterdir()]


def test_a_folder_whose_writer_was_killed_between_two_renames_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "export"
    write(path, "good")
    path.rename(replaced_of(path))
    make_staging(path)
    assert (path / "text").read_text() == "good"
    assert not replaced_of(path).exists()


def test_files_are_durable_before_they_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "export"
    synced = list[tuple[str, bool]]()
    monkeypatch.setattr(files, "sync", lambda each: synced.append((each.name, path.exists())))
    write(path, "text")
    assert synced == [("text", False), (staging_of(path).name, False), (tmp_path.name, True)]


def test_items_are_grouped_by_size_in_their_order() -> None:
    sized = [("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 5), ("f", 1)]
    assert [*grouped(sized, 6)] == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert [*grouped([], 6)] == []
