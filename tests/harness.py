"""Run train.py's own build and step functions on real gloo ranks, and observe them. Every layout is proven with it."""

import __future__

import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos

import train
from components.config import JobConfig, load_config
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from models import MODELS
from models.moe import MixtureBlock
from models.nf4 import is_packed, unpack
from models.parameters import Uniform
from parallelize import parallelize_model
from parallelize.groups import gather
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from parallelize.rules.chosen import resolved
from tests.figures import Observation, Tables, broken_bars, figures
from tests.limits import TimeLimit
from tests.ranks import Ranks, kept_ranks
from tests.routing import Routing, watch
from tests.small import RECIPE, small_for

for name in MODELS:
    parallelize_model(name)
gc.freeze()

T = TypeVar("T")


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
    for case in cases:
        own = case.mutate is not None or bool(case.environment)
        ranks = Ranks(case.ranks, _observe, case.environment) if own else kept_ranks(case.ranks, _observe)
        try:
            yield ranks.run(case)
        finally:
            if own:
                ranks.end()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(run: train.Run) -> dict[str, Tensor]:
    named = [(name, _whole(parameter)) for stage in run.stages for name, parameter in stage.named_parameters()]
    named = [(name, unpack(weight) if is_packed(weight) else weight) for name, weight in named]
    weights = dict(named)
    for name, weight in named:  # both ends of a pipeline may be on this rank
        assert torch.equal(weight, weights[name]), f"{name} is not the same in two stages"
    return _of_all_stages(run, weights)


def whole_tensors(run: train.Run, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of all stages, as every rank has them."""
    return _of_all_stages(run, {name: _whole(tensor) for name, tensor in tensors.items()})


def _of_all_stages(run: train.Run, tensors: dict[str, T]) -> dict[str, T]:
    if run.degrees.pp == 1:
        return tensors
    parts: list[Any] = [None] * run.degrees.pp
    dist.all_gather_object(parts, tensors, group=run.mesh["pp"].get_group())
    twice = {name for part, other in itertools.combinations(parts, 2) for name in part.keys() & other.keys()}
    assert {name.partition(".")[0] for name in twice} <= {"tok_embeddings"}, "a parameter is in two stages"
    for name in twice:
        one, other = [part[name] for part in parts if name in part]
        assert torch.equal(one, other), f"{name} is not the same in two stages"
    return {name: tensor for part in parts for name, tensor in part.items()}


def _observe(case: Case, device: torch.device) -> Observation:
    """The loop of train.train without metrics and signals: what it calls is train.py's own."""
    started = time.perf_counter()
    if case.mutate:
        case.mutate()
    argv = ["--job.config_file", str(RECIPE), *small_for(case.overrides), *case.overrides]
    config = resolved(load_config(argv))
    check_layout(config, resolve_degrees(config, dist.get_world_size()))
    _forget_groups(config, case.at_end is not None)
    run = train.build(config, device)
    if config.model.lora.rank:
        for stage in run.stages:
            initialize_weights(stage, functools.partial(_not_zero, stage), config.debug.seed)
    checkpointer = Checkpointer(Path(case.folder), config.checkpoint, run.stages, run.optimizer)
    if case.folder:
        train.resume(run, checkpointer)
    routing = watch(run, case.routing) if case.routing or case.ranks == 1 else Routing()
    seen: dict[str, list[str]] = {}
    gradients: dict[str, Tensor] = {}
    clip: Callable[..., Tensor] = train.clip_gradients

    def clip_observed(*arguments: Any) -> Tensor:
        if not gradients:
            for stage in run.stages:
                for name, parameter in stage.named_parameters():
                    assert (parameter.grad is not None) == parameter.requires_grad, name
                    if parameter.grad is not None:
                        gradients[name] = _whole(parameter.grad)
        return clip(*arguments)

    balance: Callable[..., Any] = train.balance
    expert_rows: dict[str, Any] = {}

    def balance_observed(*arguments: Any) -> Any:
        names = [name for stage in run.stages for name, part in stage.named_modules() if isinstance(part, MixtureBlock)]
        all_rows = balance(*arguments)
        for name, rows in zip(names, () if all_rows is None else all_rows, strict=True):
            expert_rows.setdefault(name, []).append(rows.tolist())
        return all_rows

    vars(train)["clip_gradients"], vars(train)["balance"] = clip_observed, balance_observed
    replicas = train.Replicas(config.debug.check_replicas_freq, run.stages, run.optimizer, run.mesh, device)
    first_weights, losses, norms = whole_weights(run), [], []
    sources: Tables = {}
    batches = _observed_batches(run, case.valid_labels, seen)
    for _ in range(case.steps):
        kept = [min(count, config.training.seq_len) for count in case.valid_labels] or [config.training.seq_len]
        valid = max(1, sum(kept[slot % len(kept)] for slot in range(run.global_batch_size)))
        loss, norm = train.train_step(run, batches, valid if case.valid_labels else train.divisor(run))
        row = train.row_of(loss, run.logged, run.objective, run.mesh)
        losses.append(row["loss"])
        sources[f"step {run.step}"] = row.get("loss_by_source", {})
        norms.append(norm.item())
        replicas.check(run.step, saving=False)
    validation_loss, _, sources["validation"] = train.validate(run) if run.validation_set else (0.0, 0, {})
    dynamics = run.dynamics.tables() if run.dynamics.sampled else {}
    if case.folder:
        checkpointer.save(run.step, run.state())
        checkpointer.close()
    everything = gather((train.batch_rank(run.mesh), seen, norms))
    if case.routing:
        routing.flips = sum(gather(routing.flips))
    parts: dict[int, dict[str, list[str]]] = {}
    for part, seen_by_rank, _ in everything:
        assert parts.setdefault(part, seen_by_rank) == seen_by_rank, "ranks of one part of the batch see different ones"
    sequences = {step: [digest for part in sorted(parts) for digest in parts[part][step]] for step in seen}
    weights, gradients = whole_weights(run), _of_all_stages(run, gradients)
    expert_rows = _of_all_stages(run, expert_rows)
    extra = case.at_end(run) if case.at_end else None
    vars(train)["clip_gradients"], vars(train)["balance"] = clip, balance
    torch._dynamo.reset()  # what one case compiles is not counted with another's
    torch._dynamo.utils.counters.clear()
    torch._functorch.config.activation_memory_budget = 1.0
    torch.use_deterministic_algorithms(False)
    by_rank, seconds = [norm for _, _, norm in everything], time.perf_counter() - started
    return Observation(
        first_weights,
        gradients,
        weights,
        losses,
        by_rank,
        sequences,
        validation_loss,
        sources,
        expert_rows,
        routing,
        dynamics,
        extra,
        seconds,
    )


def _not_zero(stage: Any, name: str) -> float | Uniform | None:
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


def _observed_batches(
    run: train.Run, valid_labels: tuple[int, ...], seen: dict[str, list[str]]
) -> Iterator[dict[str, Tensor]]:
    share = run.global_batch_size // run.degrees.batch_ranks
    for number, batch in enumerate(train.local_batches(run)):
        accumulation_step = number % run.accumulation_steps
        size = len(batch["tokens"])
        for row in range(size):
            slot = train.batch_rank(run.mesh) * share + accumulation_step * size + row
            if valid_labels:
                batch["labels"][row, valid_labels[slot % len(valid_labels)] :] = -100
            content = batch["tokens"][row].numpy().tobytes() + batch["labels"][row].numpy().tobytes()
            seen.setdefault(str(run.step), []).append(hashlib.blake2b(content, digest_size=8).hexdigest())
        yield batch


_NOT_PLANTED = "is not once in"


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
