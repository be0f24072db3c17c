"""Job files: one frozen dataclass per TOML table, reading and checking. Never imports torch."""

from components.config.contradictions import EXPORTS
from components.config.keys import ConfigError
from components.config.load import (
    ROOT,
    absolute_tables,
    by_key,
    from_json,
    here_or_in_repository,
    load_config,
    python_path,
    to_dict,
    to_json,
)
from components.config.model import Lora, Model, RopeScaling
from components.config.outputs import Checkpoint, Profiling
from components.config.rule import Rule, broken_rules, check_rules, mistake
from components.config.tables import (
    ActivationCheckpoint,
    Balancing,
    Chat,
    Compile,
    DataLoader,
    Float8,
    JobConfig,
    LRScheduler,
    Optimizer,
    Parallelism,
    Training,
)
