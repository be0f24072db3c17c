"""The tables of a job file: one frozen dataclass each, every key documented in the line beneath it.

Names, types and meanings are those of torchtitan v0.2 wherever the meaning is the same.
Sizes are in tokens or sequences, times in seconds, as the names say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from components.config.bounds import (
    Fraction,
    Name,
    NonNegative,
    PathName,
    Positive,
    PositiveFloat,
    Seconds,
    Seed,
    Sequences,
)
from components.config.model import Model
from components.config.optimizer import LRScheduler, Optimizer
from components.config.outputs import Checkpoint, Job, Metrics, Profiling


@dataclass(frozen=True, kw_only=True)
class DataLoader:
    """How batches are loaded; never changes which batches."""

    num_workers: NonNegative = 0
    """Loader processes a rank; 0 loads in the rank itself."""
    persistent_workers: bool = False
    """Keep the workers between epochs (needs num_workers of 1 or more)."""
    pin_memory: bool = False
    """Page-locked buffers, so that copies to CUDA do not block."""
    prefetch_factor: Positive | None = None
    """Batches that each worker prepares ahead (needs num_workers of 1 or more)."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch, precision and length of the run."""

    dataset: Name = "kjv"
    """kjv (bundled), or a dataset of the Hugging Face hub, whose split train is streamed: c4, "org/name",
    "org/name:config", "org/name:config@revision". Ignored where dataset_path is set."""
    dataset_path: PathName | None = None
    """Your own data: a .txt, .jsonl or .parquet file, a folder or a glob of them."""
    dataset_streaming: bool = False
    """Tokenize dataset_path (a folder laid out as on the hub) during training instead of before it; sequences then keep
    the order of the text. Datasets of the hub are always streamed."""
    dataset_text_field: Name = "text"
    """Field (JSONL) or column (parquet) that holds the text."""
    dataset_errors: Literal["fail", "skip"] = "fail"
    """A record that cannot be read stops the run, or is skipped and counted."""
    dataset_cache: PathName = ".cache/tokens"
    """Folder of the tokenized data, shared by runs; relative to the repository."""
    local_batch_size: Sequences = 8
    """Sequences of one accumulation step (one forward and backward) on one rank."""
    global_batch_size: Literal[-1] | Sequences = -1
    """Sequences of one optimizer step over all ranks; accumulation steps follow from it. -1: one accumulation step,
    so local_batch_size on every rank."""
    seq_len: Positive = 2048
    """Tokens of one sequence."""
    objective: Name = "next_token"
    """Loss that is minimised (models/objective.py)."""
    document_mask: bool = False
    """Attention stays inside each document of a packed sequence, and positions restart at each document."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    max_nonfinite_steps: Positive = 10
    """Stop, one step later at the latest, after this many steps in a row that were skipped: loss or gradient was not
    finite, or a spike."""
    skip_spikes_sigma: Annotated[float, Ge(0)] = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean of the last
    skip_spikes_window steps (usual: 6); 0 for never."""
    skip_spikes_window: Annotated[int, Ge(4)] = 128
    """Steps that skip_spikes_sigma compares with; nothing is skipped until half of them are known."""
    steps: Positive = 10000
    """Optimizer steps of the run."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which weights are kept, with gradients in it too; updates of bfloat16 are rounded at random."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Precision of gradient reduction."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision: the precision in which float32 products may be computed."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory; a layer's weights are copied in while it computes."""
    gc_freq: Positive = 50
    """Steps between two Python garbage collections; none happens in between."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Loader processes and buffers."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The layout: sizes of the mesh dimensions. Their product is the number of ranks."""

    data_parallel_replicate_degree: Literal[-1] | Positive = 1
    """Replicas of the model (DDP; with a shard degree, HSDP); -1 takes the ranks that are left."""
    data_parallel_shard_degree: Literal[-1] | Positive = -1
    """Ranks that share one copy of weights, gradients and optimizer state (FSDP); -1 takes the ranks that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered weights are freed after forward: always (ZeRO-3) or never (ZeRO-2). default: never in a
    pipeline, otherwise always except for the head."""
    fsdp_prefetch_layers: Positive = 1
    """Layers whose weights are gathered ahead of the computing layer; each costs the memory of its weights."""
    fsdp_reduce_gradients: Literal["last", "each"] = "last"
    """Accumulation steps that reduce gradients: the last one, until which each rank adds up whole gradients in float32;
    or each one, which keeps only shards from one accumulation step to the next."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each weight matrix."""
    sequence_parallel: bool = True
    """With tensor parallel: activations between the matrices are split along the sequence instead of replicated."""
    loss_parallel: bool = True
    """With tensor parallel: logits stay split by vocabulary, and the loss is computed on the split logits."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallel's communication with its matrix products, piece by piece; needs CUDA and compile."""
    context_parallel_degree: Positive = 1
    """Ranks that split each sequence."""
    context_parallel_method: Literal["ring", "allgather_kv", "ulysses"] = "ring"
    """ring: keys and values of one rank after another; allgather_kv: of all at once; ulysses: all-to-all of heads."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How the ring moves keys and values: one all-gather, or from neighbour to neighbour."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """headtail: each rank takes a piece of the sequence's head and one of its tail, for equal attention work."""
    expert_parallel_degree: Positive = 1
    """Ranks that share the experts of a layer: of those of data_parallel_shard, context and tensor parallel."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: Name = "1F1B"
    """The order of micro-batches on each rank: a name of parallelize/schedules.py (docs/pipeline_parallel.md)."""
    pipeline_parallel_schedule_csv: str = ""
    """A file with a schedule of your own, in torch's form: a row of actions (0F1, 0B1, 0I1, 0W1) for each rank."""
    pipeline_parallel_microbatch_size: Sequences = 1
    """Sequences of one micro-batch, the unit that a stage runs; local_batch_size must be a multiple."""
    pipeline_parallel_sequence_splits: Positive = 1
    """Equal parts of each sequence that pass through the stages one by one: less idle time, less memory. With 1F1B."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Maximum layers of a stage. If unset, a rank has one stage, or two where the schedule needs several."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers that the first stage has fewer than others, since it has the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers that the last stage has fewer than others, since it has the head."""
    pipeline_first: bool = False
    """true: a pipeline's stages are on neighbouring ranks, data parallel is outermost; false: pipeline is outermost."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage (tok_embeddings, layers.N, norm, output), instead of the automatic split."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute activations in backward instead of keeping them; never changes the numbers."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """full: recompute every layer; selective: as selective_ac_option says; memory_budget: as the compiler chooses."""
    selective_ac_option: str = "2"
    """With mode = "selective": "N" for every N-th layer, or "op" for the cheap operations of every layer."""
    memory_budget: Fraction = 0.5
    """With mode = "memory_budget": what a compiled layer may keep, from 0, its inputs alone, to 1, all that it keeps
    without a budget."""
    offload: bool = False
    """Keep the inputs of checkpointed layers in pinned memory of the host; with mode full, or a number of layers."""
    preserve_rng_state: bool = True
    """Recompute with the same random numbers; no model here draws any."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare the shapes of recomputed tensors with those of the first time."""
    early_stop: bool = False
    """Stop recomputing a layer once backward has all that it needs."""
    debug: bool = False
    """Log operations, for the error message when the recomputed ones differ; slow."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """model: each layer; loss: all that follows the head's matrix product."""
    backend: Name = "inductor"
    """A backend of torch.compile, as torch.compiler.list_backends() names them."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Matrix products of the layers in 8 bits, by torchao; with model.converters = ["quantize.linear.float8"]."""

    recipe_name: Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"] = "rowwise_with_gw_hp"
    """Which values share a scale. Only the default's scales do not depend on the layout."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules with one of these strings in their names are not converted; the head never is."""
    emulate: bool = False
    """Emulate float8 in high precision, to try it on devices without float8."""


@dataclass(frozen=True, kw_only=True)
class LinearQuantization:
    """Low precision of linear modules."""

    float8: Float8 = field(default_factory=Float8)
    """Settings of quantize.linear.float8."""


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Low precision."""

    linear: LinearQuantization = field(default_factory=LinearQuantization)
    """Settings of quantize.linear."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on text that is not trained on."""

    enable: bool = False
    """Validate; unless validation.dataset_path is set, part of the training data is held out."""
    dataset_path: PathName | None = None
    """Separate validation data, in any form that training.dataset_path takes."""
    held_out_fraction: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Fraction of the training data's tokens that is held out, in blocks spread over the text."""
    local_batch_size: Sequences | None = None
    """Sequences of one forward on one rank; training's if unset. Never changes which sequences are validated."""
    seq_len: Positive | None = None
    """Tokens of one sequence; training's if unset."""
    freq: Positive = 10
    """Steps between two validations; the last step is validated too, unless a signal stops the run in it."""
    steps: Literal[-1] | Positive = -1
    """Length of a validation in global batches of training, from the first sequence on; -1 takes all the data."""


@dataclass(frozen=True, kw_only=True)
class Balancing:
    """How a mixture's experts are kept equally busy."""

    bias_update_speed: Annotated[float, Ge(0)] = 0.0
    """Each step moves the bias of an expert's scores by this much towards the mean load (arXiv:2408.15664)."""
    sequence_loss_factor: Annotated[float, Ge(0)] = 0.0
    """Factor of a loss that is least where the experts of each sequence have equal loads (arXiv:2412.19437)."""
    z_loss_factor: Annotated[float, Ge(0)] = 0.0
    """Factor of the mean square of the log-sum-exp of a router's logits, which stay small (arXiv:2202.08906)."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Process groups."""

    mode: Literal["default", "fake_backend"] = "default"
    """fake_backend: a dry run of one step, for any number of ranks, in one process (docs/dry_run.md)."""
    init_timeout_seconds: Seconds = 300
    """Timeout of a collective until the first step is done."""
    train_timeout_seconds: Seconds = 100
    """Timeout of a collective after the first step."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Repeatability."""

    seed: Seed = 0
    """Seed of the weights at step 0 and of the data order; a different seed is a different run."""
    deterministic: bool = False
    """Deterministic kernels only: the same layout gives the same bits. An op without such a kernel raises."""
    deterministic_warn_only: bool = False
    """With deterministic: an op without a deterministic kernel warns instead."""
    check_replicas_freq: NonNegative = 0
    """Steps between two comparisons of the bits that ranks hold alike: weights and moments of replicas, norms of tensor
    parallel. A rank that differs is named and the run stops before it saves; 0 for never."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A resolved job file."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    experts: Balancing = field(default_factory=Balancing)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)

    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Where each given key came from, as "file:line" or "command line"; not a table."""
