"""Parses, describes and lists layouts, and applies a layout to a job.

python -m parallelize.layouts 8 --job.config_file recipes/llama_debug.toml [--table.key value]
    lists the layouts of 8 ranks that no rule refuses, and counts what rules refuse
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from components.config import ConfigError, JobConfig, load_config
from parallelize.mesh import Degrees
from parallelize.rules import check_layout
from parallelize.rules.chosen import resolved
from parallelize.rules.sizes import sizes_of

KEYS = {
    "pp": "pipeline_parallel_degree",
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""A word for each degree -> its key of [parallelism], in the order of Degrees."""


@dataclass(frozen=True)
class Layout:
    """The degrees of a job's layout; on one rank all degrees are 1."""

    degrees: Degrees

    def __str__(self) -> str:
        """Words that parse takes: "fsdp 2 tp 4", or "one rank"."""
        found = zip(KEYS, astuple(self.degrees), strict=True)
        return " ".join(f"{word} {degree}" for word, degree in found if degree > 1) or "one rank"

    @property
    def settings(self) -> dict[str, int]:
        """Key of a job file -> value."""
        return {f"parallelism.{key}": size for key, size in zip(KEYS.values(), astuple(self.degrees), strict=True)}

    def given_to(self, job: JobConfig) -> JobConfig:
        """The same run at this layout. local_batch_size is capped at a rank's share of the global batch.

        Raises ConfigError as fixed_batch does.
        """
        degrees: dict[str, Any] = {key.partition(".")[2]: size for key, size in self.settings.items()}
        share = max(1, fixed_batch(job) // self.degrees.batch_ranks)
        training = replace(job.training, local_batch_size=min(share, job.training.local_batch_size))
        return replace(job, parallelism=replace(job.parallelism, **degrees), training=training)

    def refusal(self, job: JobConfig) -> str:
        """Why the job is refused at this layout; empty if it is not."""
        try:
            check_layout(self.given_to(job), self.degrees)
        except ConfigError as error:
            return str(error)
        return ""


def fixed_batch(job: JobConfig) -> int:
    """training.global_batch_size. Raises ConfigError if it is unset, because the default depends on the layout."""
    if job.training.global_batch_size == -1:
        raise ConfigError("training.global_batch_size is unset: it would be another one at each layout; set it")
    return job.training.global_batch_size


def take_degree(words: list[str], degrees: dict[str, int]) -> bool:
    """Whether the first words are a degree, as "tp 2" or "hsdp 2x2" or "one rank". If so, removes them from `words`."""
    word, number, *_ = *words[:2], "", ""
    if word in KEYS and number.isdecimal():
        degrees[word] = int(number)
    elif word == "hsdp" and re.fullmatch(r"\d+x\d+", number):
        degrees["ddp"], degrees["fsdp"] = map(int, number.split("x"))
    elif (word, number) != ("one", "rank"):
        return False
    del words[:2]
    return True


def layout_of(degrees: dict[str, int]) -> Layout:
    """The layout with these degrees, by the words of KEYS; others are 1."""
    return Layout(Degrees(*(degrees.get(word, 1) for word in KEYS)))


def layouts(ranks: int, experts: bool) -> Iterator[Layout]:
    """Every layout of this many ranks; with experts, once for each possible expert parallel degree."""
    for pp, ddp, fsdp, cp, tp in _products(ranks, 5):
        for ep in _divisors(fsdp * cp * tp) if experts else (1,):
            yield Layout(Degrees(pp, ddp, fsdp, cp, tp, ep))


def _products(whole: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (whole,)
        return
    for first in _divisors(whole):
        yield from ((first, *rest) for rest in _products(whole // first, factors - 1))


def _divisors(whole: int) -> Sequence[int]:
    return [size for size in range(1, whole + 1) if whole % size == 0]


def main(argv: list[str]) -> int:
    """Print the accepted layouts, and how many layouts each key refuses; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    options, words = parser.parse_known_args(argv)
    refused = Counter[str]()
    try:
        job = resolved(load_config(words))
        fixed_batch(job)
        for each in layouts(options.ranks, hasattr(sizes_of(job), "n_experts")):
            if refusal := each.refusal(job):
                refused[refusal.partition(": ")[2].partition(" = ")[0]] += 1
            else:
                print(each)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{refused.total()} refused", *(f"  {count:4} by {key}" for key, count in refused.most_common()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
