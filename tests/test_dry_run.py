"""A dry run says what a real step of the same rank holds and sends; and every recipe passes one at its full scale."""

import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

import train
from components.config import ROOT, load_config
from components.dry_run import Meter, main, rehearse
from components.start import check, read_settings
from tests.harness import PRELOADED, RECIPE, SMALL, observe

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
LONG = ("--model.flavor", "deep", "--training.seq_len", "512", "--training.global_batch_size", "8")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "fsdp 2": (2, ()),
    "hsdp 2x2, accumulation": (4, ("--parallelism.data_parallel_replicate_degree", "2")),
    "tp 2": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "cp 2": (2, ("--parallelism.context_parallel_degree", "2")),
    "ulysses 2": (
        2,
        ("--parallelism.context_parallel_degree", "2", "--parallelism.context_parallel_method", "ulysses"),
    ),
    "pp 2": (2, ("--parallelism.pipeline_parallel_degree", "2")),
    "pp 2, ZBV, tp 2": (
        4,
        (
            *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"),
            *("--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
        ),
    ),
    "dynamics, tp 2, cp 2": (
        4,
        (
            *("--parallelism.tensor_parallel_degree", "2", "--parallelism.context_parallel_degree", "2"),
            *("--metrics.dynamics_freq", "1"),
        ),
    ),
    "full checkpointing": (2, ("--activation_checkpoint.mode", "full")),
}


def overrides(name: str) -> tuple[str, ...]:
    local = "4" if "pp" in name else "2"
    return (*LONG, "--training.local_batch_size", local, *LAYOUTS[name][1])


Counted = tuple[int, dict[tuple[str, str], list[int]]]


def count_real(run: train.Run) -> Counted:
    """A step after the first, in which moments are allocated and stages ask each other for shapes."""
    batches, valid = train.local_batches(run), train.valid_tokens(run)
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    with Meter(run.mesh, run.parameters) as meter:
        run.optimizer.register_step_pre_hook(meter.note_update)
        train.train_step(run, batches, valid)
    assert moments
    return meter.peak_before_update, meter.sent


def count_fake(words: tuple[str, ...], rank: int, ranks: int) -> Counted:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *words, "--comm.mode", "fake_backend"])
    _, meter = rehearse(config)
    return meter.peak_before_update, meter.sent


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Two processes at a time, and one for each call, with all imported: that takes longer than most dry runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as executor:
        yield executor


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_is_what_the_real_step_is(name: str, pool: ProcessPoolExecutor) -> None:
    ranks = LAYOUTS[name][0]
    dry = pool.submit(count_fake, overrides(name), 0, ranks)
    peak, sent = observe(*overrides(name), ranks=ranks, steps=1, at_end=count_real).extra
    dry_peak, dry_sent = dry.result()
    assert dry_sent == sent
    # Zero-bubble stages hold a message more or less, as it comes.
    assert dry_peak == pytest.approx(peak, rel=0.05 if "ZBV" in name else 0.02), dry_peak / peak


def launch_line(recipe: Path) -> dict[str, str]:
    """The variables of the line that starts it, in its head."""
    line = next(line for line in recipe.read_text().splitlines() if "run_train.sh" in line)
    return dict(word.split("=") for word in line.strip("# ").split() if "=" in word)


def ranks_to_show(recipe: Path) -> list[int]:
    """The first rank, and of a pipeline the last too."""
    settings = read_settings(load_config(["--job.config_file", str(recipe)]), launch_line(recipe))
    return [0, settings.world_size - 1] if "pipeline_parallel_degree" in recipe.read_text() else [0]


def dry_run(recipe: Path, rank: int) -> tuple[int, str, float]:
    """As components/start.py does it in another process: exit code, what is printed, and seconds of its own."""
    began, argv = time.process_time(), ["--job.config_file", str(recipe), "--comm.mode", "fake_backend"]
    os.environ |= {**launch_line(recipe), "CUDA_VISIBLE_DEVICES": ""}
    _, settings = check(argv, os.environ)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.world_size)}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(argv)
    return code, said.getvalue(), time.process_time() - began


@pytest.fixture(scope="module")
def dry_runs(pool: ProcessPoolExecutor) -> dict[tuple[Path, int], Future]:
    return {(recipe, rank): pool.submit(dry_run, recipe, rank) for recipe in RECIPES for rank in ranks_to_show(recipe)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_recipe_starts_at_its_full_scale(recipe: Path, dry_runs: dict[tuple[Path, int], Future]) -> None:
    """Each in time, and under the memory of the GPUs that its head names."""
    for rank in ranks_to_show(recipe):
        code, said, seconds = dry_runs[recipe, rank].result()
        assert code == 0
        assert f"rank {rank} of " in said
        assert seconds < 90  # less than 60 alone; beside other work a second of the processor does less
        needed = re.search(r"in all, at the highest point +([\d.]+) GiB", said)
        memory = re.search(r"GPUs of (\d+) GB", recipe.read_text())
        assert needed
        assert float(needed[1]) * 2**30 < 0.92 * int(memory[1] if memory else 16) * 1e9, needed[1]


def test_a_dry_run_needs_nothing_that_the_recipe_names_and_writes_nothing(tmp_path: Path) -> None:
    words = (
        *("--job.config_file", str(RECIPE), "--comm.mode", "fake_backend", "--training.dataset_path", "/nowhere"),
        *("--model.hf_assets_path", "/nowhere", "--job.dump_folder", str(tmp_path / "out")),
        *("--checkpoint.initial_load_path", "/nowhere", "--checkpoint.initial_load_in_hf"),
    )
    done = subprocess.run([str(ROOT / "run_train.sh"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_layout_that_is_refused_is_refused_dry_too() -> None:
    words = ("--job.config_file", str(RECIPE), "--comm.mode", "fake_backend", "--parallelism.tensor_parallel_degree")
    done = subprocess.run(
        [str(ROOT / "run_train.sh"), *words, "16"],
        env={**os.environ, "NGPU": "16"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "tensor_parallel_degree = 16" in done.stderr
