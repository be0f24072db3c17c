"""The model card of an export: README.md and loss.png, which tell how the weights were made."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.config import ROOT, absolute_tables, load_config
from components.config.bounds import hub_repository, is_folder, is_url
from components.config.files import read_json_if_whole
from components.config.keys import ARRAYS, FIELDS
from components.config.load import is_path
from components.data.hub import FETCHED
from components.observe.report import draw_loss, read_rows

_CURVE = "loss.png"
_NOT_SHOWN = {"job.config_file", "job.dump_folder"}
"""Keys that say where a run was on its machine."""


def write_card(folder: Path, run: Path, step: int, config: dict[str, Any], averaged: str = "") -> None:
    """Write the card of the weights that a run had after this step into their folder.

    run: the dump_folder, with run.json and metrics.jsonl; the card leaves out what they lack. config: the run's job, as
    in run.json; averaged: how weights of several steps were averaged, in which case the card has no losses, which are
    not theirs. Raises OSError if a file cannot be read or written.
    """
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= step]
    if rows:
        draw_loss(rows, folder / _CURVE, config["job"]["description"])
    facts = {"weights": averaged} | _facts(config, run, rows, step)
    if averaged:
        facts |= {"training loss": "", "validation loss": ""}
    (folder / "README.md").write_text(_card(config, facts, bool(rows)), encoding="utf-8")


def _card(config: dict[str, Any], facts: dict[str, str], curve: bool) -> str:
    from huggingface_hub import ModelCardData

    model, training = config["model"], config["training"]
    adapters = model.get("lora", {}).get("rank", 0) > 0
    base, _ = base_model(config)
    local = training.get("dataset_path") or training.get("mixture")
    data = ModelCardData(
        base_model=base or None,
        base_model_relation=("adapter" if adapters else "finetune") if base else None,
        datasets=[training["dataset"].partition(":")[0]] if not local and "/" in training["dataset"] else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["meshwright"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {model['name']} {Path(model['flavor']).name}{', adapters' if adapters else ''}",
        " ".join(config["job"]["description"].split()),
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value),
        f"![Loss by step]({_CURVE})" if curve else "",
        "## Recipe",
        "Keys of Meshwright's job file that differ from their defaults. A path outside of its repository is cut to the "
        "last name.",
        f"```toml\n{recipe(config)}\n```",
        "## License",
        "Not given yet: add `license:` to the metadata of this file.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(config: dict[str, Any], run: Path, rows: list[dict[str, Any]], step: int) -> dict[str, str]:
    """Name -> value of the card's table; an unknown value is empty."""
    about = read_json_if_whole(run / "run.json")
    git, (base, revision) = about.get("git") or {}, base_model(config)
    trained: dict[str, Any] = next((row for row in reversed(rows) if row.get("loss") is not None), {})
    validated: dict[str, Any] = next((row for row in reversed(rows) if row.get("validation_loss") is not None), {})
    unit = " a pair" if config["training"].get("dataset_format") == "preference" else " nats a token"
    dirty = ", with changes" if git.get("dirty") else ""
    return {
        "started from": f"{base} at {revision}" if revision else base or _shown(_start(config)),
        "steps": f"{step:,}",
        "tokens with labels": f"{trained['tokens']:,}" if "tokens" in trained else "",
        "training loss": f"{trained['loss']:.4f}{unit}, at step {trained['step']:,}" if trained else "",
        "validation loss": f"{validated['validation_loss']:.4f}, at step {validated['step']:,}" if validated else "",
        "layout": f"{about.get('layout', '')}, ranks: {about.get('ranks', '?')}" if about.get("layout") else "",
        "device": str(about.get("device", "")),
        "PyTorch": str((about.get("versions") or {}).get("torch", "")),
        "revision of Meshwright": f"{git['revision']}{dirty}" if git.get("revision") else "",
    }


def _start(config: dict[str, Any]) -> str:
    return config["checkpoint"].get("initial_load_path") or ""


def base_model(config: dict[str, Any]) -> tuple[str, str]:
    """(repository, commit) of the hub from which the folder initial_load_path came; empty strings if unknown."""
    if not _start(config):
        return "", ""
    folder = Path(_start(config))
    note = read_json_if_whole(folder / FETCHED)
    found = str(note.get("repository", "")), str(note.get("revision", ""))
    if folder.parent.name == "snapshots":  # of the hub's cache: models--org--name/snapshots/commit
        found = folder.parents[1].name.removeprefix("models--").replace("--", "/"), folder.name
    with suppress(ValueError):
        return hub_repository(found[0]), found[1]
    return "", ""


def recipe(config: dict[str, Any]) -> str:
    """The keys of a job that differ from their defaults, as TOML."""
    return "\n\n".join(_tables(config, absolute_tables(load_config([]))))


def _tables(table: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the TOML of each table that has a changed key."""
    if lines := _lines(table, defaults, prefix):
        yield "\n".join([f"[{prefix[:-1]}]", *lines])
    for name, value in table.items():
        if f"{prefix}{name}" in ARRAYS:
            yield from ("\n".join([f"[[{prefix}{name}]]", *_lines(each, {}, f"{prefix}{name}.")]) for each in value)
        elif isinstance(value, dict) and f"{prefix}{name}" not in FIELDS:
            yield from _tables(value, defaults.get(name, {}), f"{prefix}{name}.")


def _lines(table: dict[str, Any], defaults: dict[str, Any], prefix: str) -> list[str]:
    known = {name: value for name, value in table.items() if f"{prefix}{name}" in {*FIELDS} - _NOT_SHOWN}
    changed = {name: value for name, value in known.items() if value not in (None, defaults.get(name))}
    if is_folder(changed.get("flavor", "")):  # config.json beside the card has the sizes
        changed["flavor"] = f"./{_shown(changed['flavor'])}"
        changed.pop("sizes", None)
    local = {name for name in changed if is_path(FIELDS[f"{prefix}{name}"])}
    return [f"{name} = {_toml(_shown(value) if name in local else value)}" for name, value in changed.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        given = {name: each for name, each in value.items() if each is not None}
        return f"{{ {', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in given.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def _shown(path: str) -> str:
    """A path inside of the repository, a URL, or the last name of another path, which is nobody else's business."""
    if not path or is_url(path):
        return path
    return str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else Path(path).name
