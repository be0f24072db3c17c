"""Golden curves: what a recipe's run was when its curve was last looked at, kept in assets/golden/."""

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from components.config import ROOT, JobConfig, load_config, to_dict
from tests.convergence.sides import SERIES, Curve, Side
from tests.convergence.verdict import Floor

FOLDER = ROOT / "assets" / "golden"
_RUN = ("model", "optimizer", "lr_scheduler", "training", "quantize", "debug")
"""Tables that decide the run."""
_NOT_THE_RUN = {
    *("local_batch_size", "dataloader", "enable_cpu_offload", "gc_freq", "dataset_cache", "dataset_streaming"),
    *("implementation", "attention_kernel", "hf_assets_path", "max_nonfinite_steps", "check_replicas_freq"),
    "state_offload",
}
"""Keys of them that do not."""


def path_of(recipe: Path, steps: int) -> Path:
    return FOLDER / f"{recipe.stem}-{steps}.json"


def what_decides(side: Side, steps: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """The settings that decide which run it is, by key."""
    return _decisive(side.config(steps, settings))


def _decisive(config: JobConfig) -> dict[str, Any]:
    tables = json.loads(json.dumps(to_dict(config)))
    return {
        f"{table}.{key}": value for table in _RUN for key, value in tables[table].items() if key not in _NOT_THE_RUN
    }


@dataclass(frozen=True)
class Golden:
    """A golden curve, the noise floor of the machine that made it, and the settings that decided it."""

    curve: Curve
    floor: Floor
    run: dict[str, Any]


def write(
    path: Path, side: Side, steps: int, settings: tuple[str, ...], curve: Curve, floor: Floor, command: str
) -> None:
    """Keep this curve, with how it was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    git = curve.about["git"]
    made = {
        "command": command,
        "date": date.today().isoformat(),
        "revision": git["revision"] + (" and changes" if git["dirty"] else "") if git["revision"] else None,
        "device": curve.about["device"],
        "versions": curve.about["versions"],
    }
    parts: dict[str, Any] = {"made": made, "settings": list(settings), "run": what_decides(side, steps, settings)}
    parts |= {name: getattr(curve, name) for name in SERIES}
    parts |= {f"{name}_floor": [float(f"{value:.2e}") for value in floor[name]] for name in SERIES}
    # A line for each part: short, and a changed curve is a changed line.
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def read(path: Path, settings: tuple[str, ...]) -> Golden | None:
    """The golden curve; None if there is none, or none with these settings."""
    if not path.exists():
        return None
    parts = json.loads(path.read_text(encoding="utf-8"))
    if parts["settings"] != list(settings):
        return None
    curve = Curve("golden", **{name: parts[name] for name in SERIES}, about=parts["made"])
    # A key that there was not yet had its default.
    run = _decisive(load_config([])) | parts["run"]
    return Golden(curve, {name: parts[f"{name}_floor"] for name in SERIES}, run)


def changes(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What decides the run and is not as it was, a sentence each."""
    keys = dict.fromkeys([*was, *now])
    return [
        f"{key} was {was.get(key, 'not there')}, is {now.get(key, 'not there')}"
        for key in keys
        if was.get(key) != now.get(key)
    ]
