"""Rules, which are rows of tables of refusals, and the mistakes of a job that breaks rules."""

import functools
from collections.abc import Callable, Iterable
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
    return f"{config.origins.get(key, 'default')}: {key} = {show(value_of(config, key))}: {reason}"


def value_of(config: JobConfig, key: str) -> Any:
    """The value of a key, or a table."""
    return functools.reduce(getattr, key.split("."), config)
