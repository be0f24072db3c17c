"""Float8 (emulated) and bfloat16 at every layout, against one rank in the same precision."""

import functools
from typing import Any

import pytest
import torch

import train
from components.commands.figures import Observation, figures
from components.config import ConfigError, load_config
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_device, warnings
from tests.harness import observe
from tests.test_parallelize_activation import FULL, LAYOUTS
from tests.test_parallelize_compile import TRACED
from tests.test_parallelize_data import UNEVEN_LABELS

CONVERTED = ("--model.converters", '["quantize.linear.float8"]')
FLOAT8 = (*CONVERTED, "--quantize.linear.float8.emulate", "true")
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
OVER_RANKS = ["fsdp 2", "tp 2", "cp 2", "pp 2", "pp 2 zero bubble"]


def flavor(layout: str) -> tuple[str, str]:
    return "--model.flavor", "long" if layout.startswith("pp") else "many_heads"


@functools.cache
def one(*overrides: str, mutate: Any = None) -> Observation:
    return observe(*overrides, mutate=mutate, steps=1, valid_labels=UNEVEN_LABELS)


def compared(layout: str, precision: tuple[str, ...]) -> dict[str, float]:
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *flavor(layout), *precision, ranks=ranks, steps=1, valid_labels=UNEVEN_LABELS)
    return figures(observed, one(*flavor(layout), *precision))


def nudge_weights(seed: int) -> None:
    """Move every weight by at most one unit in the last place."""
    original = train.initialize_weights

    def nudged(model: torch.nn.Module, *more: Any) -> None:
        original(model, *more)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2**-23 * (2 * torch.rand(parameter.shape, generator=generator) - 1))

    vars(train)["initialize_weights"] = nudged


def noise(layout: str) -> float:
    """How far the smallest change moves one process: a number at the edge of two roundings falls over."""
    plain = one(*flavor(layout), *FLOAT8)
    nudged = [one(*flavor(layout), *FLOAT8, mutate=functools.partial(nudge_weights, seed)) for seed in range(4)]
    return max(figures(each, plain)["gradient"] for each in nudged)


@pytest.mark.parametrize("layout", OVER_RANKS)
def test_float8_is_the_run_of_one_process(layout: str) -> None:
    """1e-5, or what one unit in the last place does to one process: whichever is more."""
    bar = 5e-2 if layout == "cp 2" else max(1e-5, 3 * noise(layout))
    found = compared(layout, FLOAT8)
    assert found["gradient"] <= bar < 0.06
    assert found["weights at step 0"] == found["tokens"] == 0


@pytest.mark.parametrize("more", [FULL, TRACED], ids=["checkpointed", "compiled"])
def test_float8_composes(more: tuple[str, ...]) -> None:
    assert compared("fsdp 2", (*FLOAT8, *more))["gradient"] <= 1e-5


@pytest.mark.parametrize("layout", OVER_RANKS)
@pytest.mark.parametrize("precision", [BFLOAT16, (*BFLOAT16, *TRACED)], ids=["bfloat16", "compiled bfloat16"])
def test_bfloat16_is_near_one_process_in_bfloat16(layout: str, precision: tuple[str, ...]) -> None:
    assert compared(layout, precision)["gradient"] <= 1e-2


def test_tensorwise_scales_depend_on_the_layout() -> None:
    """Which is why it is not the default, and why it is warned of."""
    tensorwise = (*FLOAT8, "--quantize.linear.float8.recipe_name", "tensorwise")
    assert compared("fsdp 2", tensorwise)["gradient"] > 1e-2
    config = load_config(list(tensorwise))
    assert "numbers depend on the layout" in warnings(config, resolve_degrees(config, 2), 2, on_cpu=False)[0]
    config = load_config(list(FLOAT8))
    assert warnings(config, resolve_degrees(config, 2), 2, on_cpu=False) == []


def kinds(run: train.Run) -> dict[str, str]:
    modules = run.stages[0].named_modules()
    return {name: type(module).__name__ for name, module in modules if isinstance(module, torch.nn.Linear)}


def test_the_head_and_what_is_filtered_stay_as_they_are() -> None:
    filtered = (*FLOAT8, "--quantize.linear.float8.filter_fqns", '["attention.wk", "layers.1.attention.wv"]')
    found = observe(*filtered, steps=0, at_end=kinds).extra
    kept = {"layers.0.attention.wk", "layers.1.attention.wk", "layers.1.attention.wv", "output"}
    assert {name for name, kind in found.items() if kind != "Float8Linear"} == kept


def test_names_and_weights_do_not_change() -> None:
    assert figures(one(*FLOAT8), one())["weights at step 0"] == 0


def test_a_device_without_float8_is_named() -> None:
    config = load_config(list(CONVERTED))
    for capability in (None, (8, 0)):
        with pytest.raises(ConfigError, match=r"float8 needs CUDA with compute capability 8.9, or .*emulate = true"):
            check_device(config, capability)
    check_device(config, (9, 0))
    check_device(load_config(list(FLOAT8)), None)
