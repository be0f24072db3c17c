"""Job files for tests: every key that there is, here and in torchtitan, and the messages that a mistake gives."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from components.config import ROOT, ConfigError, JobConfig, by_key, load_config, to_dict

OURS = dict(by_key(to_dict(JobConfig())))
"""Key -> default. An array of tables is one key here, and [] by default."""
_TITAN = tomllib.loads((ROOT / "tests/titan_v02_keys.toml").read_text(encoding="utf-8"))
TITAN_UNSET: list[str] = _TITAN.pop("unset")
TITAN = dict(by_key(_TITAN))
KEYS = sorted({*OURS, *TITAN, *TITAN_UNSET})


def job(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(*words: object) -> list[str]:
    """The messages for this command line."""
    with pytest.raises(ConfigError) as caught:
        load_config([str(word) for word in words])
    return caught.value.messages


def as_toml(value: Any) -> str:
    return json.dumps(value)
