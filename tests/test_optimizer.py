"""Learning rates by step, clipping, groups by role; and what holds of every optimizer and schedule, added ones too."""

import json
import math
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import train
from components.config import ConfigError, LRScheduler, Optimizer, load_config
from components.config.optimizer import OPTIMIZER_KEYS
from components.observe.describe import describe_rate, describe_rate_change
from components.optim.optimizer import (
    OPTIMIZERS,
    RATE_SCHEDULES,
    build_optimizer,
    clip_gradients,
    learning_rate,
    rate_settings,
    state_bytes,
    update,
)
from components.state.init import initialize_weights
from models.llama import FLAVORS, Llama
from models.parameters import Role
from parallelize.sharding import exact_norms
from tests.harness import observe


def rates(steps: int, **settings: object) -> list[float]:
    config = LRScheduler(**settings)  # type: ignore[arg-type]
    return [learning_rate(step, config, 1.0, steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(10, warmup_steps=4, decay_ratio=0.0)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_stable_then_decay() -> None:
    found = rates(100, warmup_steps=10, decay_ratio=0.2, min_lr_factor=0.1)
    assert set(found[9:80]) == {1.0}
    assert found[80] < 1
    assert found[-1] == pytest.approx(0.1)
    assert found == sorted(found[:10]) + sorted(found[10:], reverse=True)


HALVES = {"linear": 0.5, "cosine": 0.5, "sqrt": 1 - math.sqrt(0.5), "rex": 2 / 3}


@pytest.mark.parametrize(("shape", "half"), HALVES.items())
def test_decay_shapes(shape: str, half: float) -> None:
    found = rates(100, warmup_steps=0, decay_type=shape)
    assert found[49] == pytest.approx(half)
    assert found[-1] == pytest.approx(0)


@pytest.mark.parametrize("shape", sorted({*RATE_SCHEDULES} - {"constant"}))
def test_a_schedule_falls_from_the_peak_to_the_minimum(shape: str) -> None:
    found = rates(100, warmup_steps=10, decay_ratio=0.5, decay_type=shape, min_lr_factor=0.1)
    assert found[9:50] == [1.0] * 41
    assert found[50:] == sorted(set(found[50:]), reverse=True)
    assert found[-1] == pytest.approx(0.1)


def test_total_steps_goes_before_training_steps() -> None:
    config = LRScheduler(warmup_steps=0, total_steps=200)
    assert learning_rate(100, config, 1.0, 100) == pytest.approx(0.5)


def test_a_default_warm_up_is_no_longer_than_the_schedule() -> None:
    for words, steps in (("--training.steps 10", 10), ("--lr_scheduler.total_steps 30 --training.steps 10", 30)):
        assert load_config(words.split()).lr_scheduler.warmup_steps == steps
    assert load_config([]).lr_scheduler.warmup_steps == LRScheduler.warmup_steps == 200


def test_a_run_may_end_within_its_warm_up_and_is_told_so() -> None:
    words = ["--training.steps", "20", "--lr_scheduler.warmup_steps", "30"]
    config = load_config(words).lr_scheduler
    found = [learning_rate(step, config, 3.0, 20) for step in range(1, 21)]
    assert found == [3.0 * step / 30 for step in range(1, 21)]
    assert describe_rate(config.warmup_steps, 20) == [
        "training.steps = 20 ends within lr_scheduler.warmup_steps = 30: the rate only rises, to 67% of its peak"
    ]
    assert describe_rate(30, 30) == []
    assert load_config(words[:2]).lr_scheduler.warmup_steps == 20


BEFORE = "--training.steps 300 --lr_scheduler.warmup_steps 100 --lr_scheduler.min_lr_factor 0.2 --optimizer.lr 1e-3"
TOTAL = "lr_scheduler.total_steps (training.steps if unset) was 300 and is"
CHANGES: dict[str, tuple[str, int, list[str]]] = {
    "the same": ("", 100, []),
    "another decay, which comes later": (
        "--lr_scheduler.decay_ratio 0.5",
        100,
        [
            "the learning rate of step 101 is 1.00e-03; in the schedule of the checkpoint, 9.96e-04: "
            "lr_scheduler.decay_ratio was unset and is 0.5",
            "to keep that schedule, set no lr_scheduler.decay_ratio",
        ],
    ),
    "a finished run goes on": (
        "--training.steps 600",
        300,
        [
            f"the learning rate of step 301 is 6.78e-04; in the schedule of the checkpoint, 2.00e-04: {TOTAL} 600",
            "that schedule has ended; to stay at its last rate, set optimizer.lr = 0.0002, "
            'lr_scheduler.decay_type = "constant", lr_scheduler.warmup_steps = 0',
        ],
    ),
    "what was said is done": (
        "--training.steps 600 --optimizer.lr 2e-4 --lr_scheduler.decay_type constant --lr_scheduler.warmup_steps 0",
        300,
        [],
    ),
    "more steps before the end": (
        "--training.steps 600",
        200,
        [
            f"the learning rate of step 201 is 8.38e-04; in the schedule of the checkpoint, 5.96e-04: {TOTAL} 600",
            "that schedule ends at step 300; to keep it, set lr_scheduler.total_steps = 300, training.steps = 300",
        ],
    ),
    "fewer steps": (
        "--training.steps 250",
        200,
        [
            f"the learning rate of step 201 is 4.61e-04; in the schedule of the checkpoint, 5.96e-04: {TOTAL} 250",
            "to keep that schedule, set lr_scheduler.total_steps = 300",
        ],
    ),
    "fewer steps of that schedule": ("--training.steps 250 --lr_scheduler.total_steps 300", 200, []),
    "another peak and warm-up": (
        "--optimizer.lr 2e-3 --lr_scheduler.warmup_steps 50",
        20,
        [
            "the learning rate of step 21 is 8.40e-04; in the schedule of the checkpoint, 2.10e-04: "
            "optimizer.lr was 0.001 and is 0.002, lr_scheduler.warmup_steps was 100 and is 50",
            "to keep that schedule, set optimizer.lr = 0.001, lr_scheduler.warmup_steps = 100",
        ],
    ),
    "a role": (
        "--optimizer.embedding.lr_factor 0.5",
        20,
        [
            "the learning rate of step 21 is 2.10e-04; in the schedule of the checkpoint, 2.10e-04: "
            "optimizer.embedding.lr_factor was 1.0 and is 0.5",
            "to keep that schedule, set optimizer.embedding.lr_factor = 1.0",
        ],
    ),
    "from step 0 on": ("--optimizer.lr 2e-3", 0, []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_schedule_that_is_not_that_of_the_checkpoint_is_said_with_both_rates(change: str) -> None:
    words, step, said = CHANGES[change]
    saved = json.loads(json.dumps(rate_settings(load_config(BEFORE.split()))))
    config = load_config([*BEFORE.split(), *words.split()])
    assert describe_rate_change(config, saved, step) == said
    assert describe_rate_change(config, {}, step) == [], "of an older version"


def test_a_schedule_that_ended_at_0_leaves_no_rate_to_go_on_with() -> None:
    saved = rate_settings(load_config(["--training.steps", "300"]))
    said = describe_rate_change(load_config(["--training.steps", "400"]), saved, 300)
    assert said[1] == "that schedule has ended with the rate 0"
    for steps in ("300", "200"):
        assert describe_rate_change(load_config(["--training.steps", steps]), {}, 300) == [
            f"no step is left: training.steps = {steps}"
        ]


def test_clipping_is_by_the_norm_of_all_parameters() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    first.grad, second.grad = torch.full((3,), 2.0), torch.full((2, 2), -1.0)
    assert clip_gradients([first, second], max_norm=2.0) == pytest.approx(4.0)
    assert torch.allclose(first.grad, torch.ones(3))
    assert clip_gradients([first, second], max_norm=100.0) == pytest.approx(2.0)
    assert torch.allclose(first.grad, torch.ones(3)), "a norm below the limit is left alone"


def test_norms_of_large_tensors_do_not_depend_on_how_they_are_split() -> None:
    torch.manual_seed(0)
    whole = torch.randn(2048, 2048)
    expected = whole.double().norm().item()
    for parts in ([whole], whole.chunk(3), whole.chunk(2, dim=1)):
        found = torch.stack(exact_norms(list(parts))).square().sum().sqrt().item()
        assert found == pytest.approx(expected, rel=1e-9)
    assert whole.norm().item() != pytest.approx(expected, rel=1e-7)


def test_a_rank_without_gradients_knows_the_norm_of_none() -> None:
    assert clip_gradients([nn.Parameter(torch.zeros(3), requires_grad=False)], max_norm=1.0) == 0


def small_model() -> Llama:
    model = Llama(replace(FLAVORS["debug"], dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=32))
    initialize_weights(model, model.init_std, seed=0)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float, lr: float = 0.1) -> dict[str, bool]:
    """A step where every gradient has this value; whether each parameter changed."""
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    update(optimizer, lr, torch.tensor(math.isfinite(gradient)))
    return {name: not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_matrices_decay_and_norms_do_not(name: str, implementation: str) -> None:
    model = small_model()
    config = Optimizer(name=name, implementation=implementation, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    optimizer = build_optimizer([model], config)
    assert step(model, optimizer, 0.0) == {name: "norm" not in name for name, _ in model.named_parameters()}
    assert [group["fused"] for group in optimizer.param_groups] == [implementation == "fused"] * len(get_args(Role))


def test_a_role_may_have_its_own_rate_and_decay() -> None:
    words = "--optimizer.lr 0.1 --optimizer.weight_decay 0.4 --optimizer.embedding.lr_factor 0.5"
    words += " --optimizer.head.lr_factor 0 --optimizer.head.weight_decay 0.1"
    config, model = load_config(words.split()).optimizer, small_model()
    optimizer = build_optimizer([model], config)
    for lr in (0.1, 0.2):
        changed = step(model, optimizer, 1.0, lr)
        assert [name for name in changed if not changed[name]] == ["output.weight"]
        found = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            role = model.kind(name).role
            assert found[id(parameter)]["lr"] == lr * {"embedding": 0.5, "head": 0.0}.get(role, 1.0), name
            assert found[id(parameter)]["weight_decay"] == {"norm": 0.0, "head": 0.1}.get(role, 0.4), name


def kinds_of_the_update(run: train.Run) -> set[str]:
    """The classes of all tensors that torch's fused kernel is given in a step."""
    seen: set[str] = set()
    kernel = torch._fused_adamw_

    def watched(*lists: Any, **more: Any) -> None:
        seen.update(type(tensor).__name__ for tensors in lists for tensor in tensors)
        kernel(*lists, **more)

    vars(torch)["_fused_adamw_"] = watched
    train.train_step(run, train.local_batches(run), train.divisor(run))
    vars(torch)["_fused_adamw_"] = kernel
    return seen


def test_an_update_is_of_local_parts() -> None:
    """DTensor would look for a sharding of the whole update, for seconds with many parameters."""
    words = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "18")
    assert observe(*words, ranks=2, steps=0, at_end=kinds_of_the_update).extra == {"Tensor"}


def test_every_optimizer_and_schedule_has_its_name_in_the_job_file() -> None:
    names = typing.get_args(typing.get_type_hints(Optimizer)["name"])
    assert {*names} == OPTIMIZERS.keys() == OPTIMIZER_KEYS.keys()
    assert {*typing.get_args(typing.get_type_hints(LRScheduler)["decay_type"])} == RATE_SCHEDULES.keys()


def test_a_key_that_the_optimizer_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZER_KEYS, "Adam", ("eps",))
    words = ["--optimizer.name", "Adam", "--optimizer.eps", "1e-6", "--optimizer.beta1", "0.8"]
    with pytest.raises(ConfigError, match=r"optimizer\.beta1 = 0\.8: optimizer\.name = .Adam. has no such") as refused:
        load_config(words)
    assert len(refused.value.messages) == 1
    assert load_config(["--optimizer.name", "AdamW", *words[2:]]).optimizer.beta1 == 0.8


def test_an_optimizer_that_cannot_round_takes_neither_moments_nor_weights_of_few_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIMIZER_KEYS, "Adam", ("beta1", "beta2", "eps"))
    words = ["--optimizer.name", "Adam", "--optimizer.state_dtype", "int8", "--training.dtype", "bfloat16"]
    with pytest.raises(ConfigError) as refused:
        load_config(words)
    moments, weights = refused.value.messages
    assert 'optimizer.state_dtype = "int8": optimizer.name = "Adam" has no such setting' in moments
    assert 'training.dtype = "bfloat16": optimizer.name = "Adam" cannot round' in weights


@pytest.mark.parametrize("implementation", typing.get_args(typing.get_type_hints(Optimizer)["implementation"]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(name: str, implementation: str) -> None:
    model = small_model()
    optimizer = build_optimizer([model], Optimizer(name=name, implementation=implementation))  # type: ignore[arg-type]
    assert all(step(model, optimizer, 0.5).values())
    kept = {id(state): dict(state) for state in optimizer.state.values()}
    before = [torch.as_tensor(value).clone() for state in kept.values() for value in state.values()]
    assert not any(step(model, optimizer, math.nan).values())
    after = [torch.as_tensor(value) for state in optimizer.state.values() for value in state.values()]
    assert all(map(torch.equal, before, after))
    assert all(step(model, optimizer, 0.5).values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_that_an_optimizer_keeps_are_counted(name: str) -> None:
    model = small_model()
    optimizer = build_optimizer([model], Optimizer(name=name))  # type: ignore[arg-type]
    step(model, optimizer, 1.0)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    expected = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.ndim)
    assert expected == state_bytes([model], Optimizer(name=name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_resumed_with_all_that_its_optimizer_keeps(name: str, tmp_path: Path) -> None:
    """Saved by one process, continued by two ranks, as if nothing had been."""
    whole = observe("--optimizer.name", name, steps=4)
    words = ("--optimizer.name", name, "--checkpoint.enable", "true")
    observe(*words, steps=2, folder=str(tmp_path))
    resumed = observe(*words, "--training.local_batch_size", "18", steps=2, folder=str(tmp_path), ranks=2)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    for parameter, weights in whole.weights.items():
        assert (resumed.weights[parameter] - weights).norm() <= 1e-5 * weights.norm(), parameter
