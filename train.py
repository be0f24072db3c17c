"""The training loop that every recipe shares. Read it top to bottom.

./run_train.sh --job.config_file recipes/llama_debug.toml      any number of ranks, through torchrun
python train.py --job.config_file recipes/llama_debug.toml     one rank, in this process
"""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import JobConfig, load_config
from components.data import PackedSequences, build_datasets, with_rows
from components.data.loader import DIVISORS, GlobalOrder, build_loader, validation_batches
from components.data.order import check_data_order, data_order
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.launch.memory import keep_freed_memory
from components.launch.signals import StopSignal
from components.observe.describe import describe_resume, introduce
from components.observe.dynamics import Dynamics
from components.observe.guards import Guards
from components.observe.hang import HangWatch
from components.observe.looks import Looks
from components.observe.metrics import Metrics, lock_folder
from components.observe.profiling import profiling
from components.observe.replicas import Replicas
from components.observe.stragglers import Stragglers
from components.optim.averages import WeightAverages
from components.optim.optimizer import build_optimizer, clip_gradients, learning_rate, rate_settings, shared_by, update
from components.state.adapters import export_last, starting_state
from components.state.checkpoint import Checkpointer
from components.state.init import give_memory, initialize_weights
from components.state.reference import add_reference
from models import meta_model, sizes
from models.mtp import look_ahead
from models.objective import Objective, objective_of, take_logged
from parallelize import parallelize_model
from parallelize.context import shard_sequence
from parallelize.data import reshard, set_gradient_sync
from parallelize.expert import balance
from parallelize.groups import init_distributed, print_on_rank_0, set_timeout
from parallelize.mesh import Degrees, Mesh, batch_rank, global_batch_size, resolve_degrees
from parallelize.precision import set_numerics
from parallelize.rules import check_device, checked
from parallelize.runner import Batch, Runner, build_runner, row_of
from parallelize.scores import Scorer, with_base_scores
from parallelize.sharding import align_gradients
from parallelize.together import check_filled


@dataclass
class Run:
    """Everything that one rank holds while it trains."""

    config: JobConfig
    device: torch.device
    mesh: Mesh
    stages: list[nn.Module]
    runner: Runner
    dynamics: Dynamics
    flops_per_token: tuple[int, int]
    optimizer: torch.optim.Optimizer
    averages: WeightAverages
    guards: Guards
    train_set: PackedSequences
    validation_set: PackedSequences | None
    step: int = 0
    sequences: int = 0
    """Sequences consumed: the position in the data order."""
    tokens: int = 0
    """Labels trained on, over all ranks."""
    logged: dict[str, Tensor] = field(default_factory=dict)
    """This rank's parts of the numbers that the objective logs for the last step. The parts of all ranks add up."""
    stopped: bool = False
    """A signal stopped the run after this step, perhaps while it validated: it validates again when it goes on."""
    reference: str = ""
    """Hash of the weights that a loss of pairs compares with, if these are the run's starting weights."""

    @property
    def degrees(self) -> Degrees:
        return self.mesh.degrees

    @property
    def objective(self) -> Objective:
        return objective_of(*self.config.objective_and_terms)

    @property
    def global_batch_size(self) -> int:
        return global_batch_size(self.config, self.degrees)

    @property
    def accumulation_steps(self) -> int:
        """Forwards and backwards of local_batch_size sequences in one optimizer step."""
        return self.global_batch_size // (self.config.training.local_batch_size * self.degrees.batch_ranks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    def state(self) -> dict[str, Any]:
        """The numbers that a checkpoint keeps beside tensors."""
        order = data_order(self.train_set.key, self.train_set.content, self.config, self.train_set.mixture)
        numbers = {"sequences": self.sequences, "tokens": self.tokens, "global_batch_size": self.global_batch_size}
        more = {name: value for name in ("reference", "stopped") if (value := getattr(self, name))}
        return {**numbers, **more, "data_order": order, "rate": rate_settings(self.config), **self.guards.state()}


def build(config: JobConfig, device: torch.device) -> Run:
    """Read the data, build the model and its optimizer at step 0."""
    set_numerics(config, device)
    check_device(config, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    degrees = resolve_degrees(config, dist.get_world_size())
    datasets = build_datasets(config, sizes(config.model).vocab_size)
    mesh = Mesh(degrees, device.type, config.parallelism.pipeline_first)
    whole = meta_model(config.model, config.training.dtype, config.optimizer.mup_base)
    stages = parallelize_model(config.model.name)(whole, mesh, config)
    set_timeout(config.comm.init_timeout_seconds, mesh)  # experts have groups of their own
    give_memory(stages, torch.device("cpu") if config.training.enable_cpu_offload else device)
    for stage in stages:
        initialize_weights(stage, stage.init_std, config.debug.seed, device)
    return assemble(config, device, mesh, stages, *datasets)


def assemble(config: JobConfig, device: torch.device, mesh: Mesh, stages: list[nn.Module], *datasets: Any) -> Run:
    """The run at step 0, made of the datasets of build_datasets and of stages whose parameters have memory."""
    whole = meta_model(config.model)
    runner = build_runner(stages, whole.config, mesh, config, device)
    dynamics = Dynamics(config.metrics.dynamics_freq, whole, stages, mesh)
    flops_per_token = whole.flops_per_token(config.training.seq_len)
    optimizer = build_optimizer(stages, config.optimizer, shared_by(config, mesh))
    averages = WeightAverages(config.averages.ema_decay, stages)
    guards = Guards(config.training, Path(config.job.dump_folder), mesh, device)
    return Run(config, device, mesh, stages, runner, dynamics, flops_per_token, optimizer, averages, guards, *datasets)


def resume(run: Run, checkpointer: Checkpointer) -> None:
    """Continue from what starting_state has loaded. Raises ConfigError if data order or global batch differ."""
    if (state := starting_state(checkpointer, run.config, run.mesh)) is None:
        return
    if "train_state" not in checkpointer.excluded:
        run.step, run.tokens, run.stopped = state["step"], state["tokens"], state.get("stopped", False)
        run.reference = state.get("reference", "")
        run.guards.load(state)
    if "dataloader" not in checkpointer.excluded:
        run.sequences = state["sequences"]
        check_data_order(state, run.state(), run.config.training.global_batch_size)
    print_on_rank_0(describe_resume(run.config, state.get("rate", {}), run.step, run.sequences))


def local_order(run: Run, consumed_sequences: int) -> GlobalOrder:
    """Indices of this rank's sequences, from a position in the data order on; equal on ranks that share sequences."""
    sizes = run.global_batch_size, run.config.training.local_batch_size, batch_rank(run.mesh), run.degrees.batch_ranks
    return GlobalOrder(run.train_set, run.config.debug.seed, *sizes, consumed_sequences)


def local_batches(run: Run) -> Iterator[Batch]:
    """A batch for each accumulation step from run.sequences on, without end."""
    training, keys = run.config.training, ["dropout_keys"] if run.config.model.lora.dropout else []
    columns = (*run.objective.columns, *keys)
    return build_loader(local_order(run, run.sequences), training.masks_documents, training.dataloader, columns)


def divisor(run: Run) -> int:
    """The divisor of the next global batch's loss: by default the number of its labels."""
    return max(1, local_order(run, run.sequences).count(run.objective.divisor))


def own_part(run: Run, batch: Batch) -> Batch:
    """This rank's part of every sequence of a local batch, on its device."""
    on_device = {name: tensor.to(run.device, non_blocking=True) for name, tensor in batch.items()}
    own = shard_sequence(look_ahead(on_device, run.config.mtp_layers), run.mesh, run.config.parallelism)
    return with_base_scores(run.stages, run.runner, own) if run.config.reference == "base" else own


def train_step(run: Run, batches: Iterator[Batch], divisor: int) -> tuple[Tensor, Tensor]:
    """One optimizer step on a global batch, whose loss is divided by `divisor`; the host does not wait for the device.

    Returns this rank's part of the loss (ranks' parts add up to the loss) and the gradient norm of all ranks.
    """
    config = run.config
    run.step += 1
    run.dynamics.start(run.step)
    run.optimizer.zero_grad()
    loss = torch.zeros((), device=run.device)
    for number in range(run.accumulation_steps):
        last = number == run.accumulation_steps - 1
        set_gradient_sync(run.stages, last, config.parallelism.fsdp_reduce_gradients)
        loss += run.runner.forward_backward(own_part(run, next(batches)), divisor, last)
    run.logged = take_logged(run.stages, run.objective.logged, run.device, divisor)
    align_gradients(run.parameters)
    run.dynamics.before_update()
    own_norms: list[Tensor] = []
    norm = clip_gradients(run.parameters, config.training.max_norm, run.mesh["pp"].get_group(), own_norms)
    accepted = run.guards.judge(run.step, run.sequences, loss, norm, own_norms)
    lr = learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps)
    update(run.optimizer, lr, accepted)
    run.averages.update(run.step, accepted)
    run.dynamics.after_update(balance(run.stages, run.mesh, config.experts.bias_update_speed, accepted))
    run.tokens += local_order(run, run.sequences).count("labels")
    run.sequences += run.global_batch_size
    return loss, norm


@torch.no_grad()
def validate(run: Run, stop: StopSignal | None = None) -> tuple[float, int, dict[str, Any]]:
    """The mean loss, the number of labels, and what else is logged. Ends early if all ranks agree to stop."""
    assert run.validation_set is not None
    validation, training, ranks = run.config.validation, run.config.training, run.degrees.batch_ranks
    size, count = validation.local_batch_size or training.local_batch_size, len(run.validation_set)
    if validation.steps != -1:
        count = min(count, validation.steps * run.global_batch_size)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    given = batch_rank(run.mesh), ranks, count, training.masks_documents, run.objective.validated.columns
    batches = validation_batches(run.validation_set, size, *given)
    for batch in stop.until_agreed(batches) if stop else batches:
        total += run.runner.summed_loss(own_part(run, batch))
    reshard(run.stages)
    divisor = max(1, DIVISORS[run.objective.divisor](run.validation_set, np.arange(count)))
    logged = take_logged(run.stages, run.objective.validated.logged, run.device, divisor)
    row = row_of(total.double() / divisor, logged, run.objective, run.mesh)
    return row.pop("loss"), run.validation_set.count_valid(np.arange(count)), row


def log(run: Run, metrics: Metrics, loss: Tensor, norm: Tensor) -> None:
    """Write the step's numbers, for which the host waits."""
    config, row = run.config, row_of(loss, run.logged, run.objective, run.mesh)
    lr = learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps)
    metrics.log(run.step, run.tokens, **row, grad_norm=norm.item(), lr=lr, **run.guards.counts())


def save_if_due(run: Run, metrics: Metrics, checkpointer: Checkpointer, replicas: Replicas) -> None:
    """Save at steps of checkpoint.interval, at the last one, and before a stop, unless a check ends the run first."""
    config, last = run.config.checkpoint, run.step == run.config.training.steps and not run.stopped
    saving = config.due_at(run.step) or (config.saves and (last or run.stopped))
    run.guards.check(lambda position: local_order(run, position), run.stages, now=saving or last)
    replicas.check(run.step, saving)
    if saving:
        checkpointer.save(run.step, run.state(), last and config.last_save_model_only, not run.guards.skipping)
        metrics.restart_clock(run.step, run.tokens)
    checkpointer.poll()


def train(run: Run, metrics: Metrics, checkpointer: Checkpointer, stop: StopSignal) -> int:
    """Train to the last step, or until a signal asks to stop; returns the exit code."""
    config, steps, first, code = run.config, run.config.training.steps, run.step + 1, int(ExitCode.DONE)
    stragglers, freq = Stragglers(run.mesh), config.debug.check_replicas_freq
    replicas = Replicas(freq, run.stages, run.optimizer, run.mesh, run.device, run.averages.kept)
    scorer = Scorer(run.stages, run.runner, run.mesh, config)
    looks = Looks(config, metrics, lambda stop: run.averages.validated(lambda: validate(run, stop)), scorer)
    batches = local_batches(run)
    if run.step == 0 or run.stopped:
        run.stopped = bool(code := looks.if_due(run.step, run.tokens, stop))
        if run.step == steps and not code:
            save_if_due(run, metrics, checkpointer, replicas)
    # All ranks collect garbage at the same steps, because each collection makes the other ranks wait.
    gc.disable()
    with profiling(config.profiling, Path(config.job.dump_folder), dist.get_rank()) as at_step_end:
        while run.step < steps and code == ExitCode.DONE:
            logged = (run.step + 1) % config.metrics.log_freq == 0 or run.step + 1 in (first, steps)
            with stragglers.watched(logged) as own_time:
                loss, norm = train_step(run, batches, divisor(run))
            code = stop.agreed()
            if run.step == first:
                set_timeout(config.comm.train_timeout_seconds, run.mesh)
            if run.dynamics.sampled:
                metrics.log_dynamics(run.step, run.dynamics.tables())
            if logged:
                log(run, metrics, loss, norm)
                stragglers.compare(own_time)
            run.stopped = bool(code := code or looks.if_due(run.step, run.tokens, stop))
            save_if_due(run, metrics, checkpointer, replicas)
            at_step_end(run.step)
            if run.step % config.training.gc_freq == 0:
                gc.collect(1)
    checkpointer.close()
    if code:
        saved = "saved" if config.checkpoint.saves and run.step else "not saved"
        print_on_rank_0(f"stopped by signal {code - 128} after step {run.step}, {saved}")
    return code


def main(config: JobConfig) -> int:
    """Run one rank from start to end; returns its exit code. check_layout has accepted the job."""
    stop = StopSignal()
    keep_freed_memory()
    device = init_distributed(config.comm.init_timeout_seconds, config.comm.share_gpus)
    check_filled(config)
    lock_folder(config, rank := dist.get_rank())
    run = build(config, device)
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    checkpointer = Checkpointer(folder, config.checkpoint, run.stages, run.optimizer, run.averages)
    resume(run, checkpointer)
    add_reference(run, checkpointer)
    metrics = Metrics(config, rank, device, run.flops_per_token, str(run.degrees))
    metrics.resume(run.step, run.tokens, run.stopped)
    data = run.train_set.describe(run.sequences + (config.training.steps - run.step) * run.global_batch_size)
    print_on_rank_0(introduce(config, run.degrees, run.stages, run.runner.passes * run.accumulation_steps, data))
    try:
        with stop.saving(), HangWatch(run.mesh):
            code = train(run, metrics, checkpointer, stop)
        if code == ExitCode.DONE and config.checkpoint.last_save_in_hf:
            export_last(config, folder / f"step-{run.step}")
        return code
    except SystemExit:  # on every rank at the same step
        checkpointer.close()
        raise
    finally:
        metrics.close()


if __name__ == "__main__":
    run_to_exit(lambda argv: main(checked(with_rows(load_config(argv)))), sys.argv[1:])
