"""load_step and exclude_from_loading act once: the same command, interrupted at any time, only goes forward."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train
from components.config import Training
from components.observe.guards import Guards
from tests.checkpoints import checkpointer, content, names, run, saved, small, value_of


class _Run(SimpleNamespace):
    """The numbers of a run, of 7 sequences a step."""

    def state(self) -> dict[str, Any]:
        numbers = {"sequences": self.sequences, "tokens": self.tokens, **self.guards.state()}
        return {**numbers, "data_order": {}, "global_batch_size": 7}


def _start(folder: Path, until: int, prune: bool, config: dict[str, Any]) -> tuple[int, int]:
    """Start the command and train to a step, saving every fourth; returns the step and sequence that it began at."""
    saver = checkpointer(folder, 99, interval=4, **config)
    table = SimpleNamespace(checkpoint=saver.config, training=SimpleNamespace(global_batch_size=7, steps=99))
    guards = Guards(Training(), folder, None, torch.device("cpu"))  # type: ignore[arg-type]
    job: Any = _Run(config=table, step=0, sequences=0, tokens=0, guards=guards, mesh=None)
    train.resume(job, saver)
    began = job.step, job.sequences
    while job.step < until:
        job.step, job.sequences = job.step + 1, job.sequences + 7
        if job.step % 4 == 0:
            saver.save(job.step, job.state(), prune=prune)
    return began


def command(folder: Path, until: int, prune: bool = True, **config: Any) -> tuple[int, int]:
    return value_of(_start, folder, until, prune, config)


def test_load_step_goes_back_once(tmp_path: Path) -> None:
    command(tmp_path, 16)
    again: dict[str, Any] = {"load_step": 8, "keep_latest_k": 2}
    printed = run(_start, tmp_path, 9, True, again)[0].printed
    assert "a new branch begins at step 8; later steps are put aside as abandoned-step-N: 12, 16" in printed
    assert names(tmp_path) == {"step-4", "step-8", "abandoned-step-12", "abandoned-step-16"}
    begins = [command(tmp_path, until, **again) for until in (11, 13, 17, 22, 26)]
    assert begins == [(8, 56), (8, 56), (12, 84), (16, 112), (20, 140)]
    assert names(tmp_path) == {"step-20", "step-24", "abandoned-step-12", "abandoned-step-16"}, "step 8 was pruned"
    printed = run(_start, tmp_path, 25, True, again)[0].printed
    assert "checkpoint.load_step = 8: this branch began there, and goes on" in printed
    assert "continuing after step 24" in printed


def test_load_step_acts_again_after_a_start_without_it(tmp_path: Path) -> None:
    command(tmp_path, 16)
    assert command(tmp_path, 12, load_step=8) == (8, 56)
    assert command(tmp_path, 16, load_step=4) == (4, 28), "another step is another request"
    assert names(tmp_path) >= {"abandoned-step-12", "abandoned-step-12-2", "abandoned-step-16", "abandoned-step-8"}
    assert command(tmp_path, 20) == (16, 112)
    assert command(tmp_path, 16, load_step=4) == (4, 28)


def test_a_branch_that_was_not_saved_yet_begins_again_at_its_step(tmp_path: Path) -> None:
    command(tmp_path, 16)
    for _ in range(3):
        assert command(tmp_path, 11, load_step=8) == (8, 56)
    assert command(tmp_path, 11) == (8, 56), "without load_step the newest that is not put aside"


def test_an_excluded_data_position_is_excluded_once(tmp_path: Path) -> None:
    command(tmp_path, 8)
    anew: dict[str, Any] = {"exclude_from_loading": ["dataloader"]}
    begins = [command(tmp_path, until, **anew) for until in (10, 13, 17, 19, 21)]
    assert begins == [(8, 0), (8, 0), (12, 28), (16, 56), (16, 56)]
    assert command(tmp_path, 21, exclude_from_loading=["dataloader", "optimizer"]) == (20, 84), "only what is new"


def test_an_excluded_step_is_excluded_once(tmp_path: Path) -> None:
    """The checkpoint that the branch began with stays until the branch has one of its own."""
    command(tmp_path, 12)
    anew: dict[str, Any] = {"exclude_from_loading": ["train_state"]}
    assert command(tmp_path, 3, **anew) == (0, 84)
    assert names(tmp_path) == {"step-4", "step-8", "step-12"}
    assert command(tmp_path, 5, **anew) == (0, 84)
    assert names(tmp_path) == {"step-4", *(f"abandoned-step-{step}" for step in (4, 8, 12))}
    begins = [command(tmp_path, until, **anew) for until in (9, 13)]
    assert begins == [(4, 112), (8, 140)]
    assert names(tmp_path) == {*(f"{prefix}step-{step}" for step in (4, 8, 12) for prefix in ("", "abandoned-"))}


def test_the_only_checkpoint_survives_a_kill_while_its_step_is_saved_anew(tmp_path: Path) -> None:
    command(tmp_path, 4)
    assert command(tmp_path, 4, exclude_from_loading=["train_state"]) == (0, 28)
    assert names(tmp_path) == {"step-4", "abandoned-step-4"}
    # As a kill between two renames leaves it: what was replaced, and its replacement.
    (tmp_path / "abandoned-step-4").rename(tmp_path / ".replaced-step-4")
    assert command(tmp_path, 4, exclude_from_loading=["train_state"]) == (4, 56)
    assert names(tmp_path) == {"step-4", "abandoned-step-4"}


def test_a_folder_of_others_with_the_name_of_a_step_is_put_aside(tmp_path: Path) -> None:
    """torchtitan's checkpoint, or an export: they have no state.json, as if they were of the first branch."""
    command(tmp_path, 4)
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "model.safetensors").write_text("precious")
    command(tmp_path, 8)
    assert names(tmp_path) == {"step-4", "step-8", "abandoned-step-8"}
    assert (tmp_path / "abandoned-step-8" / "model.safetensors").read_text() == "precious"


def test_excluded_at_the_first_start_is_not_excluded_later(tmp_path: Path) -> None:
    anew: dict[str, Any] = {"exclude_from_loading": ["dataloader", "optimizer", "train_state"]}
    assert command(tmp_path, 8, **anew) == (0, 0)
    assert command(tmp_path, 8, **anew) == (8, 56)


def _loads_moments(folder: Path, seed: int) -> bool:
    loader = checkpointer(folder, seed, exclude_from_loading=["optimizer"])
    loader.load()
    got, kept = content(loader.stages[0], loader.optimizer), content(*small(seed))
    assert got["0.weight"] == content(*small(10))["0.weight"]
    loader.save(12, {"sequences": 84})
    return got["0.weight.exp_avg"] != kept["0.weight.exp_avg"]


def test_an_excluded_optimizer_is_excluded_once(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    assert [value_of(_loads_moments, tmp_path, seed) for seed in (98, 99)] == [False, True]


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(tmp_path: Path) -> None:
    assert command(tmp_path, 8) == (0, 0)
    assert command(tmp_path, 8) == (8, 56), "nothing is left to do"
    assert command(tmp_path, 12) == (8, 56)
    assert names(tmp_path) == {"step-4", "step-8", "step-12"}


def test_load_only_renames_nothing(tmp_path: Path) -> None:
    command(tmp_path, 16)
    before = names(tmp_path)
    assert command(tmp_path, 8, load_step=8, load_only=True) == (8, 56)
    assert names(tmp_path) == before


# ------------------------------------------------------------------------------------------- in doubt


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_good_save_survives_steps_that_are_skipped(tmp_path: Path, keep: int) -> None:
    command(tmp_path, 8, keep_latest_k=2)
    command(tmp_path, 24, prune=False, keep_latest_k=keep)
    assert names(tmp_path) == {f"step-{step}" for step in (4, 8, 12, 16, 20, 24)}
    command(tmp_path, 28, keep_latest_k=keep)
    assert names(tmp_path) == ({"step-28"} if keep == 1 else {"step-8", "step-28"})
