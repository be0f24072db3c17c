"""Settings that a device or an installation cannot have, each refused with its reason, or warned of."""

import importlib.util
import types
from typing import Any

import pytest
import torch

from components.config import ConfigError, broken_rules, check_rules
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_device, warnings
from parallelize.rules.device import DEVICE_RULES
from tests.refused import ASYNC, COMPILE, KERNEL, LACKING
from tests.test_rules import config_of, device


@pytest.mark.parametrize(("words", "facts", "key"), LACKING)
def test_what_a_device_lacks_is_named(words: str, facts: dict[str, Any], key: str) -> None:
    (message,) = broken_rules(DEVICE_RULES, config_of(*words.split()), device(**facts))
    assert f": {key} = " in message


def test_every_rule_on_devices_has_a_case() -> None:
    found = [
        rule
        for rule in DEVICE_RULES
        if any(rule.misfit(config_of(*words.split()), device(**facts)) for words, facts, _ in LACKING)
    ]
    assert found == DEVICE_RULES


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TORCHDYNAMO_DISABLE", "1", ()),
        ("TORCHDYNAMO_DISABLE", "0", COMPILE),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "", COMPILE),
        ("NVIDIA_TF32_OVERRIDE", "0", ()),
        ("NVIDIA_TF32_OVERRIDE", "1", ("--training.float32_matmul_precision", "high")),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ("--debug.deterministic",)),
        ("WANDB_MODE", "offline", ("--metrics.enable_wandb",)),
    ],
)
def test_a_variable_that_takes_nothing_away_is_accepted(variable: str, value: str, words: tuple[str, ...]) -> None:
    check_rules(DEVICE_RULES, config_of(*words), device(cuda=(9, 0), environment={variable: value}))


def test_the_device_of_a_run_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*COMPILE, ASYNC, KERNEL, "flex")
    check_device(config, (9, 0))
    with pytest.raises(ConfigError) as refused:
        check_device(config, None)
    assert len(refused.value.messages) == 2
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="/a clone/torch"))
    with pytest.raises(ConfigError, match=r"cannot link with a torch whose path has a space: /a clone/torch"):
        check_device(config, None)
    with pytest.raises(ConfigError, match="with TORCHDYNAMO_DISABLE = 1 in the environment nothing would be compiled"):
        check_device(config, (9, 0))


def test_what_needs_a_gpu_or_inductor_is_not_asked_of_others() -> None:
    spaced = device(torch_path="/a folder/torch")
    check_rules(DEVICE_RULES, config_of(*COMPILE, "--compile.backend", "aot_eager"), spaced)
    check_rules(DEVICE_RULES, config_of(), spaced)
    check_rules(DEVICE_RULES, config_of(*COMPILE), device(cuda=(9, 0), torch_path="/a folder/torch"))
    variables = {"NVIDIA_TF32_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    check_rules(DEVICE_RULES, config_of("--debug.deterministic"), device(environment=variables))


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_without_instructions_for_it_is_warned_of(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    config = config_of("--training.mixed_precision_param", "bfloat16")
    found = warnings(config, resolve_degrees(config, 1), 1, on_cpu=True)
    assert found == [] if supported else "no instructions for it" in found[0]
    assert warnings(config, resolve_degrees(config, 1), 1, on_cpu=False) == []
    dry = config_of("--training.mixed_precision_param", "bfloat16", "--comm.mode", "fake_backend")
    assert warnings(dry, resolve_degrees(dry, 1), 1, on_cpu=True) == []
    config = config_of("--training.mixed_precision_param", "float32")
    assert warnings(config, resolve_degrees(config, 1), 1, on_cpu=True) == []


@pytest.mark.parametrize(
    ("hip", "kind", "line"),
    [
        (None, None, None),
        (None, "cuda", None),
        ("7.1", "cuda", "ROCm 7.1: nothing has been run on AMD GPUs"),
        (None, "mps", "the mps device is not used; the run computes on the CPU"),
        (None, "xpu", "the xpu device is not used"),
    ],
)
def test_the_start_says_what_is_unproven(
    hip: str | None, kind: str | None, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch of other machines, pretended: this is all of them that is tested."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    config = config_of("--training.mixed_precision_param", "float32")
    found = warnings(config, resolve_degrees(config, 1), 1, on_cpu=kind != "cuda")
    assert len(found) == (line is not None)
    assert not line or found[0].startswith(line)
    dry = config_of("--comm.mode", "fake_backend")
    assert warnings(dry, resolve_degrees(dry, 1), 1, on_cpu=True) == []


def test_a_torch_without_onednn_is_asked_for_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # macOS
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    config = config_of("--training.mixed_precision_param", "bfloat16")
    assert "no instructions for it" in warnings(config, resolve_degrees(config, 1), 1, on_cpu=True)[0]
