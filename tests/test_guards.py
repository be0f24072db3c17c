"""Updates that are not made: where loss or gradient is not finite, at spikes; and how a run ends after too many."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from components.commands.figures import Observation, broken_bars
from components.commands.observed import whole_weights
from components.launch.exit_codes import ExitCode
from components.observe import guards
from components.observe.guards import Spikes
from parallelize.groups import gather
from tests.harness import observe, rewrite

ALONE = ("--parallelism.data_parallel_shard_degree", "1")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "fsdp 2": ("--training.local_batch_size", "6"),
    "ddp 2": (*ALONE, "--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "18"),
    "tp 2": (*ALONE, "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "12"),
    "pp 2": (*ALONE, "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "12"),
}


def plant(*faults: tuple[str, str, str, str]) -> None:
    for fault in faults:
        rewrite(*fault)


def train_to_the_end(run: train.Run) -> tuple[tuple[int, int, list[int], int], dict[str, torch.Tensor]]:
    """As main does: (exit code, last step, checkpoints that are left, skipped steps), and the weights."""
    config, dump = run.config, Path(run.config.job.dump_folder)
    dump.mkdir(exist_ok=True)
    checkpointer = train.Checkpointer(dump / "checkpoint", config.checkpoint, run.stages, run.optimizer)
    metrics = train.Metrics(config, dist.get_rank(), run.device, run.flops_per_token, "")
    try:
        code = train.train(run, metrics, checkpointer, train.StopSignal())
    except SystemExit as stop:
        code = int(str(stop.code))
    steps = sorted(int(path.name.removeprefix("step-")) for path in (dump / "checkpoint").glob("step-*"))
    return (code, run.step, steps, int(run.guards.skipped_steps)), whole_weights(run)


def diverge(dump: Path, *more: tuple[str, str, str, str], layout: str = "ddp 2", last: int = 100) -> Observation:
    """Every second step is saved, one checkpoint is kept; the loss of rank 1 is not a number in steps 5 to last."""
    poison = f'(float("nan") if 5 <= run.step <= {last} and dist.get_rank() == 1 else 1)'
    return observe(
        *("--job.dump_folder", str(dump), "--checkpoint.enable", "true", "--checkpoint.interval", "2"),
        *("--checkpoint.keep_latest_k", "1", "--metrics.log_freq", "100", "--training.max_nonfinite_steps", "4"),
        *LAYOUTS[layout],
        ranks=2,
        steps=0,
        mutate=functools.partial(plant, ("train", "train_step", "divisor, last)", f"divisor * {poison}, last)"), *more),
        at_end=train_to_the_end,
    )


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_too_many_skipped_steps_end_the_run_with_what_each_rank_saw(layout: str, tmp_path: Path) -> None:
    """Steps 5 to 8 are skipped; no step is logged. Step 8 is saved, so the host waits for it; else it would be 9."""
    observed = diverge(tmp_path, layout=layout)
    ended, left = observed.extra
    assert ended == (ExitCode.NONFINITE, 8, [4, 6], 4), "the last save before the trouble is left"
    healthy = observe(*LAYOUTS[layout], ranks=2, steps=8)
    for rank in (0, 1):
        folder = tmp_path / "nonfinite" / "step-8"
        numbers = json.loads((folder / f"rank_{rank}.json").read_text())
        assert numbers["position"] == 7 * 36
        assert numbers["grad_norm"] == "NaN"
        assert (numbers["own_loss"] == "NaN") == (rank == 1), "the rank that has it"
        assert set(numbers["own_grad_norms"]) == set(observed.weights)
        batch = load_file(folder / f"rank_{rank}.safetensors")
        assert len(numbers["sequences"]) == len(batch["tokens"]) == 18
        assert hashes(batch["tokens"], batch["labels"]) == healthy.sequences["8"][rank * 18 : rank * 18 + 18]
    weights = observe(*LAYOUTS[layout], ranks=2, steps=4).weights
    assert all(torch.equal(left[name], weight) for name, weight in weights.items())


def named_norms(run: train.Run) -> list[dict[str, float]]:
    """Of each rank, as they are written out."""
    assert run.guards.last
    return gather(guards._numbers(run.guards.last, run.stages)["own_grad_norms"])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_norms_that_are_written_out_have_a_tied_table_once(schedule: str) -> None:
    layout = (*LAYOUTS["pp 2"], "--model.flavor", "long_tied", "--parallelism.pipeline_parallel_schedule", schedule)
    observed = observe(*layout, ranks=2, steps=1, at_end=named_norms)
    assert sorted(name for norms in observed.extra for name in norms) == sorted(observed.weights)


def hashes(tokens: torch.Tensor, labels: torch.Tensor) -> list[str]:
    """As the harness hashes sequences."""
    import hashlib

    rows = zip(tokens.numpy(), labels.numpy(), strict=True)
    return [hashlib.blake2b(row.tobytes() + label.tobytes(), digest_size=8).hexdigest() for row, label in rows]


def test_the_host_reads_a_judgement_one_step_late_and_nothing_is_updated_until_then(tmp_path: Path) -> None:
    """Only steps 5 to 8 are not finite. Without a save at 8 the run ends at 9, whose update is not made any more."""
    late = ("train", "save_if_due", "config.due_at(run.step)", "run.step in (2, 4)")
    observed = diverge(tmp_path, late, last=8)
    ended, left = observed.extra
    assert ended == (ExitCode.NONFINITE, 9, [4], 5)
    assert (tmp_path / "nonfinite" / "step-8" / "rank_1.json").exists(), "of the step that was not finite"
    weights = observe(*LAYOUTS["ddp 2"], ranks=2, steps=4).weights
    assert all(torch.equal(left[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("layout", ["ddp 2", "pp 2"])
def test_a_loss_that_is_not_finite_skips_the_step_although_its_gradient_is(layout: str) -> None:
    added = '(float("inf") if dist.get_rank() == 1 else 0)'
    fault = ("parallelize.pipeline", "share_of_loss", "loss / divisor", f"loss / divisor + {added}")
    observed = observe(*LAYOUTS[layout], ranks=2, steps=2, mutate=functools.partial(plant, fault), at_end=count)
    assert observed.extra == {"skipped_steps": 2}
    assert all(torch.equal(observed.weights[name], weight) for name, weight in observed.first_weights.items())


def count(run: train.Run) -> dict[str, float]:
    return run.guards.counts()


SPIKES = ("--training.skip_spikes_sigma", "6", "--training.skip_spikes_window", "8")
SPIKE = ("train", "train_step", "run.step += 1", "run.step += 1; divisor = divisor // (30 if run.step == 7 else 1)")


def state(run: train.Run) -> dict[str, Any]:
    return run.guards.state()


@functools.cache
def spiked(layout: str, *settings: str) -> Observation:
    """Nine steps, with a loss and a gradient 30 times as large at the seventh."""
    fault = functools.partial(plant, SPIKE)
    ranks = 1 if layout == "one" else 2
    return observe(*LAYOUTS.get(layout, ()), *settings, ranks=ranks, steps=9, mutate=fault, at_end=state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_is_skipped_at_every_layout(layout: str) -> None:
    observed, alone = spiked(layout, *SPIKES), spiked("one", *SPIKES)
    assert observed.extra["skipped_steps"] == observed.extra["spikes"]["skipped"] == 1
    assert not broken_bars(observed, alone)
    history, known = (torch.tensor(each.extra["spikes"]["history"]) for each in (observed, alone))
    assert history.shape == (2, 8)
    assert torch.allclose(history, known, rtol=1e-5)


def test_without_the_guard_a_spike_is_an_update_like_others() -> None:
    assert spiked("one").extra == {"skipped_steps": 0}
    assert "weights" in broken_bars(spiked("one"), spiked("one", *SPIKES))


def test_a_resumed_run_knows_the_steps_before(tmp_path: Path) -> None:
    """Saved after step 5: with nothing known of steps 1 to 5 the spike at 7 would be no spike."""
    given, fault = (*SPIKES, "--checkpoint.enable", "true"), functools.partial(plant, SPIKE)
    parts = [observe(*given, steps=steps, mutate=fault, at_end=state, folder=str(tmp_path)) for steps in (5, 4)]
    whole = spiked("one", *SPIKES)
    assert parts[1].extra == whole.extra
    assert all(torch.equal(parts[1].weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_run_that_has_accepted_no_step_yet_can_be_resumed(optimizer: str, tmp_path: Path) -> None:
    """There are no moments yet: these kernels cannot leave a step out, so the host does."""
    given = ("--optimizer.name", optimizer, "--optimizer.implementation", "for-loop", "--checkpoint.enable", "true")
    skips = functools.partial(
        rewrite, "train", "train_step", "divisor, last)", "divisor * (np.nan if run.step < 3 else 1), last)"
    )
    parts = [observe(*given, steps=2, mutate=skips, at_end=state, folder=str(tmp_path)) for _ in range(2)]
    assert [part.extra["skipped_steps"] for part in parts] == [2, 2]
    whole = observe(*given, steps=4, mutate=skips)
    assert all(torch.equal(parts[1].weights[name], weight) for name, weight in whole.weights.items())


def judged(run: train.Run) -> tuple[list[int], list[list[float]]]:
    """Steps found to be spikes: 64 steps around 2, one that is not a number, then a level of 9 that stays."""
    spikes = Spikes(6.0, 64, run.mesh, run.device)
    losses = [2 + 0.1 * math.sin(step) for step in range(64)] + [math.nan] + [9.0] * 20
    found = [step for step, loss in enumerate(losses) if not spikes.judge(torch.tensor(loss), torch.tensor(1.0))[0]]
    return found, spikes.state()["history"]


def test_a_lasting_change_is_soon_accepted_and_what_is_not_finite_is_not_remembered() -> None:
    found, history = observe(steps=0, at_end=judged).extra
    assert found[0] == 65
    assert 1 <= len(found) <= 4
    assert history[0][-20:] == [9.0] * 20
    assert all(math.isfinite(value) for row in history for value in row)
