"""The training loop that every recipe shares. Read it top to bottom.

./run_train.sh --job.config_file recipes/llama_debug.toml      any number of ranks, through torchrun
python train.py --job.config_file recipes/llama_debug.toml     one rank, in this process
"""

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import EXPORTS, JobConfig, load_config, to_dict
from components.data import PackedSequences, build_datasets
from components.data.loader import Order, build_loader, validation_batches
from components.data.order import check_data_order, data_order
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.launch.memory import keep_freed_memory
from components.launch.signals import StopSignal
from components.observe.describe import introduce
from components.observe.dynamics import Dynamics
from components.observe.guards import Guards
from components.observe.hang import HangWatch
from components.observe.metrics import Metrics, lock_folder
from components.observe.profiling import profiling
from components.observe.replicas import Replicas
from components.observe.stragglers import Stragglers
from components.optim.optimizer import build_optimizer, clip_gradients, learning_rate, shared_by, update
from components.state.adapters import export_run, load_adapters
from components.state.base import read_base
from components.state.checkpoint import Checkpointer
from components.state.init import give_memory, initialize_weights
from models import meta_model, sizes
from parallelize import parallelize_model
from parallelize.context import shard_sequence
from parallelize.data import reshard, set_gradient_sync
from parallelize.expert import balance
from parallelize.groups import init_distributed, print_on_rank_0, set_timeout
from parallelize.mesh import Degrees, Mesh, batch_rank, global_batch_size, resolve_degrees, sum_over_token_ranks
from parallelize.pipeline import Pipeline
from parallelize.precision import set_product_precision
from parallelize.rules import check_device, check_layout
from parallelize.sharding import align_gradients, poison_if_not_finite

Batch = dict[str, Tensor]


@dataclass
class Run:
    """Everything that one rank holds while it trains."""

    config: JobConfig
    device: torch.device
    mesh: Mesh
    stages: list[nn.Module]
    pipeline: Pipeline | None
    """Runs the stages, if there are several."""
    dynamics: Dynamics
    flops_per_token: tuple[int, int]
    optimizer: torch.optim.Optimizer
    guards: Guards
    """Decide which updates are made."""
    train_set: PackedSequences
    validation_set: PackedSequences | None
    step: int = 0
    sequences: int = 0
    """Sequences consumed: the position in the data order."""
    tokens: int = 0
    """Labels trained on, over all ranks."""

    @property
    def degrees(self) -> Degrees:
        return self.mesh.degrees

    @property
    def global_batch_size(self) -> int:
        return global_batch_size(self.config, self.degrees)

    @property
    def accumulation_steps(self) -> int:
        """Accumulation steps of one optimizer step: each is a forward and backward of local_batch_size sequences."""
        return self.global_batch_size // (self.config.training.local_batch_size * self.degrees.batch_ranks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    def state(self) -> dict[str, Any]:
        """The numbers that a checkpoint keeps beside tensors."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "data_order": data_order(self.train_set.key, self.train_set.content, self.config),
            "global_batch_size": self.global_batch_size,
            **self.guards.state(),
        }


def build(config: JobConfig, device: torch.device) -> Run:
    """Check the layout, read the data, build the model and its optimizer at step 0."""
    set_product_precision(config.training.float32_matmul_precision, device)
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
    check_device(config, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    degrees = resolve_degrees(config, dist.get_world_size())
    check_layout(config, degrees)
    datasets = build_datasets(config, sizes(config.model).vocab_size)
    mesh = Mesh(degrees, device.type, config.parallelism.pipeline_first)
    whole = meta_model(config.model, config.training.dtype)
    stages = parallelize_model(config.model.name)(whole, mesh, config)
    set_timeout(config.comm.init_timeout_seconds, mesh)  # experts have groups of their own
    give_memory(stages, torch.device("cpu") if config.training.enable_cpu_offload else device)
    for stage in stages:
        initialize_weights(stage, stage.init_std, config.debug.seed, device)
    return assemble(config, device, mesh, stages, *datasets)


def assemble(config: JobConfig, device: torch.device, mesh: Mesh, stages: list[nn.Module], *datasets: Any) -> Run:
    """The run at step 0 of stages that have memory, with the datasets of build_datasets."""
    whole = meta_model(config.model)
    pipeline = Pipeline(stages, whole.config, mesh, config, device) if mesh.degrees.pp > 1 else None
    dynamics = Dynamics(config.metrics.dynamics_freq, whole, stages, mesh)
    flops_per_token = whole.flops_per_token(config.training.seq_len)
    optimizer = build_optimizer(stages, config.optimizer, shared_by(config, mesh))
    guards = Guards(config.training, Path(config.job.dump_folder), mesh, device)
    return Run(config, device, mesh, stages, pipeline, dynamics, flops_per_token, optimizer, guards, *datasets)


def resume(run: Run, checkpointer: Checkpointer) -> None:
    """Continue from this run's newest good checkpoint, or start from the one that initial_load_path names.

    That has the base of adapters, which checkpoints do not hold. Raises ConfigError if the base, the data order or the
    global batch differs from the checkpoint's.
    """
    if checkpointer.adapted:
        read_base(checkpointer, run.mesh["pp"].get_group())
    state = checkpointer.load() if run.config.checkpoint.enable else None
    if state is None and not checkpointer.adapted:
        state = checkpointer.load_initial()
    elif state is None and (adapters := run.config.model.lora.initial_load_path):
        load_adapters(run.stages, Path(adapters))
    if state is None:
        return
    if "train_state" not in checkpointer.excluded:
        run.step, run.tokens = state["step"], state["tokens"]
        run.guards.load(state)
    if "dataloader" not in checkpointer.excluded:
        run.sequences = state["sequences"]
        check_data_order(state, run.state(), run.config.training.global_batch_size)
    print_on_rank_0(f"continuing after step {run.step}, at sequence {run.sequences:,}")


def local_order(run: Run, consumed_sequences: int) -> Order:
    """Numbers of this rank's sequences from a position of the data order on; equal on ranks that share sequences."""
    seed, size = run.config.debug.seed, run.config.training.local_batch_size
    rank, ranks = batch_rank(run.mesh), run.degrees.batch_ranks
    return Order(run.train_set, seed, run.global_batch_size, size, rank, ranks, consumed_sequences)


def local_batches(run: Run) -> Iterator[Batch]:
    """A batch for each accumulation step from run.sequences on, without end."""
    training, dropout = run.config.training, run.config.model.lora.dropout > 0
    return build_loader(local_order(run, run.sequences), training.document_mask, training.dataloader, dropout)


def valid_tokens(run: Run) -> int:
    """Labels that count in the global batch: every rank counts them from the data order, without a collective."""
    positions = np.arange(run.sequences, run.sequences + run.global_batch_size)
    return run.train_set.count_valid(run.train_set.at(positions, run.config.debug.seed))


def own_part(run: Run, batch: Batch) -> Batch:
    """This rank's part of every sequence of a local batch, on its device."""
    on_device = {name: tensor.to(run.device, non_blocking=True) for name, tensor in batch.items()}
    return shard_sequence(on_device, run.mesh, run.config.parallelism)


def train_step(run: Run, batches: Iterator[Batch], valid: int) -> tuple[Tensor, Tensor]:
    """One optimizer step on a global batch with `valid` labels; the host does not wait for the device.

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
        batch = own_part(run, next(batches))
        # The summed loss is divided before backward, by all ranks' labels: gradients are then only added up.
        if run.pipeline:
            loss += run.pipeline.forward_backward(batch, valid, last)
        else:
            part = run.stages[0](**batch) / valid
            poison_if_not_finite(part).backward()
            loss += part.detach()
    align_gradients(run.parameters)
    run.dynamics.before_update()
    own_norms: list[Tensor] = []
    norm = clip_gradients(run.parameters, config.training.max_norm, run.mesh["pp"].get_group(), own_norms)
    accepted = run.guards.judge(run.step, run.sequences, loss, norm, own_norms)
    lr = learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps)
    update(run.optimizer, lr, accepted)
    run.dynamics.after_update(balance(run.stages, run.mesh, config.experts.bias_update_speed, accepted))
    run.sequences += run.global_batch_size
    run.tokens += valid
    return loss, norm


@torch.no_grad()
def validate(run: Run, stop: StopSignal | None = None) -> tuple[float, int]:
    """Mean loss of a label over the validation data, and the number of labels; the same on every rank.

    Cut short, and of no meaning, if all ranks agree to stop meanwhile.
    """
    assert run.validation_set is not None
    validation, training, ranks = run.config.validation, run.config.training, run.degrees.batch_ranks
    size, count = validation.local_batch_size or training.local_batch_size, len(run.validation_set)
    if validation.steps != -1:
        count = min(count, validation.steps * run.global_batch_size)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    batches = validation_batches(run.validation_set, size, batch_rank(run.mesh), ranks, count, training.document_mask)
    summed_loss = run.pipeline.summed_loss if run.pipeline else lambda batch: run.stages[0](**batch)
    for batch in stop.until_agreed(batches) if stop else batches:
        total += summed_loss(own_part(run, batch))
    reshard(run.stages)
    labels = run.validation_set.count_valid(np.arange(count))
    return sum_over_token_ranks(total, run.mesh).item() / labels, labels


def log(run: Run, metrics: Metrics, loss: Tensor, norm: Tensor) -> None:
    """Write the step's numbers, for which the host waits."""
    config = run.config
    metrics.log(
        run.step,
        run.tokens,
        loss=sum_over_token_ranks(loss, run.mesh).item(),
        grad_norm=norm.item(),
        lr=learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps),
        **run.guards.counts(),
    )


def train(run: Run, metrics: Metrics, checkpointer: Checkpointer, stop: StopSignal) -> int:
    """Train to the last step, or until a signal asks to stop; returns the exit code."""
    config, stragglers = run.config, Stragglers(run.mesh)
    training, checkpoint, validation = config.training, config.checkpoint, config.validation
    first, code = run.step + 1, int(ExitCode.DONE)
    replicas = Replicas(config.debug.check_replicas_freq, run.stages, run.optimizer, run.mesh, run.device)
    saves = checkpoint.enable and not checkpoint.load_only
    batches = local_batches(run)
    # All ranks collect garbage at the same steps: each collection makes the other ranks wait.
    gc.disable()
    with profiling(config.profiling, Path(config.job.dump_folder), dist.get_rank()) as at_step_end:
        while run.step < training.steps and code == ExitCode.DONE:
            logged = (run.step + 1) % config.metrics.log_freq == 0 or run.step + 1 in (first, training.steps)
            with stragglers.watched(logged) as own_time:
                loss, norm = train_step(run, batches, valid_tokens(run))
            last = run.step == training.steps
            code = stop.agreed()
            if run.step == first:
                set_timeout(config.comm.train_timeout_seconds, run.mesh)
            if run.dynamics.sampled:
                metrics.log_dynamics(run.step, run.dynamics.tables())
            if logged:
                log(run, metrics, loss, norm)
                stragglers.compare(own_time)
            if validation.enable and (run.step % validation.freq == 0 or last) and not code:
                validated = validate(run, stop)
                code = stop.code
                if not code:
                    metrics.log_validation(run.step, *validated)
                metrics.restart_clock(run.step, run.tokens)
            due = run.step % checkpoint.interval == 0 or (run.step == 1 and checkpoint.enable_first_step_checkpoint)
            saving = saves and bool(due or last or code)
            run.guards.check(lambda position: local_order(run, position), run.stages, now=saving or last)
            replicas.check(run.step, saving)
            if saving:
                model_only = last and checkpoint.last_save_model_only
                checkpointer.save(run.step, run.state(), model_only, prune=not run.guards.skipping)
                metrics.restart_clock(run.step, run.tokens)
            checkpointer.poll()
            at_step_end(run.step)
            if run.step % training.gc_freq == 0:
                gc.collect(1)
    checkpointer.wait()
    if code:
        print_on_rank_0(f"stopped by signal {code - 128} after step {run.step}, {'saved' if saves else 'not saved'}")
    return code


def export_weights(run: Run, checkpointer: Checkpointer) -> None:
    """Write the last checkpoint's weights for Hugging Face too; of adapters, for PEFT."""
    config = run.config
    saved, target = checkpointer.folder / f"step-{run.step}", Path(config.job.dump_folder) / EXPORTS
    export_run(to_dict(config), saved, target, getattr(torch, config.checkpoint.export_dtype))


def main(argv: list[str]) -> int:
    """One rank from start to end; returns its exit code."""
    stop = StopSignal()
    keep_freed_memory()
    config = load_config(argv)
    device = init_distributed(config.comm.init_timeout_seconds)
    rank = dist.get_rank()
    lock = lock_folder(config) if rank == 0 else None  # noqa: F841 - held until the process ends
    run = build(config, device)
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    checkpointer = Checkpointer(folder, config.checkpoint, run.stages, run.optimizer)
    resume(run, checkpointer)
    metrics = Metrics(config, rank, device, run.flops_per_token, str(run.degrees))
    metrics.resume(run.step, run.tokens)
    batches = run.pipeline.passes if run.pipeline else run.accumulation_steps
    print_on_rank_0(introduce(config, run.degrees, run.stages, batches))
    try:
        with stop.saving(), HangWatch(run.mesh):
            code = train(run, metrics, checkpointer, stop)
        if code == ExitCode.DONE and config.checkpoint.last_save_in_hf:
            export_weights(run, checkpointer)
        return code
    except SystemExit:  # on every rank at the same step
        checkpointer.wait()
        raise
    finally:
        metrics.close()


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
