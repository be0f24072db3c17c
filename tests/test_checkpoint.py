"""Checkpoints on real ranks: any layout loads what any other saved; what is kept, what fits, what a run starts from."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import train
from components.commands.observed import whole as whole_tensor
from components.config import Checkpoint, Training, load_config
from components.optim.optimizer import build_optimizer
from components.state.checkpoint import Checkpointer
from components.state.init import give_memory, initialize_weights
from components.state.tensors import SavedWeights
from models import meta_model
from parallelize import parallelize_model
from parallelize.mesh import Mesh, resolve_degrees
from tests.checkpoints import (
    checkpointer,
    content,
    flip_a_bit,
    fork_ranks,
    load,
    names,
    nursery,
    run,
    save,
    saved,
    small,
    value_of,
    weights,
)
from tests.small import RECIPE, SMALL

# --------------------------------------------------------------------------------------------- layouts

LAYOUTS = {"one rank": (1, 1), "ddp 2": (2, 1), "fsdp 2": (1, 2), "hsdp 2x2": (2, 2), "fsdp 3": (1, 3)}


def _build(replicate: int, shard: int, seed: int) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    """As train.py builds them; nothing in this flavor divides by 2, 3 or 4."""
    degrees = {"replicate": replicate, "shard": shard}
    overrides = [word for n, size in degrees.items() for word in (f"--parallelism.data_parallel_{n}_degree", str(size))]
    argv = ["--job.config_file", str(RECIPE), *SMALL, "--model.flavor", "odd", "--debug.seed", str(seed), *overrides]
    config = load_config(argv)
    mesh = Mesh(resolve_degrees(config, dist.get_world_size()), "cpu")
    whole = meta_model(config.model)
    stages = parallelize_model(config.model.name)(whole, mesh, config)
    give_memory(stages, torch.device("cpu"))
    for stage in stages:
        initialize_weights(stage, stage.init_std, seed)
    return stages, build_optimizer(stages, config.optimizer)


def _gathered(stages: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    whole = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            whole[name] = whole_tensor(parameter)
            whole |= {f"{name} {moment}": whole_tensor(value) for moment, value in optimizer.state[parameter].items()}
    return whole


def _save_layout(replicate: int, shard: int, folder: Path, seed: int, mode: str) -> None:
    stages, optimizer = _build(replicate, shard, seed)
    for step in range(seed):
        for stage in stages:
            for parameter in stage.parameters():
                parameter.grad = parameter.detach() * 0.1 + 0.01 * (step + 1)
        optimizer.step()
    saver = Checkpointer(folder, Checkpoint(enable=True, async_mode=mode), stages, optimizer)  # type: ignore[arg-type]
    saver.save(seed, {})
    expected = _gathered(stages, optimizer)
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data.zero_()  # training goes on while the copy is written
    saver.wait()
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def _load_layouts(replicate: int, shard: int, folders: dict[str, Path]) -> list[str]:
    """Differences, after loading each of the folders into one model."""
    stages, optimizer = _build(replicate, shard, 77)
    wrong = []
    for name, folder in folders.items():
        Checkpointer(folder, Checkpoint(enable=True), stages, optimizer).load()
        got, expected = _gathered(stages, optimizer), torch.load(folder / "expected.pt")
        assert got.keys() == expected.keys()
        assert any(key.endswith(" exp_avg_sq") for key in got)
        assert any(key.endswith(" step") for key in got)
        wrong += [f"{name}: {key}" for key in got if not torch.equal(got[key], expected[key])]
    return wrong


def _all_layouts(folder: Path) -> list[str]:
    folders = {name: folder / name for name in LAYOUTS}  # paths with spaces
    wrong = []
    for seed, (name, (replicate, shard)) in enumerate(LAYOUTS.items(), 1):
        mode = "async" if seed % 2 else "disabled"
        outcomes = fork_ranks(replicate * shard, _save_layout, replicate, shard, folders[name], seed, mode)
        wrong += [f"saving {name}: {outcome.error}" for outcome in outcomes if outcome.code]
    for name, (replicate, shard) in LAYOUTS.items():
        for outcome in fork_ranks(replicate * shard, _load_layouts, replicate, shard, folders):
            wrong += [f"{name} loads {key}" for key in outcome.value or []]
            wrong += [f"loading {name}: {outcome.error}"] if outcome.code else []
    return wrong


def test_every_layout_loads_what_every_other_saved_bit_by_bit(tmp_path: Path) -> None:
    assert nursery(_all_layouts, tmp_path) == []


# ------------------------------------------------------------------------------------------- pruning


def test_pruning_counts_only_whole_checkpoints_and_leaves_strangers_alone(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    for step in (20, 30):
        shutil.copytree(tmp_path / "step-10", tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "__0_0.distcp").unlink()
    strangers = {"my-step-5-backup", "step-10-old", "step-005", "notes"}
    for name in strangers:
        shutil.copytree(tmp_path / "step-10", tmp_path / name)
    saved(tmp_path, 40, keep_latest_k=2)
    assert names(tmp_path) == strangers | {"step-10", "step-20", "step-30", "step-40"}
    saved(tmp_path, 50, keep_latest_k=2)
    assert names(tmp_path) == strangers | {"step-20", "step-30", "step-40", "step-50"}
    saved(tmp_path, 60, keep_latest_k=1)
    assert names(tmp_path) == strangers | {"step-20", "step-30", "step-60"}


def test_what_was_just_saved_is_kept_even_if_there_are_later_steps(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15, keep_latest_k=2)
    assert names(tmp_path) == {"step-15", "step-30"}


def test_zero_keeps_all(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 13), keep_latest_k=0)
    assert len(names(tmp_path)) == 12
    saved(tmp_path, 13)
    assert names(tmp_path) == {f"step-{step}" for step in range(4, 14)}


# -------------------------------------------------------------------------------- what does not fit


def _load_sizes(folder: Path, sizes: tuple[int, ...], config: dict[str, Any]) -> None:
    checkpointer(folder, 99, sizes, **config).load()


def test_every_name_and_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    error = run(_load_sizes, tmp_path, (6, 7, 3), {})[0].error
    for line in (
        "model.0.weight is (5, 6) there and (7, 6) here",
        "model.0.bias is (5,) there and (7,) here",
        "model.1.weight is (3, 5) there and (3, 7) here",
        "optimizer.0.weight.exp_avg is (5, 6) there and (7, 6) here",
        "optimizer.1.weight.exp_avg_sq is (3, 5) there and (3, 7) here",
    ):
        assert f"{tmp_path}/step-10 does not fit this model: {line}" in error
    more = run(_load_sizes, tmp_path, (6, 5, 3, 2), {})[0].error
    assert "model.2.weight is missing" in more
    assert "optimizer.2.bias.step is missing" in more
    less = run(_load_sizes, tmp_path, (6, 5), {"exclude_from_loading": ["optimizer"]})[0].error
    assert "model.1.weight is not in this model" in less
    assert "optimizer" not in less.replace("exclude", "")
    both = run(_load_sizes, tmp_path, (6, 5), {})[0].error
    assert "optimizer.1.weight.exp_avg is not in this model" in both


def _weights_only(folder: Path, config: dict[str, Any], initial: bool = False) -> tuple[Any, bool, bool]:
    """State, whether the weights are those of the state's step, and whether the optimizer is as it was."""
    loader = checkpointer(folder, 99, **config)
    before = content(loader.stages[0], loader.optimizer)
    state = loader.load_initial() if initial else loader.load()
    after = content(loader.stages[0], loader.optimizer)
    step = 10 if state is None else state["step"]
    moments = all(before[name] == after[name] for name in before if name not in weights(loader.stages[0]))
    return state, weights(loader.stages[0]) == weights(small(step)[0]), moments


def test_without_the_optimizer(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    state, same_weights, same_moments = value_of(_weights_only, tmp_path, {"exclude_from_loading": ["optimizer"]})
    assert (state["step"], same_weights, same_moments) == (10, True, True)


class _Counting(torch.optim.SGD):
    """Keeps numbers of its own beside a tensor, as old optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state |= {"steps": state.get("steps", 0) + 1, "decay": 0.1 / (1 + state.get("steps", 0)), "unset": None}


def _counting(steps: int) -> Checkpointer:
    """A checkpointer of a model whose first weight is frozen, after this many steps."""
    model = small(0)[0]
    first, *trained = model.parameters()
    first.requires_grad_(False)
    optimizer = _Counting(trained, lr=0.1, momentum=0.9)
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    return Checkpointer(Path("checkpoint"), Checkpoint(enable=True), [model], optimizer)


def _save_and_load_counting(folder: Path) -> tuple[list[dict[str, Any]], ...]:
    os.chdir(folder)
    saver, loader = _counting(3), _counting(0)
    saver.save(3, {})
    loader.load()
    names = saver._tensors(with_optimizer=True)
    assert "model.0.weight" in names
    assert "optimizer.0.weight.steps" not in names
    kept = ([*one.optimizer.state.values()] for one in (saver, loader))
    return tuple([{**state, "momentum_buffer": state["momentum_buffer"].tolist()} for state in one] for one in kept)


def test_numbers_that_an_optimizer_keeps_are_saved_and_what_is_frozen_has_none(tmp_path: Path) -> None:
    before, after = value_of(_save_and_load_counting, tmp_path)
    assert len(before) == len(after) == 3
    for was, found in zip(before, after, strict=True):
        assert (was["momentum_buffer"], 3, 0.1 / 3) == (found["momentum_buffer"], found["steps"], found["decay"])
        assert type(found["steps"]) is int


def _save_model_only(folder: Path, step: int) -> None:
    save(folder, step, model_only=True)


def test_a_checkpoint_of_weights_alone_is_not_resumed_from_but_can_be_started_from(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    value_of(_save_model_only, tmp_path, 10)
    assert b"optimizer" not in (tmp_path / "step-10" / ".metadata").read_bytes()
    assert b"optimizer" in (tmp_path / "step-5" / ".metadata").read_bytes()
    outcome = run(load, tmp_path)[0]
    assert (outcome.error, outcome.value) == ("", 5)
    assert f"checkpoint {tmp_path}/step-10 passed over: it holds only weights" in outcome.printed
    assert "step-10" in names(tmp_path)
    assert "it holds only weights" in run(load, tmp_path, 10)[0].error
    for path in (tmp_path, tmp_path / "step-10"):
        config = {"initial_load_path": str(path)}
        assert value_of(_weights_only, tmp_path / "new run", config, True) == (None, True, True)
    both = {"initial_load_path": str(tmp_path / "step-10"), "initial_load_model_only": False}
    assert "it holds only weights" in run(_weights_only, tmp_path / "new run", both, True)[0].error
    assert value_of(_resume_from, tmp_path, {"initial_load_model_only": False}) == 5
    assert [value_of(_last_weights, tmp_path, steps) for steps in (9, 10, 11)] == [(10, True)] * 2 + [(5, False)]


def _read_removed(folder: Path) -> None:
    there = SavedWeights([folder / "step-5"])
    shutil.rmtree(folder / "step-5")
    dict(there)


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_told(tmp_path: Path) -> None:
    outcome = run(_read_removed, saved(tmp_path, 5))[0]
    assert f"ConfigError: {tmp_path}/step-5: removed while it was read" in outcome.error


def _last_weights(folder: Path, steps: int) -> tuple[int, bool]:
    """Loads a checkpoint for a run of this many steps; returns its step, and whether the optimizer is new."""
    loader = checkpointer(folder, 99)
    state = loader.load(steps)
    assert state
    assert weights(loader.stages[0]) == weights(small(state["step"])[0])
    own = content(loader.stages[0], loader.optimizer)
    return state["step"], own != content(*small(state["step"]))


def _resume_from(folder: Path, config: dict[str, Any]) -> int:
    loader = checkpointer(folder / "new run", 99, initial_load_path=str(folder), **config)
    assert loader.load() is None
    state = loader.load_initial()
    assert state is not None
    assert content(loader.stages[0], loader.optimizer) == content(*small(state["step"]))
    return state["step"]


def _start(folder: Path, initial: Path) -> None:
    loader = checkpointer(folder, 99, initial_load_path=str(initial))
    train.resume(_FakeRun(loader.config), loader)  # type: ignore[arg-type]
    assert weights(loader.stages[0]) == weights(small(10)[0])


class _FakeRun:
    def __init__(self, config: Checkpoint) -> None:
        self.config = self
        self.checkpoint, self.training, self.mesh = config, Training(), None


def test_with_only_torn_checkpoints_the_initial_weights_are_taken(tmp_path: Path) -> None:
    initial = saved(tmp_path / "initial", 5, 10, 20)
    flip_a_bit(initial / "step-20")
    own = saved(tmp_path / "own", 10, 20)
    for step in (10, 20):
        (own / f"step-{step}" / "__0_0.distcp").unlink()
    outcome = run(_start, own, initial)[0]
    assert outcome.error == ""
    for line in (
        f"checkpoint {own}/step-10 passed over: ",
        f"checkpoint {own}/step-20 passed over: ",
        f"checkpoint {initial}/step-20 passed over: __0_0.distcp is corrupt",
        f"no checkpoint in {own} can be continued: checkpoint.initial_load_path is taken",
        f"weights from {initial}",
    ):
        assert line in outcome.printed
    assert names(own) == {"corrupt-step-10", "corrupt-step-20"}
    assert names(initial) == {"step-5", "step-10", "step-20"}


def test_an_initial_path_without_a_good_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = run(_start, tmp_path / "own", tmp_path / "empty")[0].error
    assert error.startswith(f"ConfigError: checkpoint.initial_load_path: {tmp_path}/empty: no step-N folder in it; ")
    saved(tmp_path, 10)
    flip_a_bit(tmp_path / "step-10")
    error = run(_start, tmp_path / "own", tmp_path / "step-10")[0].error
    assert f"{tmp_path}/step-10: __0_0.distcp is corrupt" in error
