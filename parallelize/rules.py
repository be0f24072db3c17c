"""The table of layouts that are refused, each with its reason and what would work. Checked before launch."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from components.config import ConfigError, JobConfig, mistake
from parallelize.mesh import Degrees


@dataclass(frozen=True)
class Rule:
    """A layout is refused where `applies`; `reason` says why and what would work, and `key` is what to change."""

    key: str
    applies: Callable[[JobConfig, Degrees], bool]
    reason: Callable[[JobConfig, Degrees], str]


def global_batch_size(config: JobConfig, degrees: Degrees) -> int:
    """Sequences of one optimizer step: as set, or one micro-batch on every batch rank."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    return config.training.local_batch_size * degrees.batch_ranks


def _batch_sizes_that_fit(config: JobConfig, degrees: Degrees) -> str:
    unit = config.training.local_batch_size * degrees.batch_ranks
    below = global_batch_size(config, degrees) // unit * unit
    return " or ".join(str(size) for size in (below, below + unit) if size)


RULES = [
    Rule(
        "parallelism.pipeline_parallel_degree",
        lambda config, degrees: degrees.pp > 1,
        lambda config, degrees: "pipeline parallel is not available yet; set it to 1 and use data parallel",
    ),
    Rule(
        "training.global_batch_size",
        lambda config, degrees: bool(
            global_batch_size(config, degrees) % (config.training.local_batch_size * degrees.batch_ranks)
        ),
        lambda config, degrees: (
            f"not a multiple of training.local_batch_size = {config.training.local_batch_size} x "
            f"{degrees.batch_ranks} batch ranks; {_batch_sizes_that_fit(config, degrees)} would be"
        ),
    ),
]


def broken_rules(config: JobConfig, degrees: Degrees) -> Iterator[str]:
    """A line for each rule that this layout breaks."""
    for rule in RULES:
        if rule.applies(config, degrees):
            yield mistake(config, rule.key, rule.reason(config, degrees))


def check_model(config: JobConfig) -> None:
    """Raises ConfigError where model.name or model.flavor is not known, with the nearest that is."""
    from models import MODELS

    name, flavor = config.model.name, config.model.flavor
    if name not in MODELS:
        raise ConfigError(mistake(config, "model.name", _not_among(name, MODELS)))
    flavors = MODELS[name][1]
    if flavor not in flavors:
        raise ConfigError(mistake(config, "model.flavor", _not_among(flavor, flavors)))


def _not_among(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, known, 1, 0.5)
    return f"not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")


def check_layout(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError with every rule that the layout breaks, or where there is no such model."""
    if broken := list(broken_rules(config, degrees)):
        raise ConfigError(broken)
    check_model(config)
