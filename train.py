"""The training loop that every recipe shares. Read it top to bottom.

./run_train.sh --job.config_file recipes/llama_debug.toml      any number of ranks, through torchrun
python train.py --job.config_file recipes/llama_debug.toml     one rank, in this process
"""

import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import ConfigError, JobConfig, load_config, to_dict
from components.data import PackedSequences, build_datasets
from components.data.loader import build_loader, validation_batches
from components.dry_run import Meter, fake_tensors, init_fake_group, report, stages_that_agree
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.launch.signals import StopSignal
from components.metrics import Metrics, lock_folder
from components.metrics.dynamics import Dynamics
from components.metrics.profiling import profiling
from components.optimizer import build_optimizer, clip_gradients, learning_rate, update
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from components.state.weights import export, load_weights
from models import MODELS, meta_model
from parallelize import parallelize_model
from parallelize.context import shard_sequence
from parallelize.data import reshard, set_gradient_sync
from parallelize.groups import init_distributed, set_timeout
from parallelize.mesh import (
    Degrees,
    Mesh,
    batch_rank,
    draw_layout,
    resolve_degrees,
    sum_over_token_ranks,
)
from parallelize.pipeline import Pipeline
from parallelize.rules import check_device, check_layout, global_batch_size
from parallelize.sharding import align_gradients, describe_memory
from parallelize.stages import describe_stages

Batch = dict[str, Tensor]


@dataclass
class Run:
    """Everything that one rank holds while it trains."""

    config: JobConfig
    device: torch.device
    degrees: Degrees
    mesh: Mesh
    stages: list[nn.Module]
    pipeline: Pipeline | None
    """What runs the stages, if there is more than one."""
    dynamics: Dynamics
    flops_per_token: tuple[int, int]
    optimizer: torch.optim.Optimizer
    train_set: PackedSequences
    validation_set: PackedSequences | None
    step: int = 0
    sequences: int = 0
    """Sequences consumed: the position in the data order."""
    tokens: int = 0
    """Labels trained on, over all ranks."""
    skipped_steps: Tensor = field(default_factory=lambda: torch.zeros(()))
    """Steps that were not finite and changed nothing: so many in all."""
    skipped_in_a_row: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def global_batch_size(self) -> int:
        return global_batch_size(self.config, self.degrees)

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step on one rank."""
        return self.global_batch_size // (self.config.training.local_batch_size * self.degrees.batch_ranks)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.parameters()]

    @property
    def data_order(self) -> dict[str, Any]:
        """What decides which sequence comes when."""
        return {
            "data": self.train_set.key,
            "training.seq_len": self.config.training.seq_len,
            "debug.seed": self.config.debug.seed,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "data_order": self.data_order,
            "global_batch_size": self.global_batch_size,
            "skipped_steps": int(self.skipped_steps),
        }


def build_model(config: JobConfig, mesh: Mesh, device: torch.device) -> tuple[list[nn.Module], tuple[int, int]]:
    """The stages that this rank holds, with their weights at step 0; and the whole model's FLOPs a token."""
    model = meta_model(config.model.name, config.model.flavor, config.model.attention_kernel)
    flops_per_token = model.flops_per_token(config.training.seq_len)
    stages = parallelize_model(config.model.name)(model, mesh, config)
    with fake_tensors(config.comm.mode) as fake:
        for stage in stages:
            stage.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
            stage.tie_weights()
            if not fake:
                initialize_weights(stage, stage.init_std, config.debug.seed)
    return stages, flops_per_token


def build(config: JobConfig, device: torch.device) -> Run:
    """Check the layout, read the data, build the model and its optimizer at step 0."""
    torch.set_float32_matmul_precision(config.training.float32_matmul_precision)
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.debug.deterministic_warn_only)
    fake = config.comm.mode == "fake_backend"
    if not fake:
        check_device(config, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    degrees = resolve_degrees(config, dist.get_world_size())
    check_layout(config, degrees)
    sizes = MODELS[config.model.name][1][config.model.flavor]
    train_set, validation_set = (None, None) if fake else build_datasets(config, sizes.vocab_size)
    mesh = Mesh(degrees, device.type, config.parallelism.pipeline_first)
    if not fake:
        set_timeout(config.comm.init_timeout_seconds, mesh)
    stages, flops_per_token = build_model(config, mesh, device)
    pipeline = None
    if degrees.pp > 1:
        pipeline = Pipeline(stages, sizes.n_layers, sizes.dim, mesh, config, device)
    model = meta_model(config.model.name, config.model.flavor)
    dynamics = Dynamics(config.metrics.dynamics_freq, model, stages, mesh)
    optimizer = build_optimizer(stages, config.optimizer)
    sets: Any = (train_set, validation_set)  # a dry run has none, and asks for none
    return Run(config, device, degrees, mesh, stages, pipeline, dynamics, flops_per_token, optimizer, *sets)


def resume(run: Run, checkpointer: Checkpointer) -> None:
    """Continue this run's newest good checkpoint; or start from the one that initial_load_path names.

    Raises:
        ConfigError: data order or batch differ from those of the checkpoint.
    """
    checkpoint = run.config.checkpoint
    state = checkpointer.load(checkpoint.load_step) if checkpoint.enable else None
    if state is None and checkpoint.initial_load_path:
        if checkpoint.initial_load_in_hf:
            load_weights(run.stages, Path(checkpoint.initial_load_path))
        else:
            state = checkpointer.load_initial()
        if state is None and dist.get_rank() == 0:
            print(f"weights from {checkpoint.initial_load_path}", flush=True)
    if state is None:
        return
    if "train_state" not in checkpoint.exclude_from_loading:
        run.step, run.tokens = state["step"], state["tokens"]
        run.skipped_steps.fill_(state["skipped_steps"])
    if "dataloader" not in checkpoint.exclude_from_loading:
        run.sequences = state["sequences"]
        now = run.data_order
        changed = [f"{key} was {was}, is {now[key]}" for key, was in state["data_order"].items() if now[key] != was]
        if run.config.training.global_batch_size == -1 and run.global_batch_size != state["global_batch_size"]:
            size = state["global_batch_size"]
            changed.append(
                f"training.global_batch_size is unset and would be {run.global_batch_size}; set it to {size}"
            )
        if changed:
            remedy = 'to start the data anew, set checkpoint.exclude_from_loading = ["dataloader"]'
            raise ConfigError([f"the checkpoint continues another run: {change}; {remedy}" for change in changed])
    if dist.get_rank() == 0:
        print(f"continuing after step {run.step}, at sequence {run.sequences:,}", flush=True)


def micro_batches(run: Run) -> Iterator[Batch]:
    """Micro-batches of whole sequences from here on, without end: the same on ranks that share sequences."""
    training = run.config.training
    return build_loader(
        run.train_set,
        seed=run.config.debug.seed,
        global_batch_size=run.global_batch_size,
        local_batch_size=training.local_batch_size,
        document_mask=training.document_mask,
        batch_rank=batch_rank(run.mesh),
        batch_ranks=run.degrees.batch_ranks,
        consumed_sequences=run.sequences,
        num_workers=training.dataloader.num_workers,
        persistent_workers=training.dataloader.persistent_workers,
        pin_memory=training.dataloader.pin_memory,
        prefetch_factor=training.dataloader.prefetch_factor,
    )


def valid_tokens(run: Run) -> int:
    """Labels that count in the step's global batch: every rank knows them from the data order, without asking."""
    positions = np.arange(run.sequences, run.sequences + run.global_batch_size)
    return run.train_set.count_valid(run.train_set.at(positions, run.config.debug.seed))


def own_part(run: Run, batch: Batch) -> Batch:
    """What this rank computes of a micro-batch: its part of every sequence, on its device."""
    on_device = {name: tensor.to(run.device, non_blocking=True) for name, tensor in batch.items()}
    return shard_sequence(on_device, run.mesh, run.config.parallelism)


def train_step(run: Run, batches: Iterator[Batch], valid: int) -> tuple[Tensor, Tensor]:
    """One optimizer step on a global batch with `valid` labels; nothing in it waits for the device.

    Returns this rank's part of the loss (the parts add up to the loss) and the gradient norm of all ranks.
    """
    config = run.config
    run.step += 1
    run.dynamics.start(run.step)
    run.optimizer.zero_grad()
    loss = torch.zeros((), device=run.device)
    for number in range(run.accumulation):
        set_gradient_sync(run.stages, last=number == run.accumulation - 1)
        batch = own_part(run, next(batches))
        # The sum over labels is divided before backward, and by all ranks' labels: so gradients only ever add up.
        if run.pipeline:
            loss += run.pipeline.forward_backward(batch, valid)
        else:
            part = run.stages[0](**batch) / valid
            part.backward()
            loss += part.detach()
    align_gradients(run.parameters)
    run.dynamics.before_update()
    norm = clip_gradients(run.parameters, config.training.max_norm, run.mesh["pp"].get_group())
    finite = norm.isfinite()
    lr = learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps)
    update(run.optimizer, lr, finite)
    run.dynamics.after_update()
    run.skipped_steps = run.skipped_steps + ~finite
    run.skipped_in_a_row = (run.skipped_in_a_row + 1) * ~finite
    run.sequences += run.global_batch_size
    run.tokens += valid
    return loss, norm


@torch.no_grad()
def validate(run: Run) -> tuple[float, int]:
    """Mean loss a label over the validation data, and the number of labels; the same on every rank."""
    assert run.validation_set is not None
    validation, training, ranks = run.config.validation, run.config.training, run.degrees.batch_ranks
    size = validation.local_batch_size or training.local_batch_size
    count = len(run.validation_set)
    if validation.steps != -1:
        count = min(count, validation.steps * size * ranks)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    batches = validation_batches(run.validation_set, size, batch_rank(run.mesh), ranks, count, training.document_mask)
    summed_loss = run.pipeline.summed_loss if run.pipeline else lambda batch: run.stages[0](**batch)
    for batch in batches:
        total += summed_loss(own_part(run, batch))
    reshard(run.stages)
    labels = run.validation_set.count_valid(np.arange(count))
    return sum_over_token_ranks(total, run.mesh).item() / labels, labels


def log(run: Run, metrics: Metrics, loss: Tensor, norm: Tensor) -> None:
    """Write the step's numbers: here the host waits for the device. Ends the run if nothing is finite any more."""
    config = run.config
    metrics.log(
        run.step,
        run.tokens,
        loss=sum_over_token_ranks(loss, run.mesh).item(),
        grad_norm=norm.item(),
        lr=learning_rate(run.step, config.lr_scheduler, config.optimizer.lr, config.training.steps),
        skipped_steps=run.skipped_steps.item(),
    )
    if run.skipped_in_a_row.item() >= config.training.max_nonfinite_steps:
        print(
            f"step {run.step}: loss or gradient not finite {run.skipped_in_a_row:.0f} steps in a row "
            f"(training.max_nonfinite_steps = {config.training.max_nonfinite_steps}); weights are as they were before",
            file=sys.stderr,
        )
        raise SystemExit(ExitCode.NONFINITE)


def train(run: Run, metrics: Metrics, checkpointer: Checkpointer) -> int:
    """Train to the last step, or until a signal asks to stop; returns the exit code."""
    config, stop = run.config, StopSignal()
    training, checkpoint, validation = config.training, config.checkpoint, config.validation
    first, code = run.step + 1, int(ExitCode.DONE)
    saves = checkpoint.enable and not checkpoint.load_only
    batches = micro_batches(run)
    # A garbage collection on one rank makes all the others wait: all collect at the same steps.
    gc.disable()
    with profiling(config.profiling, Path(config.job.dump_folder), dist.get_rank()) as at_step_end:
        while run.step < training.steps and code == ExitCode.DONE:
            loss, norm = train_step(run, batches, valid_tokens(run))
            last = run.step == training.steps
            if number := stop.agreed():
                code = 128 + number
            if run.step == first:
                set_timeout(config.comm.train_timeout_seconds, run.mesh)
            if run.dynamics.sampled:
                metrics.log_dynamics(run.step, run.dynamics.tables())
            if run.step % config.metrics.log_freq == 0 or run.step == first or last:
                log(run, metrics, loss, norm)
            if validation.enable and (run.step % validation.freq == 0 or last) and not code:
                metrics.log_validation(run.step, *validate(run))
                metrics.restart_clock(run.step, run.tokens)
            due = run.step % checkpoint.interval == 0 or (run.step == 1 and checkpoint.enable_first_step_checkpoint)
            if saves and (due or last or code):
                checkpointer.save(run.step, run.state(), model_only=last and checkpoint.last_save_model_only)
                metrics.restart_clock(run.step, run.tokens)
            checkpointer.poll()
            at_step_end(run.step)
            if run.step % training.gc_freq == 0:
                gc.collect(1)
    checkpointer.wait()
    if code and dist.get_rank() == 0:
        print(f"stopped by signal {code - 128} after step {run.step}, {'saved' if saves else 'not saved'}", flush=True)
    return code


def describe(run: Run) -> str:
    """Model, layout and batch, as lines of text."""
    model, training = run.config.model, run.config.training
    derived = " (derived)" if training.global_batch_size == -1 else ""
    lines = [f"{model.name} {model.flavor}, {sum(p.numel() for p in run.parameters):,} parameters"]
    lines.append(draw_layout(run.degrees, run.config.parallelism.pipeline_first))
    if run.pipeline:
        lines.append(describe_stages(run.config.parallelism, MODELS[model.name][1][model.flavor].n_layers))
    return "\n".join([*lines, f"{run.global_batch_size} sequences of {training.seq_len} tokens a step{derived}"])


def rehearse(config: JobConfig) -> tuple[Run, Meter]:
    """Build and step as the rank that RANK says, of WORLD_SIZE, on fake tensors: what it would hold and send."""
    device, training = init_fake_group(), config.training
    run = build(replace(config, compile=replace(config.compile, enable=False)), device)
    with fake_tensors(config.comm.mode), Meter(run.mesh, run.parameters) as meter:
        run.optimizer.register_step_pre_hook(meter.note_update)
        names = ["tokens", "labels", "positions", *(["document_ids"] if training.document_mask else [])]
        batch = {name: torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64) for name in names}
        with stages_that_agree():
            train_step(run, itertools.repeat(batch), run.global_batch_size * training.seq_len)
    return run, meter


def main(argv: list[str]) -> int:
    """One rank from start to end; returns its exit code."""
    config = load_config(argv)
    if config.comm.mode == "fake_backend":
        run, meter = rehearse(config)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {describe(run)}")
        print(report(meter, run.parameters, run.optimizer))
        return ExitCode.DONE
    dump_folder = Path(config.job.dump_folder)
    device = init_distributed(config.comm.init_timeout_seconds)
    rank = dist.get_rank()
    if rank == 0:
        lock = lock_folder(config)  # noqa: F841 - held until the process ends
    run = build(config, device)
    checkpointer = Checkpointer(dump_folder / config.checkpoint.folder, config.checkpoint, run.stages, run.optimizer)
    resume(run, checkpointer)
    metrics = Metrics(config, rank, device, run.flops_per_token, str(run.degrees))
    metrics.resume(run.step, run.tokens)
    if rank == 0:
        if config.job.print_config:
            print(json.dumps(to_dict(config), indent=1))
        print(describe(run))
        print(describe_memory(run.parameters, run.pipeline.micro_batches if run.pipeline else run.accumulation))
    try:
        code = train(run, metrics, checkpointer)
        if code == ExitCode.DONE and config.checkpoint.last_save_in_hf:
            saved, target = checkpointer.folder / f"step-{run.step}", dump_folder / "hugging_face"
            dtype = getattr(torch, config.checkpoint.export_dtype)
            model = meta_model(config.model.name, config.model.flavor)
            export(model, saved, target, config.model.hf_assets_path, dtype)
        return code
    except SystemExit:  # on every rank at the same step
        checkpointer.wait()
        raise
    finally:
        metrics.close()


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
