"""The table of settings that a kind of device, an installation or an environment variable would not honour."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from components.config import JobConfig, Rule


def _torch_path() -> str:
    spec = importlib.util.find_spec("torch")
    return str(spec.origin if spec else "")


def _hip() -> str:
    torch = sys.modules.get("torch")  # imported already where there are GPUs
    return (torch.version.hip or "") if torch else ""


def unproven() -> list[str]:
    """A line about a device that is neither an NVIDIA GPU nor a CPU; none for these two. Imports torch."""
    import torch

    if _hip() and torch.cuda.is_available():
        return [f"ROCm {_hip()}: nothing has been run on AMD GPUs; compare first steps as docs/other_devices.md says"]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type == "cuda":
        return []
    return [f"the {kind.type} device is not used; the run computes on the CPU (docs/other_devices.md)"]


@dataclass(frozen=True)
class Device:
    """Facts that the rows of DEVICE_RULES read beside the job."""

    cuda: tuple[int, int] | None
    """Compute capability of the GPUs; None on a CPU."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    torch_path: str = field(default_factory=_torch_path)
    hip: str = field(default_factory=_hip)
    """ROCm's version if torch is a build for AMD GPUs; else empty."""


Misfit = Callable[[JobConfig, Device], bool]


def _lacking(key: str, misfit: Misfit, reason: str) -> Rule:
    return Rule(key, lambda job, device: misfit(job, device) and reason.format(torch_path=device.torch_path))


def _taken_away(variable: str, key: str, misfit: Callable[[JobConfig, Device, str], bool], effect: str) -> Rule:
    """A rule on an environment variable that makes a library silently deviate from the job file."""

    def reason(job: JobConfig, device: Device) -> str | bool:
        value = device.environment.get(variable, "")
        found = f"with {variable} = {value} in the environment {effect}; unset one of the two"
        return bool(value) and misfit(job, device, value) and found

    return Rule(key, reason)


def _float8_misfit(job: JobConfig, device: Device) -> bool:
    scaled = bool(job.model.converters) and not job.quantize.linear.float8.emulate
    return scaled and (device.cuda is None or device.cuda < (8, 9))


def _inductor_misfit(job: JobConfig, device: Device) -> bool:
    inductor = job.compile.enable and job.compile.backend == "inductor"
    return inductor and device.cuda is None and " " in device.torch_path


def _flex(job: JobConfig) -> bool:
    return job.model.attention_kernel == "flex"


def _tf32_misfit(job: JobConfig, device: Device, value: str) -> bool:
    return device.cuda is not None and (value == "0") != (job.training.float32_matmul_precision == "highest")


def _cublas_misfit(job: JobConfig, device: Device, value: str) -> bool:
    return device.cuda is not None and job.debug.deterministic and value not in (":4096:8", ":16:8")


_UNTRACKED = "nothing would be logged"
DEVICE_RULES = [
    _lacking(
        "comm.mode",
        lambda job, device: job.comm.mode == "fake_backend",
        "train.py trains; a dry run is started by ./run_train.sh",
    ),
    _lacking(
        "comm.share_gpus",
        lambda job, device: job.comm.share_gpus and device.cuda is None,
        "there are no GPUs to share; use false",
    ),
    _lacking(
        "compile.backend",
        _inductor_misfit,
        "on the CPU it cannot link with a torch whose path has a space: {torch_path}",
    ),
    _lacking(
        "profiling.enable_memory_snapshot",
        lambda job, device: job.profiling.enable_memory_snapshot and device.cuda is None,
        "memory snapshots are CUDA's",
    ),
    _lacking(
        "parallelism.enable_async_tensor_parallel",
        lambda job, device: job.parallelism.enable_async_tensor_parallel and device.cuda is None,
        "it needs CUDA",
    ),
    _lacking(
        "model.attention_kernel",
        lambda job, device: _flex(job) and device.cuda is None,
        "FlexAttention has no backward on a CPU",
    ),
    _lacking(
        "model.converters",
        _float8_misfit,
        "float8 needs CUDA with compute capability 8.9, or quantize.linear.float8.emulate = true",
    ),
    _lacking(
        "model.converters",
        lambda job, device: bool(device.hip and job.model.converters and not job.quantize.linear.float8.emulate),
        "float8 products have run on NVIDIA GPUs alone; use quantize.linear.float8.emulate = true",
    ),
    _taken_away(
        "TORCHDYNAMO_SUPPRESS_ERRORS",
        "compile.enable",
        lambda job, device, value: job.compile.enable,
        "what fails to compile would run uncompiled",
    ),
    _taken_away(
        "TORCH_COMPILE_OVERRIDE_BACKENDS",
        "compile.backend",
        lambda job, device, value: job.compile.enable,
        "another backend would compile",
    ),
    *(
        _taken_away(variable, key, misfit, effect)
        for variable in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
        for key, misfit, effect in (
            (
                "compile.enable",
                lambda job, device, value: job.compile.enable and value == "1",
                "nothing would be compiled",
            ),
            (
                "model.attention_kernel",
                lambda job, device, value: _flex(job) and value == "1",
                "FlexAttention would compute whole scores",
            ),
        )
    ),
    _taken_away(
        "NVIDIA_TF32_OVERRIDE", "training.float32_matmul_precision", _tf32_misfit, "another precision would hold"
    ),
    _taken_away("CUBLAS_WORKSPACE_CONFIG", "debug.deterministic", _cublas_misfit, "cuBLAS would not be deterministic"),
    _taken_away(
        "WANDB_MODE",
        "metrics.enable_wandb",
        lambda job, device, value: job.metrics.enable_wandb and value == "disabled",
        _UNTRACKED,
    ),
    _taken_away(
        "WANDB_DISABLED",
        "metrics.enable_wandb",
        lambda job, device, value: job.metrics.enable_wandb and value.lower() in ("true", "1", "yes"),
        _UNTRACKED,
    ),
]
