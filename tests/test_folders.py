"""Folders of transformers as models: some draws of tests/folders.py, in kept ranks and through the launcher."""

import functools
from pathlib import Path

import pytest

from components.config import ConfigError, load_config
from parallelize.rules.chosen import resolved

transformers = pytest.importorskip("transformers")

from tests import folders  # noqa: E402
from tests.harness import observe  # noqa: E402

first_batch = functools.cache(folders.first_batch)


@pytest.mark.parametrize("kind", folders.DRAWS)
def test_a_folder_trains_as_in_transformers_or_its_field_is_named(kind: str, tmp_path: Path) -> None:
    """The first draws until one trains."""
    folder, number, reason = tmp_path / "number 0", 0, _refusal(kind, 0, tmp_path)
    while reason:
        assert folders.fields_of(reason, folder)
        number += 1
        folder, reason = tmp_path / f"number {number}", _refusal(kind, number, tmp_path)
    start = ("--model.flavor", str(folder), "--checkpoint.initial_load_in_hf", "true")
    observed = observe(*start, steps=1, folder=str(tmp_path / "run"))
    assert folders.difference(observed.losses[0], observed.norms[0][0], folder, first_batch()) <= folders.LIMIT


def _refusal(kind: str, number: int, at: Path) -> str:
    """Makes the folder of a draw; returns why no family has its model, or an empty string."""
    folders.make(folders.draw(kind, number), at / f"number {number}")
    try:
        resolved(load_config(["--model.flavor", str(at / f"number {number}")]))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_command_tells_a_refusal_from_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the launcher: a folder with a field that no family has; one whose numbers are not within the limit."""
    capped = folders.draw("gemma3_text", 1)
    capped.fields["final_logit_softcapping"] = 30.0
    assert folders.compare(capped, first_batch(), tmp_path) == ("refused", 0.0, "final_logit_softcapping")
    monkeypatch.setattr(folders, "LIMIT", 0.0)
    assert folders.main(["--draws", "1", "--seed", "1", "--kind", "mistral"]) == 1
    assert "mistral 1: failed" in capsys.readouterr().out
