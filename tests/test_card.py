"""The model card of an export: its facts, its recipe, and what it keeps to itself."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from components.config import ROOT, absolute_tables, by_key, load_config
from components.config.keys import FIELDS
from components.config.load import is_path
from components.data.hub import FETCHED
from components.state.adapters import try_card
from components.state.card import base_model, recipe, write_card
from tests.jobs import job

COMMIT = "c0ffee" + "0" * 34
ROWS: list[dict[str, Any]] = [
    {"step": 10, "loss": 8.25, "tokens": 20_000},
    {"step": 20, "loss": 7.5, "tokens": 40_000},
    {"step": 20, "validation_loss": 7.75, "validation_tokens": 99},
    {"step": 30, "loss": 1.0, "tokens": 60_000},
]
ABOUT = {
    "layout": "dp 2 · tp 2",
    "ranks": 4,
    "device": "H100",
    "versions": {"torch": "2.13.0"},
    "git": {"revision": "abcdef", "dirty": True},
}


def run_of(folder: Path, rows: list[dict[str, Any]] = ROWS, about: dict[str, Any] = ABOUT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def card_of(folder: Path, *words: str, step: int = 20) -> ModelCard:
    (folder / "export").mkdir(exist_ok=True)
    write_card(folder / "export", run_of(folder / "a run"), step, absolute_tables(load_config([*words])))
    return ModelCard.load(folder / "export/README.md")


def test_a_card_tells_how_its_weights_were_made(tmp_path: Path) -> None:
    """The numbers are those of the exported step, not of later ones."""
    base = tmp_path / "models--org--base/snapshots" / COMMIT
    base.mkdir(parents=True)
    words = ["--job.config_file", str(ROOT / "recipes/llama_debug.toml"), "--job.description", "Bible\n| x"]
    words += ["--checkpoint.initial_load_path", str(base), "--checkpoint.initial_load_in_hf"]
    card = card_of(tmp_path, *words)
    metadata = card.data.to_dict()
    assert metadata == {
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["meshwright"],
    }
    for line in (
        *("# llama debug", "Bible | x", f"| started from | org/base at {COMMIT} |", "| steps | 20 |"),
        *("| tokens with labels | 40,000 |", "| training loss | 7.5000 nats a token, at step 20 |"),
        *("| validation loss | 7.7500, at step 20 |", "| layout | dp 2 · tp 2, ranks: 4 |"),
        "| revision of Meshwright | abcdef, with changes |",
    ):
        assert line in card.text.splitlines()
    pairs = card_of(tmp_path, *words, "--training.dataset_format", "preference", "--training.dataset_path", ".")
    assert "| training loss | 7.5000 a pair, at step 20 |" in pairs.text.splitlines()
    assert "`license:`" in card.text
    assert str(tmp_path) not in card.content
    assert "![Loss by step](loss.png)" in card.text
    assert (tmp_path / "export/loss.png").read_bytes().startswith(b"\x89PNG")


def test_adapters_and_hub_datasets_are_told(tmp_path: Path) -> None:
    metadata = card_of(tmp_path, "--lora.rank", "4", "--training.dataset", "org/books:en@main").data.to_dict()
    assert metadata["library_name"] == "peft"
    assert metadata["datasets"] == ["org/books"]
    assert "base_model" not in metadata


def test_a_card_of_a_run_that_logged_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_card(tmp_path, tmp_path / "run", 5, absolute_tables(load_config([])))
    text = (tmp_path / "README.md").read_text()
    assert "| steps | 5 |" in text
    assert not any(word in text for word in ("loss", "None", "layout", "revision"))
    assert not (tmp_path / "loss.png").exists()


def test_a_card_that_cannot_be_written_is_only_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try_card(tmp_path / "none", run_of(tmp_path / "run"), Path("step-20"), absolute_tables(load_config([])))
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'none'}: no model card: ")
    assert said.count("\n") == 1


RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", [*RECIPES, None], ids=lambda path: path.stem if path else "odd")
def test_the_recipe_of_a_card_is_the_job(path: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded from the card, the job has the values of every key but those of paths elsewhere."""
    monkeypatch.chdir(ROOT)
    config = load_config(["--job.config_file", str(path)] if path else ["--job.description", 'é "quoted" \\ $x 😀'])
    text = recipe(absolute_tables(config))
    again = load_config(["--job.config_file", str(job(tmp_path, text))])
    keys = {key for key in FIELDS if not is_path(FIELDS[key])}
    there, here = (dict(by_key(absolute_tables(each))) for each in (again, config))
    assert {key: there[key] for key in keys & there.keys()} == {key: here[key] for key in keys & here.keys()}
    assert tomllib.loads(text).get("job", {}).keys() <= {"description", "print_config"}


def test_paths_are_cut_and_mixtures_are_whole(tmp_path: Path) -> None:
    words = [
        *("--training.mixture[1].name", "a", "--training.mixture[1].dataset_path", "/home/ann/secret/a.jsonl"),
        *("--training.mixture[1].weight", "1", "--training.mixture[2].name", "b", "--training.mixture[2].weight", "0"),
        *("--training.mixture[2].dataset_path", "b", "--training.mixture_phase[1].from_sequence", "9"),
        *("--training.mixture_phase[1].weights", "{a = 0.3, b = 0.7}", "--training.dataset_cache", "/home/ann/cache"),
        *("--model.hf_assets_path", str(ROOT / "assets/tokenizer/tokenizer.model")),
    ]
    text = recipe(absolute_tables(load_config(words)))
    assert "ann" not in text
    tables = tomllib.loads(text)
    assert [source["dataset_path"] for source in tables["training"]["mixture"]] == ["a.jsonl", "b"]
    assert tables["training"]["mixture_phase"] == [{"from_sequence": 9, "weights": {"a": 0.3, "b": 0.7}}]
    assert tables["model"]["hf_assets_path"] == "assets/tokenizer/tokenizer.model"


def test_the_repository_of_a_base_is_known_from_the_hubs_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(folder: Path) -> tuple[str, str]:
        return base_model({"checkpoint": {"initial_load_path": str(folder)}})

    assert found(tmp_path) == ("", "")
    note = tmp_path / FETCHED
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"repository": "org/name", "revision": COMMIT}))
    assert found(tmp_path) == ("org/name", COMMIT)
    monkeypatch.chdir(tmp_path)
    assert base_model({"checkpoint": {"initial_load_path": None}}) == ("", "")
    for wrong in ("[1]", "{", '{"repository": "a b"}', '{"repository": 7}'):
        note.write_text(wrong)
        assert found(tmp_path) == ("", "")
    assert found(tmp_path / "models--gpt2/snapshots" / COMMIT) == ("", "")
    assert base_model({"checkpoint": {}}) == ("", "")
