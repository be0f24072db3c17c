"""Learning rates by step, clipping, and which parameters decay."""

import math

import pytest
import torch
from torch import nn

from components.config import LRScheduler, Optimizer
from components.optimizer import build_optimizer, clip_gradients, learning_rate


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


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_decay_shapes(shape: str, half: float) -> None:
    found = rates(100, warmup_steps=0, decay_type=shape)
    assert found[49] == pytest.approx(half)
    assert found[-1] == pytest.approx(0)


def test_total_steps_goes_before_training_steps() -> None:
    config = LRScheduler(warmup_steps=0, total_steps=200)
    assert learning_rate(100, config, 1.0, 100) == pytest.approx(0.5)


def test_a_default_warm_up_is_no_longer_than_the_run() -> None:
    assert rates(10)[-1] == 1.0


def test_clipping_is_by_the_norm_of_all_parameters() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    first.grad, second.grad = torch.full((3,), 2.0), torch.full((2, 2), -1.0)
    assert clip_gradients([first, second], max_norm=2.0) == pytest.approx(4.0)
    assert torch.allclose(first.grad, torch.ones(3))
    assert clip_gradients([first, second], max_norm=100.0) == pytest.approx(2.0)
    assert torch.allclose(first.grad, torch.ones(3)), "a norm below the limit is left alone"


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_matrices_decay_and_vectors_do_not(name: str, implementation: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    before = [parameter.clone() for parameter in model.parameters()]
    config = Optimizer(name=name, implementation=implementation, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
    optimizer = build_optimizer([model], config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    matrix, vector = model.parameters()
    assert not torch.equal(matrix, before[0])
    assert torch.equal(vector, before[1])
    assert optimizer.param_groups[0]["fused"] == (implementation == "fused")
