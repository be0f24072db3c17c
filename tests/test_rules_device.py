"""Settings that a device or an installation cannot have, each refused with its reason, or warned of."""

import contextlib
import importlib.util
import types

import pytest
import torch

from components.config import ConfigError
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_device, warnings
from tests.refused import ASYNC, COMPILE, KERNEL
from tests.test_rules import config_of


def test_what_a_device_lacks_is_named() -> None:
    config = config_of("--profiling.enable_memory_snapshot", ASYNC, KERNEL, "flex")
    with pytest.raises(ConfigError) as refused:
        check_device(config, None)
    assert [message.partition("=")[0].rpartition(".")[2].strip() for message in refused.value.messages] == [
        "enable_memory_snapshot",
        "enable_async_tensor_parallel",
        "attention_kernel",
    ]
    check_device(config, (9, 0))


def test_train_py_makes_no_dry_run() -> None:
    with pytest.raises(ConfigError, match=r'comm.mode = "fake_backend": train.py trains'):
        check_device(config_of("--comm.mode", "fake_backend"), (9, 0))


def test_inductor_under_a_path_with_a_space_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="/a clone/torch"))
    with pytest.raises(ConfigError, match=r"cannot link with a torch whose path has a space: /a clone/torch"):
        check_device(config_of(*COMPILE), None)
    check_device(config_of(*COMPILE), (9, 0))
    check_device(config_of(*COMPILE, "--compile.backend", "aot_eager"), None)
    check_device(config_of(), None)


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


WANDB, DETERMINISTIC = "--metrics.enable_wandb", "--debug.deterministic"
HIGH = ("--training.float32_matmul_precision", "high")


@pytest.mark.parametrize(
    ("variable", "value", "words", "key"),
    [
        ("TORCHDYNAMO_DISABLE", "1", COMPILE, "compile.enable"),
        ("TORCHDYNAMO_DISABLE", "1", (KERNEL, "flex"), "model.attention_kernel"),
        ("TORCH_COMPILE_DISABLE", "1", COMPILE, "compile.enable"),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", COMPILE, "compile.enable"),  # torch reads any text as true
        ("TORCH_COMPILE_OVERRIDE_BACKENDS", ">=0:eager", COMPILE, "compile.backend"),
        ("NVIDIA_TF32_OVERRIDE", "1", (), "training.float32_matmul_precision"),
        ("NVIDIA_TF32_OVERRIDE", "0", HIGH, "training.float32_matmul_precision"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", (DETERMINISTIC,), "debug.deterministic"),
        ("WANDB_MODE", "disabled", (WANDB,), "metrics.enable_wandb"),
        ("WANDB_DISABLED", "true", (WANDB,), "metrics.enable_wandb"),
        ("TORCHDYNAMO_DISABLE", "1", (), ""),
        ("TORCHDYNAMO_DISABLE", "0", COMPILE, ""),
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "", COMPILE, ""),
        ("NVIDIA_TF32_OVERRIDE", "0", (), ""),
        ("NVIDIA_TF32_OVERRIDE", "1", HIGH, ""),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", (DETERMINISTIC,), ""),
        ("WANDB_MODE", "offline", (WANDB,), ""),
    ],
)
def test_a_variable_that_takes_a_setting_away_is_refused(
    variable: str, value: str, words: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    said = rf"{key} = .*: with {variable} = {value} in the environment .*; unset one"
    with pytest.raises(ConfigError, match=said) if key else contextlib.nullcontext():
        check_device(config_of(*words), (9, 0))


def test_variables_of_cuda_take_nothing_from_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    check_device(config_of(DETERMINISTIC), None)
