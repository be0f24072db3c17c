"""The tables of a job file: one frozen dataclass each, every key documented in the line beneath it.

Names, types and meanings are those of torchtitan v0.2 wherever the meaning is the same.
Sizes are in tokens or sequences, times in seconds, as the names say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from components.config.bounds import Beta, Fraction, Name, NonNegative, Positive, PositiveFloat
from components.config.outputs import Checkpoint, Job, Metrics, Profiling


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: Name = "llama"
    """A name in models/__init__.py."""
    flavor: Name = "debug"
    """A named size of that model."""
    attention_kernel: Name = "auto"
    """How attention is computed, by the names of KERNELS in models/attention.py; auto takes the fastest."""
    hf_assets_path: Name = "assets/tokenizer"
    """Tokenizer: a tiktoken rank file or tokenizer.json, or the folder that holds one."""
    converters: list[Literal["quantize.linear.float8"]] = field(default_factory=list)
    """Tables whose conversion the model gets."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update of weights: Adam with or without decoupled weight decay (arXiv:1412.6980, arXiv:1711.05101)."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW decays weights by themselves, Adam through the gradient."""
    lr: PositiveFloat = 8e-4
    """Peak learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of matrices; vectors (norms) are never decayed."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Kernel of the update; fused is fastest on CPU and CUDA."""


OPTIMIZER_KEYS: dict[str, tuple[str, ...]] = {
    "AdamW": ("beta1", "beta2", "eps", "implementation"),
    "Adam": ("beta1", "beta2", "eps", "implementation"),
}
"""optimizer.name -> the keys that it takes, beside lr and weight_decay, which all take."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Warm-up, stable, decay (arXiv:2404.06395)."""

    warmup_steps: NonNegative = 200
    """Steps of linear warm-up from 0, which may be more than the run has; if unset, no more than the schedule has."""
    total_steps: Positive | None = None
    """Length of the schedule; training.steps if unset."""
    decay_ratio: Fraction | None = None
    """Part of total_steps that decays, at most all after the warm-up, which is also what unset means."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this factor of lr."""


@dataclass(frozen=True, kw_only=True)
class DataLoader:
    """How batches are brought to the loop; never changes which."""

    num_workers: NonNegative = 0
    """Loader processes a rank; 0 loads in the rank itself."""
    persistent_workers: bool = False
    """Keep the workers between epochs (needs num_workers of 1 or more)."""
    pin_memory: bool = False
    """Page-locked buffers, for copies to CUDA that don't wait."""
    prefetch_factor: Positive | None = None
    """Batches that each worker prepares ahead (needs num_workers of 1 or more)."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch, precision and length of the run."""

    dataset: Name = "kjv"
    """kjv, which is bundled, or a dataset of the Hugging Face hub, whose split train is streamed: c4, "org/name",
    "org/name:config", "org/name:config@revision"; dataset_path goes before it."""
    dataset_path: Name | None = None
    """Your own data: a .txt, .jsonl or .parquet file, a folder or a glob of them."""
    dataset_streaming: bool = False
    """Tokenize dataset_path, a folder as on the hub, while training goes on and not before; sequences then come in the
    order of the text. A dataset of the hub always is."""
    dataset_text_field: Name = "text"
    """Field (JSONL) or column (parquet) that holds the text."""
    dataset_errors: Literal["fail", "skip"] = "fail"
    """On a record that cannot be read: stop, or skip it and count."""
    dataset_cache: Name = ".cache/tokens"
    """Folder of the tokenized data, shared by runs; relative to the repository."""
    local_batch_size: Positive = 8
    """Sequences of one accumulation step on one rank: one forward and backward."""
    global_batch_size: Literal[-1] | Positive = -1
    """Sequences of one optimizer step over all ranks, in as many accumulation steps as that takes; -1 means one:
    local_batch_size on every rank."""
    seq_len: Positive = 2048
    """Tokens of one sequence."""
    document_mask: bool = False
    """Documents packed into one sequence don't see each other, and positions restart at each."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    max_nonfinite_steps: Positive = 10
    """Stop, at a logged step, when this many in a row were skipped because the gradient was not finite."""
    steps: Positive = 10000
    """Optimizer steps of the run."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward; weights and optimizer are float32."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Precision of gradient reduction."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision: what a float32 product may be computed in."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer on the host; a layer's weights are on the device while it computes."""
    gc_freq: Positive = 50
    """Collect Python garbage every so many steps, and never in between."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Loader processes and buffers."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The layout: sizes of the mesh dimensions. Their product is the number of ranks."""

    data_parallel_replicate_degree: Literal[-1] | Positive = 1
    """Replicas of the model (DDP; HSDP together with the shard degree); -1 takes the ranks that are left."""
    data_parallel_shard_degree: Literal[-1] | Positive = -1
    """Ranks that share one copy of weights, gradients and optimizer (FSDP); -1 takes the ranks that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after forward: always (ZeRO-3), never (ZeRO-2); default frees all but the head, none in a
    pipeline."""
    fsdp_prefetch_layers: Positive = 1
    """Layers whose weights are gathered ahead of the one that computes; each one ahead takes its memory."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each matrix."""
    sequence_parallel: bool = True
    """With tensor parallel: what is between the matrices is split along the sequence, not repeated on each rank."""
    loss_parallel: bool = True
    """With tensor parallel: logits stay split by vocabulary, and so does the loss."""
    enable_async_tensor_parallel: bool = False
    """Tensor parallel's messages travel while its products are computed, piece by piece; needs CUDA and compile."""
    context_parallel_degree: Positive = 1
    """Ranks that split each sequence."""
    context_parallel_method: Literal["ring", "allgather_kv", "ulysses"] = "ring"
    """ring: torch's ring attention; allgather_kv: keys and values are gathered; ulysses: heads are exchanged."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values of the ring travel: gathered once, or from neighbour to neighbour."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """headtail: a rank takes a piece of the sequence's head and one of its tail, so that all have as much attention."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: Name = "1F1B"
    """The order of micro-batches on each rank: a name of parallelize/schedules.py (docs/pipeline_parallel.md)."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences of one micro-batch, which a stage runs at a time; local_batch_size is a multiple."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of one stage at the most; if unset, a rank has one stage, or two where the schedule wants more."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """So many layers fewer in the first stage, which has the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """So many layers fewer in the last stage, which has the head."""
    pipeline_first: bool = False
    """Stages of one pipeline are on neighbouring ranks, with data parallel outermost; else the other way round."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """The modules of each stage by name (tok_embeddings, layers.N, norm, output), in place of the automatic split."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """What forward leaves for backward is computed again instead; never changes the numbers."""

    mode: Literal["none", "full", "selective"] = "none"
    """full: every layer; selective: what selective_ac_option says."""
    selective_ac_option: str = "2"
    """With mode = "selective": every so many layers, or "op" for the cheap operations of every layer."""
    preserve_rng_state: bool = True
    """Random numbers are the same when a layer is computed again; no model here draws any."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes of what is computed again with the first time's."""
    early_stop: bool = False
    """Stop computing a layer again once all that backward needs is there."""
    debug: bool = False
    """Keep a log of operations for the error message when they differ; slow."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """model: each layer; loss: what follows the head's product."""
    backend: Name = "inductor"
    """A backend of torch.compile, as torch.compiler.list_backends() names them."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Matrix products of the layers in 8 bits, by torchao; with model.converters = ["quantize.linear.float8"]."""

    recipe_name: Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"] = "rowwise_with_gw_hp"
    """What shares a scale. Only the default's scales do not depend on the layout."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules with one of these in their names are left as they are; the head always is."""
    emulate: bool = False
    """Compute in high precision what 8 bits would give: for devices without float8, to try it out."""


@dataclass(frozen=True, kw_only=True)
class LinearQuantization:
    """Of matrix products."""

    float8: Float8 = field(default_factory=Float8)
    """Settings of quantize.linear.float8."""


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Low precision."""

    linear: LinearQuantization = field(default_factory=LinearQuantization)
    """Of linear modules."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on text that is not trained on."""

    enable: bool = False
    """Validate; without a dataset_path of its own, part of the training data is held out."""
    dataset_path: Name | None = None
    """Validation data of its own, in any form that training.dataset_path takes."""
    held_out_fraction: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Part of the training data's tokens held out, in blocks spread over the text."""
    local_batch_size: Positive | None = None
    """Sequences of one forward on one rank; training's if unset. Never changes which are validated."""
    seq_len: Positive | None = None
    """Tokens of one sequence; training's if unset."""
    freq: Positive = 10
    """Validate every so many steps, and at the last."""
    steps: Literal[-1] | Positive = -1
    """Global batches of training that one validation is on, from the first sequence on; -1 takes all the data."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Process groups."""

    mode: Literal["default", "fake_backend"] = "default"
    """fake_backend: a dry run of one step, of any number of ranks in one process (docs/dry_run.md)."""
    init_timeout_seconds: Positive = 300
    """How long a collective may wait until the first step is done."""
    train_timeout_seconds: Positive = 100
    """How long a collective may wait after that."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Repeatability."""

    seed: NonNegative = 0
    """Decides weights at step 0 and the data order; a different seed is a different run."""
    deterministic: bool = False
    """Deterministic kernels only: the same layout gives the same bits. An op that has none raises."""
    deterministic_warn_only: bool = False
    """With deterministic: warn about an op that has no deterministic kernel."""


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
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)

    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Where each given key came from, as "file:line" or "command line"; not a table."""
