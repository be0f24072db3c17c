"""Rules, which are rows of tables of refusals, and the mistakes of a job that breaks rules."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from components.config.keys import ConfigError, show
from components.config.tables import JobConfig


@dataclass(frozen=True)
class Rule:
    """A row of a table of what is refused. docs/refusals.md shows each row."""

    key: str
    """The key that a mistake names."""
    misfit: Callable[..., str | bool]
    """(job, facts of the table) -> the reason for a refusal, with a remedy; a false value if the job is accepted."""
    why: str = ""
    """Why the setting cannot work, or what its support would need; empty if the reason already says so."""


def broken_rules(rules: Iterable[Rule], config: JobConfig, *facts: Any) -> list[str]:
    """A mistake for each rule that the job breaks."""
    return [mistake(config, rule.key, str(reason)) for rule in rules if (reason := rule.misfit(config, *facts))]


def check_rules(rules: Iterable[Rule], config: JobConfig, *facts: Any) -> None:
    """Raises ConfigError with every rule that the job breaks."""
    if mistakes := broken_rules(rules, config, *facts):
        raise ConfigError(mistakes)


def mistake(config: JobConfig, key: str, reason: str) -> str:
    """A message of a ConfigError: where the key was set, its value, the reason."""
    origins = (origin for name, origin in config.origins.items() if name == key or name.startswith(f"{key}["))
    return f"{next(origins, 'default')}: {key} = {show(value_of(config, key))}: {reason}"


def value_of(config: JobConfig, key: str) -> Any:
    """The value of a key, or a table. A key of an array of tables has an index: training.mixture[1].name."""

    def inside(table: Any, name: str) -> Any:
        found = re.fullmatch(r"(\w+)\[(\d+)\]", name)
        if isinstance(table, Mapping):
            return table.get(name)
        return getattr(table, found[1])[int(found[2]) - 1] if found else getattr(table, name)

    return functools.reduce(inside, key.split("."), config)
