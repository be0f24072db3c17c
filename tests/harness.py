"""Run train.py's own build and step functions on real gloo ranks, and observe them. Every layout is proven with it."""

import __future__

import functools
import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

torch.set_num_threads(1)  # before the fork server runs any operation: children of a threaded parent hang

# It warns that full_tensor() could be faster.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# Imported at first use by every rank, in a second: once, before the fork.
import torch._dynamo
import torch._dynamo.utils
import torch._functorch.config
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
from torch.distributed.tensor._redistribute import _gen_transform_infos

import train
from components.commands.figures import Observation, broken_bars, figures
from components.commands.observed import observe_run
from components.commands.routing import Routing
from components.commands.teach import make_up
from components.config import JobConfig, load_config
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from components.state.reference import add_reference
from models import MODELS
from models.parameters import Constant, Uniform
from parallelize import parallelize_model
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from parallelize.rules.chosen import resolved
from tests.limits import TimeLimit
from tests.planted import ONLY_PLANTS
from tests.ranks import Ranks, kept_ranks
from tests.small import RECIPE, small_for

for name in MODELS:
    parallelize_model(name)
gc.freeze()


@dataclass(frozen=True)
class Case:
    """A layout to run: overrides of the recipe, ranks, steps, and what a test wants changed or asked."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 3
    valid_labels: tuple[int, ...] = ()
    """Labels kept of each sequence of the global batch, cycled; empty keeps all."""
    mutate: Callable[[], None] | None = None
    """Called in each rank before it builds: a planted fault."""
    at_end: Callable[[train.Run], Any] | None = None
    folder: str = ""
    """Resume from this folder if there is a checkpoint in it, and save there at the end."""
    environment: dict[str, str] = field(default_factory=dict)
    routing: Routing | None = None
    """Of one process, to be replayed."""


def observe(*overrides: str, **options: Any) -> Observation:
    """Run a case, with the options of Case. Raises RuntimeError if a rank failed, TimeLimit if the ranks hang."""
    (observed,) = observe_all([Case(overrides=overrides, **options)])
    if isinstance(observed, Exception):
        assert _NOT_PLANTED not in str(observed), observed  # else the tests of a fault that is an error would be green
        raise observed
    return observed


def observe_all(cases: Sequence[Case]) -> Iterator[Observation | RuntimeError | TimeLimit]:
    """Run cases one after another."""
    if ONLY_PLANTS in os.environ:
        _plant(cases)
    for case in cases:
        own = case.mutate is not None or bool(case.environment)
        ranks = Ranks(case.ranks, _observe, case.environment) if own else kept_ranks(case.ranks, _observe)
        try:
            yield ranks.run(case)
        finally:
            if own:
                ranks.end()


def _observe(case: Case, device: torch.device) -> Observation:
    """The loop of train.train without metrics and signals: what it calls is train.py's own."""
    started = time.perf_counter()
    if case.mutate:
        case.mutate()
    argv = ["--job.config_file", str(RECIPE), *small_for(case.overrides), *case.overrides]
    config = resolved(load_config(argv))
    check_layout(config, resolve_degrees(config, dist.get_world_size()))
    make_up(config)
    _forget_groups(config, case.at_end is not None)
    run = train.build(config, device)
    if config.model.lora.rank:
        for stage in run.stages:
            initialize_weights(stage, functools.partial(_not_zero, stage), config.debug.seed)
    checkpointer = Checkpointer(Path(case.folder), config.checkpoint, run.stages, run.optimizer, run.averages)
    if case.folder:
        train.resume(run, checkpointer)
    with tempfile.TemporaryDirectory() as own:  # a reference that another layout has computed would prove nothing
        add_reference(run, checkpointer, Path(case.folder or own) / "reference")
    observation = observe_run(run, case.steps, case.valid_labels, case.routing)
    if case.folder:
        checkpointer.save(run.step, run.state())
        checkpointer.close()
    extra = case.at_end(run) if case.at_end else None
    torch._dynamo.reset()  # what one case compiles is not counted with another's
    torch._dynamo.utils.counters.clear()
    torch._functorch.config.activation_memory_budget = 1.0
    torch.use_deterministic_algorithms(False)
    return replace(observation, extra=extra, seconds=time.perf_counter() - started)


def _not_zero(stage: Any, name: str) -> float | Uniform | Constant | None:
    """Adapters start with B = 0: then neither A nor what A and B share out among ranks makes a difference."""
    return 0.02 if name.endswith("lora_B") else stage.init_std(name)


def _forget_groups(config: JobConfig, looked_at: bool) -> None:
    """Clear DTensor's caches where the mesh is not that of the case before, or where the test looks at the run.

    They keep the mesh and groups with which a rank first saw an operation: after another mesh, ranks could differ; and
    messages over the groups of the case before are not counted as this run's.
    """
    mesh = resolve_degrees(config, dist.get_world_size()), config.parallelism.pipeline_first
    if looked_at or _last_mesh != [mesh]:
        torch.distributed.tensor.debug._clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
    _last_mesh[:] = [mesh]


_last_mesh: list[Any] = []
"""Of the case before, in this process."""


_NOT_PLANTED = "is not once in"


def _plant(cases: Sequence[Case]) -> NoReturn:
    """End a test when its faults are planted, each in a process of its own; fail it if one is not."""
    for mutate in [case.mutate for case in cases if case.mutate]:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_said_by, args=(mutate, theirs))
        process.start()
        said = ours.recv()
        process.join()
        assert _NOT_PLANTED not in said, said
    pytest.skip("planted")


def _said_by(mutate: Callable[[], None], pipe: Connection) -> None:
    """Send the error of a fault that needs ranks, or is not planted."""
    try:
        mutate()
        pipe.send("")
    except Exception as error:
        pipe.send(str(error))


def rewrite(module: str, function: str, old: str, new: str) -> None:
    """Plant a fault: replace a piece of a function's source ("name" or "Class.name"). Fails if it is not there once."""
    owner: Any = importlib.import_module(module)
    globals_of_it, (*outer, name) = owner.__dict__, function.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{old!r} {_NOT_PLANTED} {module}.{function}"
    code = compile(source.replace(old, new), f"<{function}>", "exec", __future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, globals_of_it, made)
    setattr(owner, name, made[name])
    for other in list(sys.modules.values()):  # those that have imported it
        if getattr(other, name, None) is original:
            setattr(other, name, made[name])


def main() -> int:
    """Print the figures of one layout, 1 if any is over its bar: python -m tests.harness RANKS --table.key value ...

    One process has the same settings, but for those of parallelism and the attention kernel.
    """
    run: list[str] = []
    kept = True
    for word in sys.argv[2:]:
        kept = not word.startswith(("--parallelism.", "--model.attention_kernel")) if word.startswith("--") else kept
        run += [word] * kept
    reference = observe(*run)
    observed = observe(*sys.argv[2:], ranks=int(sys.argv[1]))
    print(json.dumps(figures(observed, reference) | {"seconds": observed.seconds}, indent=1))
    return int(bool(broken_bars(observed, reference)))


if __name__ == "__main__":
    sys.exit(main())
