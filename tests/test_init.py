"""Weights at step 0: normal, without pattern, and a function of seed, name and index alone."""

import pytest
import torch
from torch import nn

from components.config import Model
from components.optim import counter_hash
from components.state.init import _normal, initialize_weights
from models import meta_model
from models.random_bits import key_of


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    initialize_weights(module, lambda name: 0.02, seed)
    return module


def test_numbers_are_standard_normal_and_independent() -> None:
    numbers = _normal(torch.arange(1 << 22), key_of(0, "layers.0.attention.wq.weight"))
    assert abs(numbers.mean()) < 2e-3
    assert abs(numbers.std() - 1) < 2e-3
    assert abs(numbers.pow(4).mean() - 3) < 2e-2
    assert numbers.isfinite().all()
    assert numbers.abs().max() < 5.2
    for lag in (1, 2, 64, 4096):
        assert abs((numbers[lag:] * numbers[:-lag]).mean()) < 2e-3, lag


def test_a_model_in_bfloat16_leaves_the_default_as_it_was() -> None:
    model = meta_model(Model(name="llama", flavor="debug"), "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_offloaded_weights_are_computed_on_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(counter_hash.CHUNK, "meta", 100)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        initialize_weights(nn.Linear(2, 2), lambda name: 0.02, 0, torch.device("meta"))


def test_names_and_seeds_give_unrelated_weights() -> None:
    index = torch.arange(1 << 16)
    draws = [
        _normal(index.clone(), key_of(seed, name))
        for seed in (0, 1)
        for name in ("layers.0.w.weight", "layers.1.w.weight")
    ]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlation.abs().max() < 0.02


def test_a_weight_depends_on_its_index_not_on_chunks_or_neighbours() -> None:
    layer = nn.Linear(70_000, 3, bias=False)
    fill(layer)
    by_index = _normal(torch.arange(3 * 70_000), key_of(0, "weight")).mul_(0.02).view(3, 70_000)
    assert torch.equal(layer.weight, by_index)


def test_the_numbers_never_change() -> None:
    """Checkpoints, golden curves and people's comparisons rest on these bits."""
    layer = nn.Linear(4, 1, bias=False)
    fill(layer, seed=42)
    assert [number.hex() for number in layer.weight.flatten().tolist()] == [
        "-0x1.2ec3a60000000p-5",
        "0x1.2d12000000000p-8",
        "0x1.7f86360000000p-6",
        "-0x1.df38460000000p-6",
    ]


def test_an_empty_slice_and_three_dimensions() -> None:
    module = nn.Module()
    module.empty = nn.Parameter(torch.empty(0, 4))
    module.cube = nn.Parameter(torch.empty(2, 3, 5))
    fill(module)
    expected = _normal(torch.arange(30), key_of(0, "cube")).mul_(0.02).view(2, 3, 5)
    assert torch.equal(module.cube, expected)
