"""Environment variables with which a library does something else than the job file asks for."""

from collections.abc import Iterator, Mapping

from components.config import JobConfig


def overridden(config: JobConfig, environment: Mapping[str, str], on_cuda: bool) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) for each setting that a variable would take away without a word."""
    compiles, flex = config.compile.enable, config.model.attention_kernel == "flex"
    exact = config.training.float32_matmul_precision == "highest"
    deterministic, tracked = on_cuda and config.debug.deterministic, config.metrics.enable_wandb

    def value(variable: str) -> str:
        return environment.get(variable, "")

    cases = [
        ("TORCHDYNAMO_SUPPRESS_ERRORS", "compile.enable", compiles, "what fails to compile would run uncompiled"),
        ("TORCH_COMPILE_OVERRIDE_BACKENDS", "compile.backend", compiles, "another backend would compile"),
        (
            "NVIDIA_TF32_OVERRIDE",
            "training.float32_matmul_precision",
            on_cuda and (value("NVIDIA_TF32_OVERRIDE") == "0") != exact,
            "another precision would hold",
        ),
        (
            "CUBLAS_WORKSPACE_CONFIG",
            "debug.deterministic",
            deterministic and value("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"),
            "cuBLAS would not be deterministic",
        ),
        ("WANDB_MODE", "metrics.enable_wandb", tracked and value("WANDB_MODE") == "disabled", _UNTRACKED),
        (
            "WANDB_DISABLED",
            "metrics.enable_wandb",
            tracked and value("WANDB_DISABLED").lower() in ("true", "1", "yes"),
            _UNTRACKED,
        ),
    ]
    for variable in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        off = value(variable) == "1"
        cases.append((variable, "compile.enable", compiles and off, "nothing would be compiled"))
        cases.append((variable, "model.attention_kernel", flex and off, "FlexAttention would compute whole scores"))
    for variable, key, taken, effect in cases:
        if value(variable) and taken:
            yield key, f"with {variable} = {value(variable)} in the environment {effect}; unset one of the two"


_UNTRACKED = "nothing would be logged"
