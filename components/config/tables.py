"""The tables of a job file: one frozen dataclass per table; the text below a key documents that key.

Keys with the meaning of a torchtitan v0.2 key have its name and type.
Sizes are in tokens or sequences, times in seconds, as their names say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from components.config.bounds import (
    DataPath,
    Fraction,
    Name,
    NonNegative,
    PathName,
    Position,
    Positive,
    PositiveFloat,
    Seconds,
    Seed,
    Sequences,
    Weight,
)
from components.config.model import Model
from components.config.optimizer import LRScheduler, Optimizer
from components.config.outputs import Checkpoint, Job, Metrics, Profiling


@dataclass(frozen=True, kw_only=True)
class DataLoader:
    """Loading of batches; never changes the batches."""

    num_workers: NonNegative = 0
    """Loader processes per rank; 0 loads in the rank's process."""
    persistent_workers: bool = False
    """Keep the workers between epochs (needs num_workers of 1 or more)."""
    pin_memory: bool = False
    """Load into page-locked memory, so that copies to CUDA do not block."""
    prefetch_factor: Positive | None = None
    """Read-ahead of each worker in batches (needs num_workers of 1 or more)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of the datasets of a mixture, [[training.mixture]] (docs/mixtures.md)."""

    name: Name
    """Names the source in phases and messages, and seeds the order of its sequences."""
    dataset: str = ""
    """A dataset of the Hugging Face hub, downloaded before the run: "org/name", "org/name:config@revision"."""
    dataset_path: DataPath | None = None
    """As training.dataset_path. A source has either dataset or dataset_path."""
    dataset_text_field: str = ""
    """Field or column that holds the text. Empty: training.dataset_text_field."""
    dataset_format: Literal["", "text", "chat", "tokens"] = ""
    """text or tokens: a source of texts or of token files among other data. Empty: training.dataset_format."""
    weight: Weight = 1.0
    """Share of the sequences, relative to the weights of other sources. 0: no sequences until a phase sets a weight."""
    max_epochs: Weight = 0.0
    """Refuse the run if it would see the source more often than this; 0: no bound."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """New weights of the sources, which apply from one sequence of the run on, [[training.mixture_phase]]."""

    from_sequence: Position
    """The first sequence of the phase; step t begins at sequence (t - 1) x training.global_batch_size."""
    weights: dict[str, Weight]
    """Weight of each source; 0 for sources that are left out."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Data, batch, precision and length of the run."""

    dataset: Name = "kjv"
    """kjv (bundled), or a dataset of the Hugging Face hub, whose split train is streamed: c4, "org/name",
    "org/name:config", "org/name:config@revision". Ignored if dataset_path or mixture is set."""
    dataset_path: DataPath | None = None
    """Local data: a file of text, JSON, CSV, parquet or Arrow (docs/data.md), or of another dataset_format, or a folder
    or glob of such files. Or such data in a store (docs/storage.md), as "s3://bucket/folder": a start copies them into
    dataset_cache."""
    mixture: list[Source] = field(default_factory=list)
    """Several datasets instead of one, in exact shares."""
    mixture_temperature: Annotated[float, Ge(1), Le(1000)] | None = None
    """Weights of sources from their sizes: the share of a source is proportional to tokens^(1 / mixture_temperature).
    1: equal epochs; more: closer to equal shares. Sources then have no weights, but 0 until a phase sets one."""
    mixture_phase: list[Phase] = field(default_factory=list)
    """Changes of the shares during the run, in order."""
    dataset_streaming: bool = False
    """Tokenize dataset_path (a folder with the layout of a hub dataset) during training instead of before it; sequences
    then keep the order of the text. Datasets of the hub are always streamed, except chats and the sources of mixtures,
    which are downloaded."""
    dataset_shuffle_window: NonNegative = 0
    """Number of sequences of a window. Each window of a stream is permuted; 0 keeps the stream's order. Training on a
    window begins when the whole window is tokenized."""
    dataset_text_field: Name = "text"
    """Field or column that holds the text; "meta.text" is the field text of the field meta."""
    dataset_errors: Literal["fail", "skip"] = "fail"
    """Unreadable records: fail stops the run, skip leaves them out and counts them."""
    dataset_separator: Name = "auto"
    """Token after each document. auto: the end token that the tokenizer's files name; none: no token between documents,
    neither at their end nor at their start; or a token of the tokenizer, such as "<|endoftext|>"."""
    dataset_format: Literal["text", "chat", "preference", "tokens"] = "text"
    """Form of the data: text; chats, with the table chat, which says what of them is trained; pairs of a chosen and a
    rejected completion, with the tables chat and preference (docs/preference.md); or token files of other trainers
    (docs/token_files.md)."""
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in token files without a header (nanoGPT, OLMo)."""
    dataset_cache: PathName = ".cache/tokens"
    """Folder of tokenized data, which runs share; relative to the repository. If the repository cannot be written, the
    default is meshwright/tokens in XDG_CACHE_HOME, or in ~/.cache."""
    local_batch_size: Sequences = 8
    """Sequences per accumulation step (one forward and backward) on one rank."""
    global_batch_size: Literal[-1] | Sequences = -1
    """Sequences per optimizer step over all ranks, which determines the number of accumulation steps. -1: one
    accumulation step of local_batch_size sequences on every rank."""
    seq_len: Positive = 2048
    """Tokens per sequence."""
    objective: Name = "next_token"
    """Loss to minimise (models/objective.py)."""
    z_loss_factor: Annotated[float, Ge(0)] = 0.0
    """Factor of the squared log of the sum of a token's exponentials, a term of the training loss that keeps logits
    small (arXiv:2204.02311; usual: 1e-4). With this or the next term, a logged step also has unregularized_loss."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each label that the whole vocabulary gets in the training loss (arXiv:1512.00567; usual: 0.1). A
    validation's loss has neither term."""
    mtp_loss_factor: PositiveFloat = 0.3
    """Factor of the mean loss of the layers of multi-token prediction, of which model.sizes.mtp_layers is the number
    (arXiv:2412.19437: first 0.3, later 0.1). A logged step then also has mtp_loss and unregularized_loss."""
    document_mask: bool = False
    """Mask attention between documents of a packed sequence, and restart positions at each document."""
    max_norm: PositiveFloat = 1.0
    """Global norm to which gradients are clipped."""
    max_nonfinite_steps: Positive = 10
    """Stop after this many consecutive skipped steps, at most one step late. A step is skipped if its loss or gradient
    is not finite or a spike."""
    skip_spikes_sigma: Annotated[float, Ge(0)] = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean of the last
    skip_spikes_window steps (usual: 6); 0 for never."""
    skip_spikes_window: Annotated[int, Ge(4)] = 128
    """Steps in the mean of skip_spikes_sigma; nothing is skipped until half of these steps are known."""
    steps: Positive = 10000
    """Optimizer steps of the run."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the stored weights and their gradients; bfloat16 weights are updated with stochastic rounding."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Precision of gradient reduction."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Argument of torch.set_float32_matmul_precision: internal precision of float32 matrix products."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory; weights are on the device only while their layer
    computes."""
    gc_freq: Positive = 50
    """Run Python's garbage collector every this many steps, and never in between."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Loader processes and buffers."""

    @property
    def objective_and_terms(self) -> tuple[str, tuple[str, ...], float, float]:
        """The objective, and its terms beside multi-token prediction."""
        return self.objective, self.sources, self.z_loss_factor, self.label_smoothing

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the mixture's sources, in the order of their numbers."""
        return tuple(sorted(source.name for source in self.mixture))

    @property
    def masks_documents(self) -> bool:
        """Whether a token sees its own document alone. Rows of chats and of pairs always have this mask."""
        return self.document_mask or self.has_chats

    @property
    def has_chats(self) -> bool:
        """Whether the data are chats, or pairs of them, which a template shows."""
        return self.dataset_format in ("chat", "preference")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The layout: sizes of the mesh dimensions, whose product is the number of ranks."""

    auto: bool = False
    """Fill in the layout at launch: the fastest one that fits the ranks' devices (docs/plan.md). Keys that are set keep
    their values."""
    auto_device: str = ""
    """Device for auto: a name in parallelize/plan/devices.toml, or a .toml file. If empty, this machine's device."""
    data_parallel_replicate_degree: Literal[-1] | Positive = 1
    """Replicas of the model (DDP; with a shard degree, HSDP); -1 takes the remaining ranks."""
    data_parallel_shard_degree: Literal[-1] | Positive = -1
    """Ranks that share one copy of weights, gradients and optimizer state (FSDP); -1 takes the remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after forward: always (ZeRO-3) or never (ZeRO-2). default: never in a pipeline, otherwise
    always except for the head."""
    fsdp_prefetch_layers: Positive = 1
    """Layers whose weights are gathered ahead of the computing layer; each costs the memory of its gathered weights."""
    fsdp_reduce_gradients: Literal["last", "each"] = "last"
    """Accumulation steps that reduce gradients. last: only the last one; until then each rank accumulates unsharded
    gradients in float32. each: every one; ranks keep only shards between accumulation steps."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each weight matrix."""
    sequence_parallel: bool = True
    """With tensor parallel: shard activations between the matrices along the sequence instead of replicating them."""
    loss_parallel: bool = True
    """With tensor parallel: keep logits sharded along the vocabulary, and compute the loss on these shards."""
    enable_async_tensor_parallel: bool = False
    """Overlap communication of tensor parallel with its matrix products, chunk by chunk; needs CUDA and compile."""
    context_parallel_degree: Positive = 1
    """Ranks that split each sequence."""
    context_parallel_method: Literal["ring", "allgather_kv", "ulysses"] = "ring"
    """ring: attend to the keys and values of one rank after another; allgather_kv: gather all keys and values; ulysses:
    all-to-all of heads."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """Transport of the ring's keys and values: one all-gather, or transfers between neighbors."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """headtail: each rank has one chunk of the sequence's head and one of its tail, for equal attention work."""
    expert_parallel_degree: Positive = 1
    """Ranks that share the experts of a layer: a subgroup of the data_parallel_shard, context and tensor parallel
    ranks."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: Name = "1F1B"
    """Order of micro-batches on each rank: a name in parallelize/schedules.py (docs/pipeline_parallel.md)."""
    pipeline_parallel_schedule_csv: PathName | Literal[""] = ""
    """File with a custom schedule in torch's format: one row of actions (0F1, 0B1, 0I1, 0W1) per rank."""
    pipeline_parallel_microbatch_size: Sequences = 1
    """Sequences per micro-batch; local_batch_size must be a multiple."""
    pipeline_parallel_sequence_splits: Positive = 1
    """Split each sequence into this many equal parts, which pass through the stages one by one. This reduces idle time
    and memory. Needs 1F1B."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Maximum number of layers per stage. If unset, a rank has one stage, or two if the schedule needs several."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Number of layers that the first stage lacks to make room for the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Number of layers that the last stage lacks to make room for the head."""
    pipeline_first: bool = False
    """true: the stages of a pipeline are on neighboring ranks, and data parallel is the outermost mesh dimension;
    false: pipeline is the outermost."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each stage (tok_embeddings, layers.N, norm, output); replaces the automatic split."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Recompute activations in backward instead of keeping them; never changes the numbers."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """full: recompute every layer; selective: see selective_ac_option; memory_budget: the compiler chooses."""
    selective_ac_option: str = "2"
    """With mode = "selective": "N" for every N-th layer, or "op" for the cheap operations of every layer."""
    memory_budget: Fraction = 0.5
    """With mode = "memory_budget": share of a compiled layer's activations that may be kept, from 0 (only its inputs)
    to 1 (as without a budget)."""
    offload: bool = False
    """Keep the inputs of checkpointed layers in pinned host memory; needs mode "full", or "selective" with a number."""
    preserve_rng_state: bool = True
    """Recompute with the same random numbers; the models in this repository draw none."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare the shapes of recomputed tensors with the original shapes."""
    early_stop: bool = False
    """Stop recomputing a layer once backward has all tensors that it needs."""
    debug: bool = False
    """Log operations, so that an error message can show how recomputed operations differ; slow."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """model: each layer; loss: all operations after the head's matrix product."""
    backend: Name = "inductor"
    """A backend of torch.compile, from torch.compiler.list_backends()."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Matrix products of the layers in float8, by torchao; needs model.converters = ["quantize.linear.float8"]."""

    recipe_name: Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"] = "rowwise_with_gw_hp"
    """Granularity of the scales. Only the default has scales that are the same at every layout."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules whose names contain one of these strings are not converted; the head never is."""
    emulate: bool = False
    """Emulate float8 in high precision, for devices without float8."""


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
    """Loss on text that is not used for training."""

    enable: bool = False
    """Validate. Part of the training data is held out, unless validation.dataset_path is set."""
    dataset_path: DataPath | None = None
    """Separate validation data, in the same forms as training.dataset_path."""
    text_path: DataPath | None = None
    """Text whose loss is logged beside, as validation_text_loss: what a run on pairs or chats does to it."""
    held_out_fraction: Annotated[float, Gt(0), Lt(1)] = 0.05
    """Fraction of the training data's tokens that is held out, in blocks spread over the text."""
    local_batch_size: Sequences | None = None
    """Sequences per forward on one rank; training.local_batch_size if unset. Never changes the validated sequences."""
    seq_len: Positive | None = None
    """Tokens per sequence; training.seq_len if unset."""
    freq: Positive = 10
    """Validate every this many steps, and after the last step, unless a signal stops the run in that step."""
    at_start: bool = False
    """Validate also before the first step, as step 0."""
    steps: Literal[-1] | Positive = -1
    """Global batches (of training's size) in a validation, from the first sequence on; -1 uses all validation data."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Prompts that the model continues while it trains (docs/evaluation.md)."""

    prompts: list[Name] = field(default_factory=list)
    """Texts to continue; none: no samples. In a run on chats each is a user's message, and the model answers."""
    freq: Positive = 100
    """Continue the prompts every this many steps, and after the last one."""
    tokens: Positive = 40
    """Most tokens of a continuation. Each takes a forward pass of the whole text."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0: always the likeliest token. Otherwise tokens are drawn, and log-probabilities divided by this number."""
    top_k: Annotated[int, Ge(1), Le(1000)] = 50
    """With a temperature: number of likeliest tokens to draw from."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores on tasks of lm-eval while the model trains (docs/evaluation.md)."""

    tasks: list[Name] = field(default_factory=list)
    """Names of tasks or groups of lm-eval, or YAML files of tasks; none: no evaluation."""
    freq: Positive = 1000
    """Evaluate every this many steps, and after the last one."""
    limit: Positive | None = None
    """Documents of each task, from the first on; all if unset."""


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Averages of the weights over steps (docs/averages.md); they never change training."""

    ema_decay: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Decay of an exponential moving average of the trained weights, updated after each accepted step (usual: 0.999);
    0 for none. It takes 4 bytes for each trained weight, is validated beside the weights, and kept in checkpoints."""
    export: bool = False
    """checkpoint.last_save_in_hf writes the average instead of the weights."""


@dataclass(frozen=True, kw_only=True)
class Balancing:
    """Load balancing of the experts of a mixture."""

    bias_update_speed: Annotated[float, Ge(0)] = 0.0
    """Change per step of an expert's score bias, towards the mean load (arXiv:2408.15664)."""
    sequence_loss_factor: Annotated[float, Ge(0)] = 0.0
    """Factor of a loss that is minimal if the experts have equal loads in each sequence (arXiv:2412.19437)."""
    z_loss_factor: Annotated[float, Ge(0)] = 0.0
    """Factor of the router z-loss, which keeps router logits small: the mean square of their log-sum-exp
    (arXiv:2202.08906)."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Timeouts and backend of process groups."""

    mode: Literal["default", "fake_backend"] = "default"
    """fake_backend: a dry run of one step in one process, for any number of ranks (docs/dry_run.md)."""
    share_gpus: bool = False
    """Let the ranks of a node share its GPUs if there are fewer GPUs than ranks, to try a layout. Slow, because ranks
    exchange all messages through sockets; mfu is unknown."""
    init_timeout_seconds: Seconds = 300
    """Timeout of a collective until the end of the first step."""
    train_timeout_seconds: Seconds = 100
    """Timeout of a collective after the first step."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility."""

    seed: Seed = 0
    """Seed of the weights at step 0 and of the data order; a different seed is a different run."""
    deterministic: bool = False
    """Use only deterministic kernels: the same layout gives the same bits. An op without such a kernel raises."""
    deterministic_warn_only: bool = False
    """With deterministic: an op without a deterministic kernel warns instead."""
    check_replicas_freq: NonNegative = 0
    """Every this many steps, check that replicated state is bitwise equal: weights and moments of replicas, and tensors
    that tensor parallel does not split, such as norms. If a rank differs, the run names that rank and stops before it
    saves. 0 for never."""


OF_TOKENIZER = "tokenizer"
"""Value of chat.template that is not a path, but means the template in the tokenizer's folder."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Chats as training data, with training.dataset_format = "chat" (docs/chat.md), and pairs with "preference"."""

    template: PathName = OF_TOKENIZER
    """Template that turns messages into text: tokenizer, for the one in the tokenizer's folder, or a .jinja file."""
    template_kwargs: Annotated[str, MinLen(1)] = "{}"
    """Variables of the template, as a JSON object: '{"enable_thinking": false}'."""
    messages_field: str = ""
    """Field of a record that holds its messages; by default messages, conversations, prompt with completion, or
    instruction with output, whichever is there. Pairs: the field of the prompt."""
    roles_to_train: Annotated[list[Name], MinLen(1)] = field(default_factory=lambda: ["assistant"])
    """Roles whose turns are trained. The header of a turn is trained too, unless the role is assistant."""
    message_field_training: Name = "train"
    """Field of a message that says, by true or false, whether its turn is trained, whatever its role."""
    history: Literal["as_inference", "last_turn"] = "as_inference"
    """The text before a trained turn is always what generation would see. as_inference: all turns are trained. A turn
    begins a new sequence if its prompt shows earlier turns differently than the current sequence does. last_turn: only
    a chat's last turn is trained."""
    too_long: Literal["fail", "skip", "truncate_end"] = "fail"
    """If a chat has more than seq_len + 1 tokens: stop the run at its start, leave the chat out, or cut off its end."""
    special_tokens_in_text: Literal["fail", "as_text"] = "fail"
    """If a message spells a special token: refuse the chat, or encode the spelling as plain text."""
    packing: Literal["best_fit", "none"] = "best_fit"
    """best_fit: a row has as many chats as fit, chosen by best-fit decreasing; none: a row has one chat."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """A teacher's probabilities in the loss (docs/distill.md)."""

    alpha: Fraction = 0.0
    """Share of the teacher: the loss is (1 - alpha) x cross-entropy + alpha x temperature^2 x KL(teacher || student)
    (arXiv:1503.02531); 0 for no teacher. A validation's loss is the cross-entropy."""
    temperature: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Divisor of the logits of both in the KL."""
    top: Positive = 64
    """The teacher's likeliest tokens that are kept of each token; all others together are one more class."""
    teacher_path: PathName | None = None
    """Hugging Face folder of the teacher. If unset, the only teacher that has taught the data."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Loss of pairs, with training.dataset_format = "preference" (docs/preference.md)."""

    loss: Literal["dpo", "ipo", "simpo", "orpo"] = "dpo"
    """dpo (arXiv:2305.18290) and ipo (arXiv:2310.12036) compare with a reference: the run's starting weights, or the
    base of adapters. simpo (arXiv:2405.14734) and orpo (arXiv:2403.07691) need none."""
    beta: PositiveFloat = 0.1
    """dpo, ipo: how closely the model keeps to the reference; simpo: scale of rewards (usual: 2); orpo: factor of the
    odds ratio's term."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """dpo, simpo: the share of pairs whose sides may be the wrong way round (conservative DPO)."""
    gamma: Annotated[float, Ge(0)] = 0.5
    """simpo: the margin that the chosen completion's reward should have over the rejected one's."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A job file with all defaults filled in."""

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
    averages: Averages = field(default_factory=Averages)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    samples: Samples = field(default_factory=Samples)
    evaluation: Evaluation = field(default_factory=Evaluation)
    chat: Chat = field(default_factory=Chat)
    distill: Distill = field(default_factory=Distill)
    preference: Preference = field(default_factory=Preference)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)

    @property
    def reference(self) -> Literal["", "start", "base"]:
        """The reference model of a loss of pairs: the starting weights, the base of adapters, or none."""
        if self.training.dataset_format != "preference" or self.preference.loss not in ("dpo", "ipo"):
            return ""
        return "base" if self.model.lora.rank else "start"

    @property
    def mtp_layers(self) -> int:
        """Layers of multi-token prediction. No flavor has any, and no folder asks for any."""
        layers = self.model.sizes.get("mtp_layers", 0)
        return layers if isinstance(layers, int) else 0

    @property
    def objective_and_terms(self) -> tuple[Any, ...]:
        """Arguments of models/objective.py's objective_of."""
        mtp, distill = self.training.mtp_loss_factor if self.mtp_layers else 0.0, self.distill
        pairs = self.preference if self.training.dataset_format == "preference" else None
        return *self.training.objective_and_terms, mtp, distill.alpha, distill.temperature, pairs

    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Place where each given key was set: "file:line" or "command line". Not a table."""
