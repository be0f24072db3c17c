"""train.py: no waiting for the device, bad steps that change nothing, a run that is stopped and resumed."""

import functools
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from components.commands.figures import broken_bars
from components.config import ROOT, ConfigError
from parallelize.groups import gather, set_timeout
from parallelize.together import from_first, together
from tests.harness import observe, rewrite
from tests.limits import finish, run, wait_until
from tests.small import RECIPE
from tests.test_parallelize_data import LAYOUTS, MORE_LAYOUTS, local_batch

TINY_RUN = [
    *("--training.seq_len", "32", "--training.local_batch_size", "2", "--training.global_batch_size", "4"),
    *("--metrics.log_freq", "1", "--lr_scheduler.warmup_steps", "2", "--lr_scheduler.total_steps", "40"),
    *("--validation.steps", "2"),
]


class Waits(TorchDispatchMode):
    """Counts operations that read a value of the device on the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(function._schema.name.split("::")[1].startswith(name) for name in self.NAMES):
            self.found.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def count_waits(run: train.Run) -> list[str]:
    batches = train.local_batches(run)
    first = next(batches)  # starts the loader, which draws a seed on the host
    batches = itertools.chain([first], batches)
    with Waits() as waits:
        for _ in range(3):
            train.train_step(run, batches, train.divisor(run))
    return waits.found


@pytest.mark.parametrize("layout", ["one", "ddp 2", "fsdp 2 default", "tp 2", "cp 2"])
def test_a_step_never_waits_for_the_device(layout: str) -> None:
    ranks, overrides = MORE_LAYOUTS[layout]
    observed = observe(*overrides, "--training.local_batch_size", "6", ranks=ranks, steps=1, at_end=count_waits)
    assert observed.extra == []


def test_waiting_is_counted() -> None:
    fault = functools.partial(
        rewrite, "parallelize.runner", "Whole.forward_backward", "loss.detach()", "loss.detach().item()"
    )
    assert observe(steps=1, at_end=count_waits, mutate=fault).extra


def ask_rank_0(run: train.Run) -> list[tuple[int, str]]:
    """What every rank got from rank 0, and what it was refused."""

    def refuse() -> int:
        raise ConfigError(f"rank {dist.get_rank()} knows no such dataset")

    got = together(dist.get_rank, first_only=True)[0]
    assert from_first(dist.get_rank) == 0
    try:
        together(refuse, first_only=True)
    except ConfigError as error:
        return gather((got, str(error)))
    return []


def test_every_rank_gets_what_rank_0_makes_or_its_mistake() -> None:
    observed = observe("--training.local_batch_size", "6", ranks=2, steps=1, at_end=ask_rank_0)
    assert observed.extra == [(0, "rank 0 knows no such dataset")] * 2


@pytest.mark.parametrize(
    ("layout", "implementation", "value"),
    [
        *itertools.product(["one", "ddp 2", "fsdp 2 default"], ["fused"], ['float("nan")', 'float("inf")']),
        *itertools.product(["one", "ddp 2"], ["foreach", "for-loop"], ['float("nan")']),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(layout: str, implementation: str, value: str) -> None:
    kernel = ("--optimizer.implementation", implementation)
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    poison = f"({value} if run.step == 2 and dist.get_rank() == {ranks - 1} else 1)"
    fault = functools.partial(rewrite, "train", "train_step", "divisor, last)", f"divisor / {poison}, last)")
    given = (*kernel, *overrides, *local_batch(ranks, 1))
    before = observe(*given, ranks=ranks, steps=1, at_end=moments)
    after = observe(*given, ranks=ranks, steps=2, mutate=fault, at_end=moments)
    assert all(torch.equal(after.weights[name], weight) for name, weight in before.weights.items())
    assert all(torch.equal(one, other) for one, other in zip(before.extra[0], after.extra[0], strict=True))
    assert (before.extra[1], after.extra[1]) == (0, 1), "skipped steps are counted"


def moments(run: train.Run) -> tuple[list[torch.Tensor], int]:
    states = run.optimizer.state.values()
    tensors = [
        value.to_local() if hasattr(value, "to_local") else value for state in states for value in state.values()
    ]
    return [tensor.clone() for tensor in tensors], int(run.guards.skipped_steps)


def run_train(*overrides: str, ranks: int = 2, recipe: Path = RECIPE) -> subprocess.Popen[str]:
    command = [str(ROOT / "run_train.sh"), "--job.config_file", str(recipe), *TINY_RUN, *overrides]
    return subprocess.Popen(
        command, env=os.environ | {"NGPU": str(ranks)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(folder) if "loss" in row]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "a run"


@pytest.mark.quick
@pytest.mark.torchrun
def test_a_run_stopped_by_a_signal_and_resumed_is_the_unbroken_run(run_folder: Path) -> None:
    """Two ranks: stopped by SIGTERM to the launcher, then resumed; equal bits, and no row lost."""
    whole = run_folder.with_name("unbroken")
    given = ("--training.steps", "24", "--validation.freq", "12")
    unbroken = run_train(*given, "--job.dump_folder", str(whole))
    output = finish(unbroken)[0]
    assert unbroken.returncode == 0, output

    first = run_train(*given, "--job.dump_folder", str(run_folder))
    wait_until(lambda: (run_folder / "metrics.jsonl").exists() and len(numbers(run_folder)) >= 2, first)
    first.send_signal(signal.SIGTERM)
    output = finish(first)[0]
    assert first.returncode == 128 + signal.SIGTERM, output
    stopped_at = numbers(run_folder)[-1][0]
    assert stopped_at < 24
    assert (run_folder / f"checkpoint/step-{stopped_at}").is_dir(), "the step that it stopped at is saved"

    changed = ("--optimizer.router.lr_factor", "0.5")  # no parameter here has this role
    second = run_train(*given, *changed, "--job.dump_folder", str(run_folder))
    output = finish(second)[0]
    assert second.returncode == 0, output
    assert f"continuing after step {stopped_at}" in output
    assert "to keep that schedule, set optimizer.router.lr_factor = 1.0" in output
    assert numbers(run_folder) == numbers(whole)
    assert [row for row in rows(run_folder) if "validation_loss" in row] == [
        row for row in rows(whole) if "validation_loss" in row
    ]
    assert (run_folder / "loss.png").stat().st_size > 10_000
    run = json.loads((run_folder / "run.json").read_text())
    assert run["config"]["training"]["steps"] == 24
    assert run["config"]["model"]["hf_assets_path"] == str(ROOT / "assets/tokenizer"), "not found from elsewhere"
    assert run["versions"]["torch"] == torch.__version__


@pytest.mark.torchrun
def test_a_second_run_in_the_same_folder_is_refused_while_the_first_writes(run_folder: Path) -> None:
    long = ("--training.steps", "100000", "--lr_scheduler.total_steps", "100000")
    first = run_train(*long, "--job.dump_folder", str(run_folder))
    try:
        wait_until((run_folder / "metrics.jsonl").exists, first)
        before = (run_folder / "run.json").read_bytes()
        second = run_train("--training.steps", "39", "--job.dump_folder", str(run_folder))
        output = finish(second)[0]
    finally:
        first.send_signal(signal.SIGINT)
    told = finish(first)[0]
    assert first.returncode == 128 + signal.SIGINT, told
    assert second.returncode == 2, output
    assert "another run is writing" in output
    assert (run_folder / "run.json").read_bytes() == before


@pytest.mark.torchrun
def test_non_finite_for_too_long_ends_the_run_with_its_own_code(run_folder: Path) -> None:
    """A learning rate that blows the weights up."""
    process = run_train(
        *("--training.steps", "40", "--optimizer.lr", "1e30", "--training.max_nonfinite_steps", "3"),
        *("--job.dump_folder", str(run_folder), "--parallelism.data_parallel_replicate_degree", "1"),
        ranks=1,
    )
    output = finish(process)[0]
    assert process.returncode == 3, output
    assert "loss or gradient not finite 3 steps in a row" in output


@pytest.mark.torchrun
def test_writers_work_and_keep_secrets(run_folder: Path) -> None:
    """TensorBoard and offline W&B on one rank; nothing in the folder holds the key; the W&B id survives a resume."""
    environment = {"WANDB_MODE": "offline", "WANDB_API_KEY": "c" * 40, "WANDB_SILENT": "true"}
    given = ["--metrics.enable_wandb", "--metrics.enable_tensorboard", "--job.dump_folder", str(run_folder)]
    given += ["--parallelism.data_parallel_replicate_degree", "1", "--validation.enable", "false"]
    for steps in ("2", "4"):
        process = run(
            [
                str(ROOT / "run_train.sh"),
                "--job.config_file",
                str(RECIPE),
                *TINY_RUN,
                *given,
                "--training.steps",
                steps,
            ],
            env=os.environ | environment | {"NGPU": "1"},
        )
        assert process.returncode == 0, process.stdout + process.stderr
        runs = {path.name.rpartition("-")[2] for path in (run_folder / "wandb").glob("offline-run-*")}
        assert runs == {(run_folder / "wandb_run_id").read_text()}
    assert list((run_folder / "tb").glob("events.*"))
    leaks = [path for path in run_folder.rglob("*") if path.is_file() and b"c" * 40 in path.read_bytes()]
    assert not leaks


def test_validation_is_the_same_at_every_layout() -> None:
    """Seven sequences of a length of their own: the ranks that run out still take part."""
    given = ("--validation.enable", "true", "--validation.held_out_fraction", "0.006", "--validation.seq_len", "40")
    losses = {}
    for layout in ("one", "fsdp 3 default", "cp 2"):
        ranks, overrides = MORE_LAYOUTS[layout]
        local = ("--validation.local_batch_size", "2")
        observed = observe(
            *given, *local, *overrides, "--training.local_batch_size", "3", ranks=ranks, steps=1, at_end=train.validate
        )
        losses[layout] = observed.extra
    loss, labels, _ = losses["one"]
    assert labels == 7 * 40
    assert all(found[1] == labels and abs(found[0] / loss - 1) < 1e-6 for found in losses.values())


def test_validation_takes_steps_times_the_global_batch_whatever_the_local_batch() -> None:
    """Of about 78 sequences that are held out 36: not so many for each rank, nor fewer with a smaller local batch."""
    given = ("--validation.enable", "true", "--validation.held_out_fraction", "0.05", "--validation.steps", "1")
    sizes = [("--training.local_batch_size", "36"), ("--training.local_batch_size", "4"), local_batch(2, 3)]
    ranks = [1, 1, 2]
    found = [
        observe(*given, *size, ranks=count, steps=0, at_end=train.validate).extra for count, size in zip(ranks, sizes)
    ]
    assert [labels for _, labels, _ in found] == [36 * 32] * 3
    assert all(abs(loss / found[0][0] - 1) < 1e-6 for loss, *_ in found)


def test_a_harness_run_equals_itself() -> None:
    assert not broken_bars(observe(steps=2), observe(steps=2))


def validate_and_save(folder: Path, run: train.Run) -> None:
    train.validate(run)
    checkpointer = train.Checkpointer(folder, run.config.checkpoint, run.stages, run.optimizer)
    checkpointer.save(run.step, run.state())


@pytest.mark.parametrize("reshard", ["default", "never", "always"])
def test_a_save_after_a_validation_is_whole(reshard: str, tmp_path: Path) -> None:
    """A forward without backward leaves weights gathered, in bfloat16 and without moments."""
    given = (
        *("--validation.enable", "true", "--checkpoint.enable", "--training.mixed_precision_param", "bfloat16"),
        *("--parallelism.fsdp_reshard_after_forward", reshard, *local_batch(2, 1)),
    )
    whole = observe(*given, ranks=2, steps=4)
    first = observe(*given, ranks=2, steps=2, at_end=functools.partial(validate_and_save, tmp_path))
    second = observe(*given, ranks=2, steps=2, folder=str(tmp_path))
    assert all(torch.equal(second.first_weights[name], weight) for name, weight in first.weights.items())
    assert first.losses + second.losses == whole.losses


def wait_for_rank_1(run: train.Run) -> list[int]:
    """Training's collectives are given 1 second, and rank 1 reads for 3."""
    set_timeout(1, run.mesh)

    def read() -> int:
        time.sleep(3 * dist.get_rank())
        return dist.get_rank()

    return together(read)


def test_ranks_that_read_files_have_more_time_than_a_step() -> None:
    assert observe("--training.local_batch_size", "6", ranks=2, steps=1, at_end=wait_for_rank_1).extra == [0, 1]
