"""Job files: one frozen dataclass per TOML table (tables.py), read and checked by load.py. Never imports torch."""

from components.config.load import ROOT, ConfigError, load_config, mistake, to_dict
from components.config.tables import (
    Checkpoint,
    Comm,
    DataLoader,
    Debug,
    Job,
    JobConfig,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Training,
    Validation,
)

__all__ = [
    "ROOT",
    "Checkpoint",
    "Comm",
    "ConfigError",
    "DataLoader",
    "Debug",
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
