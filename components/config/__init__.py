"""Job files: one frozen dataclass per TOML table (tables.py, outputs.py), read and checked. Never imports torch."""

from components.config.keys import ConfigError
from components.config.load import ROOT, load_config, mistake, to_dict
from components.config.outputs import Checkpoint, Job, Metrics, Profiling
from components.config.tables import (
    ActivationCheckpoint,
    Comm,
    Compile,
    DataLoader,
    Debug,
    Float8,
    JobConfig,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    Training,
    Validation,
)

__all__ = [
    "ROOT",
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "ConfigError",
    "DataLoader",
    "Debug",
    "Float8",
    "Job",
    "JobConfig",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallelism",
    "Profiling",
    "Training",
    "Validation",
    "load_config",
    "mistake",
    "to_dict",
]
