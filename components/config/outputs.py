"""The tables of what a run writes, and of the checkpoints that it reads; the others are in tables.py."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from components.config.bounds import LARGEST, NonNegative, PathName, Positive


@dataclass(frozen=True, kw_only=True)
class Job:
    """The run as a whole."""

    config_file: PathName | None = None
    """TOML job file; relative to the current folder."""
    dump_folder: PathName = "./outputs"
    """Folder of everything that a run writes; with checkpoints, a second run in the same folder continues the first."""
    description: str = "default job"
    """One line that describes the run, kept in run.json."""
    print_config: bool = False
    """Print the resolved job file at start."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Numbers that are logged, and where. metrics.jsonl, run.json and loss.png are always written."""

    log_freq: Positive = 10
    """Steps between two logged steps; in between the host never waits for the device."""
    dynamics_freq: NonNegative = 0
    """Steps between two logs of each layer's dynamics (docs/dynamics.md): norms of gradient, weights and update, and
    the largest attention logit; 0 for never."""
    color_printing: bool = True
    """Colours, if the console is a terminal."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: PathName = "tb"
    """Folder of the TensorBoard events, inside dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline needs no network."""


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Traces and memory snapshots, on request."""

    enable_profiling: bool = False
    """Write torch.profiler traces (chrome://tracing, Perfetto)."""
    save_traces_folder: PathName = "profile_traces"
    """Folder of the traces, inside dump_folder."""
    profile_freq: Positive = 10
    """Steps between two traces."""
    profiler_active: Positive = 1
    """Steps recorded in each trace."""
    profiler_warmup: NonNegative = 3
    """Warm-up steps of the profiler before each trace; their records are discarded."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots (pytorch.org/memory_viz) at the same steps; refused without CUDA."""
    save_memory_snapshot_folder: PathName = "memory_snapshot"
    """Folder of the snapshots, inside dump_folder."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and resume from the newest good one at start."""
    folder: PathName = "checkpoint"
    """Folder of the checkpoints, inside dump_folder."""
    interval: Positive = 500
    """Steps between two checkpoints; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: training goes on once the tensors are copied to host memory; a thread writes and publishes the copy."""
    initial_load_path: PathName | None = None
    """Start from this checkpoint (a step-N folder, or a folder of them) if the run has no checkpoint of its own. With
    adapters, their base: read at every start, since checkpoints do not hold it."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; optimizer, data and step start anew."""
    initial_load_in_hf: bool = False
    """initial_load_path is a Hugging Face folder: safetensors and config.json."""
    initial_load_in_hf_quantized: bool = False
    """Its weights are FP8 (in blocks) or MXFP4; they are widened to training.dtype, each rank's slice by itself."""
    last_save_model_only: bool = False
    """The checkpoint of the last step holds only weights; such a run cannot be continued."""
    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder: dump_folder/hugging_face. A run with
    adapters writes only these, for PEFT."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Precision of the weights that last_save_in_hf writes."""
    keep_latest_k: NonNegative = 10
    """Keep this many checkpoints; 0 keeps all. The last good one is never removed."""
    load_step: Annotated[int, Ge(-1), Le(LARGEST)] = -1
    """Resume from this step; -1 takes the newest that verifies."""
    exclude_from_loading: list[Literal["optimizer", "dataloader", "train_state"]] = field(default_factory=list)
    """Parts that are not loaded: optimizer (moments), dataloader (position), train_state (step, and thus the rate)."""
    enable_first_step_checkpoint: bool = False
    """Also save step 1, to find out early that saving works."""
    load_only: bool = False
    """Load as configured but never save."""
