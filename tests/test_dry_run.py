"""A dry run says what a real step of the same rank holds and sends; and every recipe passes one at its full scale."""

import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train
from components.commands.dry_run import Meter, held, rehearse
from components.commands.start import check
from components.config import ROOT, load_config
from models import MODELS
from models.loss import CHUNK
from parallelize.mesh import global_batch_size, resolve_degrees
from parallelize.schedules import number_of_stages
from tests.harness import observe
from tests.ranks import PRELOADED
from tests.small import CHATS, RECIPE, SMALL

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
LONG = ("--model.flavor", "less_deep", "--training.seq_len", "512", "--training.global_batch_size", "-1")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one, accumulation": (1, ("--training.global_batch_size", "4")),
    "fsdp 2, Muon": (2, ("--optimizer.name", "Muon")),
    "fsdp 2, states on the host": (2, ("--optimizer.state_offload", "true")),
    "hsdp 2x2, accumulation": (
        4,
        ("--parallelism.data_parallel_replicate_degree", "2", "--training.global_batch_size", "16"),
    ),
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
    "adapters that drop, tp 2": (
        2,
        (*("--parallelism.tensor_parallel_degree", "2"), *("--lora.rank", "4", "--lora.dropout", "0.25")),
    ),
    "full checkpointing": (2, ("--activation_checkpoint.mode", "full")),
}


def overrides(name: str) -> tuple[str, ...]:
    local = "4" if "pp" in name else "2"
    return (*LONG, "--training.local_batch_size", local, *LAYOUTS[name][1])


Counted = tuple[int, dict[tuple[str, str], list[int]]]


def count_real(run: train.Run) -> Counted:
    """A step after the first, in which moments are allocated and stages ask each other for shapes; a GPU's chunks."""
    batches, valid = train.local_batches(run), train.divisor(run)
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    with patch.dict(CHUNK, cpu=CHUNK["cuda"]), Meter(run.mesh, run.parameters) as meter:
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


def test_ranks_that_share_columns_of_experts_cut_no_block_of_moments(pool: ProcessPoolExecutor) -> None:
    """Of the debug model's 192 columns each rank would have two, half a block."""
    flavor = ("--model.name", "qwen3_moe", "--model.flavor", "debug", "--optimizer.state_dtype", "int8")
    batch = ("--training.local_batch_size", "1", "--training.global_batch_size", "96")
    pool.submit(count_fake, (*flavor, *batch), 0, 96).result()


def test_experts_of_rows_with_padding_are_counted_with_full_rows(pool: ProcessPoolExecutor) -> None:
    moe = (
        "--model.name",
        "qwen3_moe",
        "--training.local_batch_size",
        "18",
        "--parallelism.expert_parallel_degree",
        "2",
    )
    whole, padded = (pool.submit(count_fake, (*moe, *words), 0, 2) for words in ((), CHATS))
    assert padded.result()[1] == whole.result()[1]
    assert padded.result()[0] >= whole.result()[0]


def kept_of_a_wide_vocabulary() -> int:
    """Bytes besides weights and gradients, of 4,096 tokens; in a process of its own."""
    flavors = MODELS["llama"][1]
    flavors["debug"] = replace(flavors["debug"], vocab_size=128_256, n_layers=1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    run, meter = rehearse(load_config(["--job.config_file", str(RECIPE), *LONG_BATCH]))
    return held(run, meter)["activations, gathered weights, buffers"]


LONG_BATCH = ("--training.seq_len", "512", "--training.local_batch_size", "8", "--training.global_batch_size", "-1")


def test_logits_are_those_of_a_gpu(pool: ProcessPoolExecutor) -> None:
    """2,048 tokens of a vocabulary of 128k: logits, probabilities and their difference, in float32."""
    logits = 4 * 2048 * 128_256
    assert 2 * logits < pool.submit(kept_of_a_wide_vocabulary).result() < 4 * logits


def launch_line(recipe: Path) -> dict[str, str]:
    """The variables of the line that starts it, in its head."""
    line = next(line for line in recipe.read_text().splitlines() if "run_train.sh" in line)
    return dict(word.split("=") for word in line.strip("# ").split() if "=" in word)


@dataclass(frozen=True)
class DryRun:
    """Bytes held at the highest point, and number of messages of each kind in a step."""

    peak: float
    sent: dict[tuple[str, str], float]


def dry_run(words: tuple[str, ...], rank: int, ranks: int, layers: int) -> DryRun:
    """Of one rank, with so many layers."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    config = load_config([*words, "--comm.mode", "fake_backend"])
    flavors = MODELS[config.model.name][1]
    flavors[config.model.flavor] = replace(flavors[config.model.flavor], n_layers=layers)
    run, meter = rehearse(config)
    dist.destroy_process_group()
    peak = held(run, meter)["in all, at the highest point"]
    return DryRun(peak, {kind: number for kind, (number, _) in meter.sent.items()})


def at_full_depth(words: tuple[str, ...], rank: int, ranks: int) -> DryRun:
    """What a dry run of all layers says, from two with few layers: what a layer adds is the same for each.

    Two in each stage and one more, or two more where every second layer is checkpointed. With experts three: gathered
    experts of two layers are there only from the third on; and before them all layers without experts.
    """
    config = load_config([*words])
    layers = MODELS[config.model.name][1][config.model.flavor].n_layers
    stages = number_of_stages(config.parallelism, layers)
    checkpoint = config.activation_checkpoint
    step = stages * (2 if (checkpoint.mode, checkpoint.selective_ac_option) == ("selective", "2") else 1)
    sizes = MODELS[config.model.name][1][config.model.flavor]
    dense = getattr(sizes, "n_dense_layers", 0) * step  # so many in the first stage, before those with experts
    few = layers % step + dense + (3 if hasattr(sizes, "n_experts") else 2) * stages
    if 2 * few + step > layers:  # which takes less than both
        return dry_run(words, rank, ranks, layers)
    less, more = (dry_run(words, rank, ranks, depth) for depth in (few, few + step))
    steps = (layers - few) // step

    def extend(low: float, high: float) -> float:
        return low + (high - low) * steps

    sent = {kind: extend(less.sent[kind], number) for kind, number in more.sent.items()}
    return DryRun(extend(less.peak, more.peak), sent)


def in_short(words: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """The words of a step with as few batches as hold most: two of accumulation, two micro-batches for each rank.

    With one stage on a rank, one micro-batch more than ranks.
    """
    config = load_config([*words])
    parallelism, local = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        stages = number_of_stages(parallelism, MODELS[config.model.name][1][config.model.flavor].n_layers)
        ranks_of_pipeline = parallelism.pipeline_parallel_degree
        micro_batches = ranks_of_pipeline + 1 if stages == ranks_of_pipeline else 2 * ranks_of_pipeline
        local = min(local, micro_batches * parallelism.pipeline_parallel_microbatch_size)
    degrees = resolve_degrees(config, ranks)
    batches = min(2, global_batch_size(config, degrees) // (config.training.local_batch_size * degrees.batch_ranks))
    sizes = {"local_batch_size": local, "global_batch_size": batches * local * degrees.batch_ranks}
    return (*words, *(word for key, value in sizes.items() for word in (f"--training.{key}", str(value))))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_few_micro_batches_tell_what_all_would_take(schedule: str, pool: ProcessPoolExecutor) -> None:
    """A stage does not hold a buffer for each message of a step (pytorch issue 136380)."""
    words = ("--job.config_file", str(RECIPE), *SMALL, "--parallelism.pipeline_parallel_degree", "2")
    words += (*("--parallelism.pipeline_parallel_schedule", schedule), *("--training.seq_len", "512"))
    words += (*("--training.local_batch_size", "12"), *("--training.global_batch_size", "24"))
    found = [pool.submit(dry_run, each, 1, 2, 8).result() for each in (words, in_short(words, 2))]
    tokens = 8 * 512 * 12  # of whole batches: tokens, labels, positions
    assert found[1].peak <= found[0].peak <= found[1].peak + 4 * tokens


def twice(words: tuple[str, ...]) -> list[DryRun]:
    return [dry_run(words, 0, 16, 4) for _ in range(2)]


def test_what_a_first_dry_run_has_to_learn_is_not_counted(pool: ProcessPoolExecutor) -> None:
    """DTensor learns the global shapes of sums of gradients from fake tensors, once in a process."""
    words = (
        *("--job.config_file", str(ROOT / "recipes" / "llama70b_tp4_pp8_dp4.toml"), "--training.seq_len", "256"),
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"),
        *("--training.local_batch_size", "2", "--training.global_batch_size", "8"),
    )
    first, second = pool.submit(twice, words).result()
    assert first == second


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("--job.config_file", str(ROOT / "recipes" / "llama8b_fsdp4_tp2.toml")), 8),
        (("--job.config_file", str(RECIPE), *SMALL, *overrides("pp 2")), 2),
    ],
    ids=["8B", "pipeline"],
)
def test_a_few_layers_tell_what_all_would_take(words: tuple[str, ...], ranks: int, pool: ProcessPoolExecutor) -> None:
    layers = 32 if ranks == 8 else 8
    found = [pool.submit(at_full_depth, words, 0, ranks), pool.submit(dry_run, words, 0, ranks, layers)]
    told, whole = (each.result() for each in found)
    assert told.sent == whole.sent
    assert told.peak == pytest.approx(whole.peak, rel=0.005)


@pytest.fixture(scope="module")
def dry_runs(pool: ProcessPoolExecutor) -> dict[Path, list[Future]]:
    """Dry runs of each recipe's first rank, and of a pipeline's last rank too, checked as by run_train.sh."""
    found: dict[Path, list[Future]] = {}
    for recipe in RECIPES:
        words, environment = ("--job.config_file", str(recipe)), launch_line(recipe) | {"CUDA_VISIBLE_DEVICES": ""}
        config, settings = check([*words, "--comm.mode", "fake_backend"], environment)
        ranks = settings.world_size
        shown = {0, ranks - 1} if config.parallelism.pipeline_parallel_degree > 1 else {0}
        found[recipe] = [pool.submit(at_full_depth, in_short(words, ranks), rank, ranks) for rank in shown]
    return found


@pytest.mark.slow  # the first waits for the dry runs of all
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_recipe_starts_at_its_full_scale(recipe: Path, dry_runs: dict[Path, list[Future]]) -> None:
    """Each under the memory of the GPUs that its head names."""
    memory = re.search(r"GPUs? of (\d+) GB", recipe.read_text())
    for found in (future.result() for future in dry_runs[recipe]):
        assert 0.01 * 2**30 < found.peak < 0.92 * int(memory[1] if memory else 16) * 1e9


@pytest.mark.quick
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
