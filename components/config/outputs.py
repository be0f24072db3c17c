"""Tables of a job file about files: [job], [metrics], [profiling] and [checkpoint]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from components.config.bounds import LARGEST, FolderName, HubRepository, NonNegative, PathName, Positive, StoreFolder


@dataclass(frozen=True, kw_only=True)
class Job:
    """The run as a whole."""

    config_file: PathName | None = None
    """TOML job file; relative to the current folder."""
    dump_folder: PathName = "./outputs"
    """Folder of everything that a run writes. With checkpoints, a second run in the same folder continues the first."""
    description: str = "default job"
    """One line that describes the run; stored in run.json."""
    print_config: bool = False
    """Print the resolved job file at start."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Logged numbers and their destinations. metrics.jsonl, run.json and loss.png are always written."""

    log_freq: Positive = 10
    """Log every this many steps; between logged steps the host never waits for the device."""
    dynamics_freq: NonNegative = 0
    """Log each layer's dynamics (docs/dynamics.md) every this many steps: norms of gradient, weights and update, and
    the largest attention logit; 0 for never."""
    color_printing: bool = True
    """Use colors if the console is a terminal."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: FolderName = "tb"
    """Folder of the TensorBoard events, inside dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline needs no network. If the server does not answer at the start, the
    run is kept in dump_folder, for `wandb sync`. Training never waits for the server."""
    enable_mlflow: bool = False
    """Log to MLflow (`pip install mlflow-skinny`): to the server MLFLOW_TRACKING_URI, or to dump_folder/mlruns."""
    enable_trackio: bool = False
    """Log to Trackio (`pip install trackio`): to the server that its environment variables name, or to
    dump_folder/trackio, for `trackio show`."""


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Traces and memory snapshots, on request."""

    enable_profiling: bool = False
    """Write torch.profiler traces (chrome://tracing, Perfetto)."""
    save_traces_folder: FolderName = "profile_traces"
    """Folder of the traces, inside dump_folder."""
    profile_freq: Positive = 10
    """Write a trace every this many steps."""
    profiler_active: Positive = 1
    """Steps recorded in each trace."""
    profiler_warmup: NonNegative = 3
    """Warm-up steps of the profiler before each trace; their records are discarded."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots (pytorch.org/memory_viz) at the steps of the traces; an error without CUDA."""
    save_memory_snapshot_folder: FolderName = "memory_snapshot"
    """Folder of the snapshots, inside dump_folder."""


LoadedPart = Literal["optimizer", "dataloader", "train_state", "averages"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming."""

    enable: bool = False
    """Save checkpoints, and at start resume from the newest good one."""
    folder: FolderName = "checkpoint"
    """Folder of the checkpoints, inside dump_folder."""
    interval: Positive = 500
    """Save every this many steps; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: training continues once the tensors are copied to host memory; a thread writes and publishes the copy."""
    initial_load_path: PathName | None = None
    """Checkpoint to start from (a step-N folder, or a folder of them) if the run has not saved one yet. With adapters:
    the base, which is read at every start because checkpoints do not contain the base."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path; optimizer, data and step start anew."""
    initial_load_in_hf: bool = False
    """initial_load_path is a Hugging Face folder: safetensors and config.json."""
    initial_load_new_rows: Literal["step_0", "mean"] = "step_0"
    """Initial values of the rows that model.sizes.vocab_size adds to the folder's embedding and head: random as at step
    0, or the mean of the folder's rows."""
    initial_load_in_hf_quantized: bool = False
    """The weights at initial_load_path are FP8 (in blocks) or MXFP4; each rank converts its slice to training.dtype."""
    last_save_model_only: bool = False
    """Save only weights in the last checkpoint; such a run cannot be continued."""
    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder: dump_folder/hugging_face. With adapters,
    write only the adapters, in PEFT's format."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Precision of the weights that last_save_in_hf writes."""
    hf_repo: HubRepository = ""
    """Repository of the Hugging Face hub, as "org/name", to which the folder of last_save_in_hf is uploaded after the
    run. Needs a token (HF_TOKEN, or `hf auth login`). If the upload fails, the run still succeeds."""
    hf_repo_private: bool = True
    """Make hf_repo private; false makes it public. An existing repository must already have this visibility."""
    keep_latest_k: NonNegative = 10
    """Checkpoints to keep; 0 keeps all. The last good checkpoint is never removed."""
    load_step: Annotated[int, Ge(-1), Le(LARGEST)] = -1
    """Resume from this step; -1 takes the newest that verifies."""
    exclude_from_loading: list[LoadedPart] = field(default_factory=list)
    """Parts that are not loaded: optimizer (moments), dataloader (position), train_state (step and learning rate),
    averages (which start anew from the weights)."""
    enable_first_step_checkpoint: bool = False
    """Also save step 1, to test saving early."""
    load_only: bool = False
    """Load as configured but never save."""
    remote: StoreFolder = ""
    """Folder in a store, as "s3://bucket/run", to which saved checkpoints are copied in the background. A start without
    the newest of them takes it from there (docs/storage.md). A store that is down never stops training."""
    remote_timeout_seconds: Annotated[int, Ge(1), Le(3000)] = 120
    """At the end of a run, wait at most this long for copies; the next start copies the rest. At most 3000, because the
    other ranks wait no longer than an hour."""

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.enable and not self.load_only

    def due_at(self, step: int) -> bool:
        """Whether the run saves after this step, even if it goes on."""
        return self.saves and (step % self.interval == 0 or (step == 1 and self.enable_first_step_checkpoint))
