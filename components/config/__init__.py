"""Job files: one frozen dataclass per TOML table (tables.py, outputs.py), read and checked. Never imports torch."""

from components.config.keys import ConfigError
from components.config.load import ROOT, load_config, mistake, to_dict
from components.config.outputs import Checkpoint, Profiling
from components.config.tables import (
    ActivationCheckpoint,
    Balancing,
    Compile,
    DataLoader,
    Float8,
    JobConfig,
    Lora,
    LRScheduler,
    Model,
    Optimizer,
    Parallelism,
    RopeScaling,
    Training,
)
