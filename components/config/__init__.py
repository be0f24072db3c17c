"""Job files: one frozen dataclass per TOML table, reading and checking. Never imports torch."""

from components.config.keys import ConfigError
from components.config.load import (
    EXPORTS,
    ROOT,
    absolute_tables,
    here_or_in_repository,
    load_config,
    mistake,
    python_path,
    to_dict,
)
from components.config.model import Lora, Model, RopeScaling
from components.config.outputs import Checkpoint, Profiling
from components.config.tables import (
    ActivationCheckpoint,
    Balancing,
    Compile,
    DataLoader,
    Float8,
    JobConfig,
    LRScheduler,
    Optimizer,
    Parallelism,
    Training,
)
