"""Runs some steps of a layout with train.py's own functions, and observes them: what proves a layout."""

import functools
import hashlib
import itertools
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import train
from components.commands.figures import Observation, Tables
from components.commands.routing import Routing, watch
from components.config import from_json
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from components.state.reference import add_reference
from models.moe import MixtureBlock
from models.nf4 import is_packed, unpack
from models.parameters import Constant, Uniform
from parallelize.groups import gather, init_distributed
from parallelize.sharding import own_slice

T = TypeVar("T")
STEPS = 3
VALID_LABELS = (32, 9, 21)
"""Labels kept of each sequence: with equal counts a mean over ranks would be right."""


@dataclass
class Proof:
    """The observations of all ranks of a run."""

    observation: Observation
    outputs: dict[str, tuple[float, float]]
    """Module -> sums over all ranks of |x| and of x^2 of its output in the first step, in the order of the calls; 0 for
    an output that is no tensor."""
    apart: list[str] = field(default_factory=list)
    """Parameters of whose gradient ranks hold the same part with other numbers."""


def observe_run(
    run: train.Run,
    steps: int,
    valid_labels: tuple[int, ...] = (),
    replayed: Routing | None = None,
    at_gradients: Callable[[], None] = lambda: None,
) -> Observation:
    """The loop of train.train without metrics and signals, then a validation: what it calls is train.py's own.

    All ranks call this. valid_labels: labels kept of each sequence of the global batch, cycled; empty keeps all.
    replayed: routing of one process. at_gradients: called once, when the first step's gradients are complete.
    """
    routing = watch(run, replayed) if replayed or dist.get_world_size() == 1 else Routing()
    seen: dict[str, list[str]] = {}
    gradients: dict[str, Tensor] = {}
    clip: Callable[..., Tensor] = train.clip_gradients

    def clip_observed(*arguments: Any) -> Tensor:
        if not gradients:
            for stage in run.stages:
                for name, parameter in stage.named_parameters():
                    assert (parameter.grad is not None) == parameter.requires_grad, name
                    if parameter.grad is not None:
                        gradients[name] = whole(parameter.grad)
            at_gradients()
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
    replicas = train.Replicas(run.config.debug.check_replicas_freq, run.stages, run.optimizer, run.mesh, run.device)
    first_weights, losses, norms = whole_weights(run), [], []
    sources: Tables = {}
    batches = _observed_batches(run, valid_labels, seen)
    for _ in range(steps):
        length = run.config.training.seq_len
        kept = [min(count, length) for count in valid_labels] or [length]
        valid = max(1, sum(kept[slot % len(kept)] for slot in range(run.global_batch_size)))
        loss, norm = train.train_step(run, batches, valid if valid_labels else train.divisor(run))
        row = train.row_of(loss, run.logged, run.objective, run.mesh)
        losses.append(row["loss"])
        sources[f"step {run.step}"] = _table(row)
        norms.append(norm.item())
        replicas.check(run.step, saving=False)
    validation_loss, _, validated = train.validate(run) if run.validation_set else (0.0, 0, {})
    sources["validation"] = _table(validated)
    vars(train)["clip_gradients"], vars(train)["balance"] = clip, balance
    everything = gather((train.batch_rank(run.mesh), seen, norms))
    if replayed:
        routing.flips = sum(gather(routing.flips))
    parts: dict[int, dict[str, list[str]]] = {}
    for part, seen_by_rank, _ in everything:
        assert parts.setdefault(part, seen_by_rank) == seen_by_rank, "ranks of one part of the batch see different ones"
    return Observation(
        first_weights,
        _of_all_stages(run, gradients),
        whole_weights(run),
        losses,
        [norm for _, _, norm in everything],
        {step: [digest for part in sorted(parts) for digest in parts[part][step]] for step in seen},
        validation_loss,
        sources,
        _of_all_stages(run, expert_rows),
        routing,
        run.dynamics.tables() if run.dynamics.sampled else {},
    )


def _table(row: dict[str, Any]) -> dict[str, float]:
    """The losses of a mixture's sources, or the log-probabilities of pairs; other numbers of pairs may be near 0."""
    pairs = {name: row[name] for name in ("logp_chosen", "logp_rejected") if name in row}
    return row.get("loss_by_source", pairs)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(run: train.Run) -> dict[str, Tensor]:
    """The full parameters of all stages, on every rank."""
    named = [(name, whole(parameter)) for stage in run.stages for name, parameter in stage.named_parameters()]
    named = [(name, unpack(weight) if is_packed(weight) else weight) for name, weight in named]
    weights = dict(named)
    for name, weight in named:  # both ends of a pipeline may be on this rank
        assert torch.equal(weight, weights[name]), f"{name} is not the same in two stages: no sum over pp"
    return _of_all_stages(run, weights)


def whole_tensors(run: train.Run, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of all stages, as every rank has them."""
    return _of_all_stages(run, {name: whole(tensor) for name, tensor in tensors.items()})


def _of_all_stages(run: train.Run, tensors: dict[str, T]) -> dict[str, T]:
    if run.degrees.pp == 1:
        return tensors
    parts: list[Any] = [None] * run.degrees.pp
    dist.all_gather_object(parts, tensors, group=run.mesh["pp"].get_group())
    twice = {name for part, other in itertools.combinations(parts, 2) for name in part.keys() & other.keys()}
    assert {name.partition(".")[0] for name in twice} <= {"tok_embeddings"}, "a parameter is in two stages"
    for name in twice:
        one, other = [part[name] for part in parts if name in part]
        assert torch.equal(one, other), f"{name} is not the same in two stages: no sum over pp"
    return {name: tensor for part in parts for name, tensor in part.items()}


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


def rank(argv: list[str]) -> None:
    """A rank of a small job. argv: the job as JSON; the file that rank 0 writes; a file of the routing to replay."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the rank, which has nothing to save
    run_to_exit(_prove, argv)


def _prove(argv: list[str]) -> int:
    job, result, routing = argv
    config, device = from_json(job), init_distributed(60)
    run = train.build(config, device)
    checkpointer = Checkpointer(Path(), config.checkpoint, run.stages, run.optimizer)
    # Each layout computes the reference itself.
    add_reference(run, checkpointer, Path(tempfile.mkdtemp(dir=Path(result).parent)))
    for stage in run.stages:
        initialize_weights(stage, functools.partial(_not_zero, stage), config.debug.seed)
    outputs, apart = _watch_outputs(run), set[str]()
    observation = observe_run(
        run,
        STEPS,
        () if config.training.dataset_format == "preference" else VALID_LABELS,
        torch.load(routing, weights_only=False) if routing else None,
        lambda: apart.update(_apart(run)),
    )
    sums: dict[str, tuple[float, float]] = {}
    for of_rank in gather({name: tuple(pair) for name, pair in outputs.items()}):
        for name, (one, two) in of_rank.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + one, before[1] + two
    if dist.get_rank() == 0:
        torch.save(Proof(observation, sums, sorted(apart)), result)
    dist.barrier()
    return ExitCode.DONE


def _not_zero(stage: Any, name: str) -> float | Uniform | Constant | None:
    """Biases and adapters' B start at 0: then what is multiplied with them, or added twice, makes no difference."""
    std: float | Uniform | Constant | None = stage.init_std(name)
    return 0.02 if std == 0 else std


def _watch_outputs(run: train.Run) -> dict[str, list[float]]:
    """Module -> sums of |x| and x^2 of this rank's outputs in the first step's forwards; filled while it runs."""
    found: dict[str, list[float]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def add(_: object, __: object, output: Any) -> None:
            if run.step != 1 or torch._C._current_graph_task_id() != -1:
                return
            sums = found.setdefault(name, [0.0, 0.0])
            if not isinstance(output, Tensor):
                return
            local: Tensor = output.detach()
            if isinstance(local, DTensor):
                local = local.full_tensor() if any(each.is_partial() for each in local.placements) else local.to_local()
            sums[0] += local.double().abs().sum().item()
            sums[1] += local.double().square().sum().item()

        module.register_forward_hook(add)

    for stage in run.stages:
        for name, module in stage.named_modules():
            if name:
                watch(name, module)
    return found


def _apart(run: train.Run) -> list[str]:
    """Parameters of whose gradient two ranks hold the same part with other numbers."""
    held: dict[tuple[Any, ...], str] = {}
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                local, first = own_slice(parameter.grad)
                content = local.detach().float().contiguous().cpu().numpy().tobytes()
                held[name, first, tuple(local.shape)] = hashlib.blake2b(content, digest_size=8).hexdigest()
    known: dict[tuple[Any, ...], str] = {}
    found = []
    for of_rank in gather(held):
        for key, digest in of_rank.items():
            if known.setdefault(key, digest) != digest:
                found.append(key[0])
    return found
