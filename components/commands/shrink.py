"""A job as small as its layout allows: the same family, axes and methods, on a few ranks and made-up data."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from components.config import ROOT, JobConfig
from components.config.model import RopeScaling
from components.config.optimizer import LRScheduler
from components.config.outputs import Checkpoint, Metrics, Profiling
from components.config.tables import ActivationCheckpoint, Averages, Comm, Compile, DataLoader, Parallelism, Quantize
from models import MODELS, sizes
from parallelize.mesh import Degrees, global_batch_size
from parallelize.schedules import number_of_stages
from parallelize.sharding import knows_slices

VOCABULARY = 1024
"""Tokens of the small tokenizer."""
SEQ_LEN = 48
MOST_RANKS = 8
"""A degree grows beyond 2 only up to this many ranks."""


def shrink(config: JobConfig, degrees: Degrees, free: bool, folder: Path) -> tuple[JobConfig, Degrees, list[str]]:
    """The small job, its degrees, and a line for each thing that the small job does not show.

    degrees: those of the job. free: the job takes any number of ranks (a degree of -1). folder: gets the data.
    """
    small, notes = small_degrees(config, degrees, free), list[str]()
    kernel = config.model.attention_kernel
    for wrong, what in (
        (config.training.mixed_precision_param != "float32" or config.training.dtype != "float32", "precision"),
        (bool(config.model.converters), "float8"),
        (config.compile.enable, "compiled code"),
        (config.training.enable_cpu_offload or config.optimizer.state_offload, "offloading to the host"),
        (config.parallelism.enable_async_tensor_parallel, "overlapped messages of tensor parallel"),
        (kernel not in ("auto", "sdpa"), f"the attention kernel {kernel}"),
        (bool(config.parallelism.module_fqns_per_model_part), "the job's own list of stages"),
        (degrees.pp > 2 == small.pp and not _own_table(config), "a stage between the first and the last"),
        (degrees.cp > 2 == small.cp, "a ring of more than two ranks"),
        (config.distill.alpha > 0, "the teacher, whose rows are made up"),
        (bool(config.checkpoint.initial_load_path or config.model.lora.initial_load_path), "initial weights"),
        (bool(config.averages.ema_decay) and not config.validation.enable, "the average of the weights"),
        (_is_odd(config, degrees, small) and not _knows_slices(small), "a vocabulary that tp divides unevenly"),
    ):
        notes += [what] if wrong else []
    notes += ["real sizes, data, memory and speed"]
    made = replace(
        config,
        job=replace(config.job, dump_folder=str(folder / "run"), print_config=False),
        profiling=Profiling(),
        metrics=Metrics(),
        checkpoint=Checkpoint(),
        averages=config.averages if config.validation.enable else Averages(),
        comm=Comm(init_timeout_seconds=60, train_timeout_seconds=60),
        compile=Compile(),
        quantize=Quantize(),
        origins={},  # values that the job file gives are replaced
        lr_scheduler=LRScheduler(warmup_steps=0),
        # With this eps the sign of near-zero gradients decides nothing.
        optimizer=replace(config.optimizer, lr=1e-3, eps=1e-5, state_offload=False),
        parallelism=_parallelism(config, degrees, small),
        model=replace(
            config.model,
            sizes=small_sizes(config, degrees, small),
            rope_scaling=_rope_scaling(config.model.rope_scaling),
            lora=replace(config.model.lora, rank=min(config.model.lora.rank, 4), initial_load_path=None),
            hf_assets_path=_write(folder / "small.tiktoken", small_tokenizer()),
            attention_kernel="auto",
            converters=[],
        ),
        distill=replace(config.distill, top=min(config.distill.top, 8), teacher_path=None),
        validation=replace(
            config.validation, dataset_path=None, text_path=None, local_batch_size=None, seq_len=None, steps=1
        ),
        debug=replace(config.debug, check_replicas_freq=0),
    )
    return with_batch(with_data(made, folder), config, degrees, small, free), small, notes


def alone(config: JobConfig) -> JobConfig:
    """The same run on one process: without anything that a layout may change."""
    return replace(config, parallelism=Parallelism(), activation_checkpoint=ActivationCheckpoint())


def only(config: JobConfig, degrees: Degrees, axis: str) -> tuple[JobConfig, Degrees]:
    """The small job with one axis of its layout."""
    size = getattr(degrees, axis)
    kept = Degrees(dp_shard=size, ep=size) if axis == "ep" else Degrees(**{axis: size})
    parallelism = replace(_with_degrees(config.parallelism, kept), pipeline_first=False)
    if kept.pp == 1:
        parallelism = replace(
            parallelism,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_schedule_csv="",
            pipeline_parallel_sequence_splits=1,
        )
    return replace(config, parallelism=parallelism), kept


def small_degrees(config: JobConfig, real: Degrees, free: bool) -> Degrees:
    """Degrees of 2 for degrees of 2 or more; 3 stages or cp ranks where few ranks are enough for these."""
    free_key = "dp_replicate" if config.parallelism.data_parallel_replicate_degree == -1 else "dp_shard"
    small = Degrees(**{name: min(size, 2) for name, size in asdict(real).items()})
    if free:
        small = replace(small, **{free_key: 2})
    if _own_table(config):
        small = replace(small, pp=real.pp)
    if real.ep > 1:
        ep = 4 if real.ep > real.tp > 1 else 2
        holders = ep * (2 if free or real.efsdp > 1 else 1)
        small = replace(small, ep=ep, dp_shard=max(small.dp_shard, holders // (small.cp * small.tp)))
    key_heads = sizes(config.model).n_kv_heads
    if 1 < key_heads < real.tp and small.world_size * 2 <= MOST_RANKS:
        small = replace(small, tp=4)  # two ranks for each of two key heads
    if real.pp > 2 and small.pp == 2 and small.world_size // 2 * 3 <= MOST_RANKS:
        small = replace(small, pp=3)
    if real.cp > 2 and small.world_size // 2 * 3 <= MOST_RANKS:
        small = replace(small, cp=3)
    return small


def small_sizes(config: JobConfig, real: Degrees, small: Degrees) -> dict[str, Any]:
    """model.sizes of the small model: every option of the family, in small numbers that the degrees divide."""
    whole, key_heads = sizes(config.model), sizes(config.model).n_kv_heads
    exchanged = small.cp if config.parallelism.context_parallel_method == "ulysses" else 1
    unit = small.tp * exchanged
    if key_heads == whole.n_heads:
        heads = kept = 2 * unit
    else:
        kept = (small.tp // 2 if key_heads < real.tp else small.tp) if real.tp > 1 else min(key_heads, 2)
        kept *= exchanged if real.cp > 1 and key_heads // real.tp % real.cp == 0 else 1
        heads = kept * min(whole.n_heads // key_heads, 2)
        while heads % unit:
            heads *= 2
    packed = config.model.lora.base == "nf4"
    scaling = whole.rope_scaling
    factors = scaling and scaling.rope_type == "longrope"  # a number for each pair of columns
    width = whole.head_dim if factors else 64 * small.tp if packed else 16
    dim = 128 * small.tp if packed else 64
    found: dict[str, Any] = {"n_heads": heads, "n_kv_heads": kept, "ffn_dim": 128 * small.tp}
    found |= {"dim": dim, "head_size": width} if whole.head_size else {"dim": heads * width}
    found |= {"vocab_size": VOCABULARY + (_is_odd(config, real, small) and _knows_slices(small))}
    numbers: dict[str, Callable[[Any], Any]] = {
        "window": lambda size: min(size, 9),
        "full_every": lambda every: min(every, 2),
        "no_rope_every": lambda every: min(every, 2),
        "n_dense_layers": lambda count: min(count, 1),
        "n_experts": lambda count: max(4 * small.ep, 8),
        "top_k": lambda count: min(count, 3 if getattr(whole, "n_groups", 1) > 1 else 2),
        "n_groups": lambda count: min(count, 4),
        "top_groups": lambda count: min(count, 2),
        "expert_dim": lambda size: 128 * small.tp if packed else 32,
        "n_shared": lambda count: min(count, 1),
        "q_lora_rank": lambda size: 64 if packed else 24,
        "kv_lora_rank": lambda size: 64 if packed else 16,
        "nope_dim": lambda size: 48 if packed else 8,
        "rope_dim": lambda size: 16 if packed else 4,
        "v_dim": lambda size: 64 if packed else 6,
    }
    names = {field.name for field in fields(whole)}
    if "rope_dim" in names:  # heads have the widths of their parts
        found = {name: value for name, value in found.items() if name != "head_size"} | {"dim": dim}
    for name, smaller in numbers.items():
        if name in names and (value := getattr(whole, name)):
            found[name] = smaller(value)
    least = 2 + found.get("n_dense_layers", 0)
    if small.pp > 1:
        stages, parallelism = _stages(config, real, small), _parallelism(config, real, small)
        ends = parallelism.pipeline_parallel_first_stage_less_layers
        ends += parallelism.pipeline_parallel_last_stage_less_layers
        layers = 2 * stages - ends
        found["n_layers"] = layers if layers >= least else layers + stages
    else:
        found["n_layers"] = least
    fixed = names - whole.hf_fields.keys() if MODELS[config.model.name][0].hf_type else set[str]()
    changed = {name: value for name, value in found.items() if name in names - fixed and value != getattr(whole, name)}
    return config.model.sizes | changed


def _is_odd(config: JobConfig, real: Degrees, small: Degrees) -> bool:
    return real.tp > 1 and sizes(config.model).vocab_size % real.tp > 0


def _knows_slices(small: Degrees) -> bool:
    """As rules/tensor.py, of the small vocabulary with a token more."""
    return small.dp_shard * small.cp == 1 or knows_slices(VOCABULARY + 1, small.tp, small.dp_shard * small.cp)


def with_batch(made: JobConfig, config: JobConfig, real: Degrees, small: Degrees, free: bool) -> JobConfig:
    """Micro-batches, accumulation steps and sequences as few as the schedule allows."""
    training, each = config.training, min(config.parallelism.pipeline_parallel_microbatch_size, 2)
    local = min(training.local_batch_size, 2)
    if small.pp > 1:
        count = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        local = each * (count if _own_table(config) else min(count, 2 * small.pp * _a_rank(config, real)))
    accumulated = free or global_batch_size(config, real) > training.local_batch_size * real.batch_ranks
    parallelism = replace(made.parallelism, pipeline_parallel_microbatch_size=each if small.pp > 1 else 1)
    training = replace(
        made.training, local_batch_size=local, global_batch_size=local * small.batch_ranks * (2 if accumulated else 1)
    )
    return replace(made, training=training, parallelism=parallelism)


def with_data(config: JobConfig, folder: Path) -> JobConfig:
    """Data of the same formats, written into the folder."""
    training, kinds = config.training, {"text": clauses, "chat": chats, "preference": pairs}
    paths = {kind: _write(folder / f"{kind}.jsonl", make()) for kind, make in kinds.items()}
    (folder / "tokens.bin").write_bytes(_tokens())
    paths["tokens"] = str(folder / "tokens.bin")
    sources = [
        replace(
            source,
            dataset="",
            dataset_path=paths[source.dataset_format or training.dataset_format],
            dataset_text_field="",
            max_epochs=0.0,
        )
        for source in training.mixture
    ]
    phases = [replace(each, from_sequence=5 * number) for number, each in enumerate(training.mixture_phase, 1)]
    known = training.dataset_separator in ("auto", "none")
    training = replace(
        training,
        dataset="kjv",
        dataset_path=None if sources else paths[training.dataset_format],
        mixture=sources,
        mixture_phase=phases,
        dataset_streaming=False,
        dataset_shuffle_window=0,
        dataset_text_field="text",
        dataset_errors="fail",
        dataset_separator=training.dataset_separator if known else "auto",
        dataset_cache=str(folder / "cache"),
        token_dtype="uint16" if training.dataset_format == "tokens" else None,
        seq_len=SEQ_LEN,
        steps=100,
        skip_spikes_sigma=0.0,
        mixed_precision_param="float32",
        dtype="float32",
        float32_matmul_precision="highest",
        enable_cpu_offload=False,
        dataloader=DataLoader(),
    )
    roles = [role for role in config.chat.roles_to_train if role in ("user", "assistant")] or ["assistant"]
    template = str(ROOT / "assets" / "templates" / "llama3.jinja")
    chat = replace(config.chat, template=template, template_kwargs="{}", messages_field="", too_long="truncate_end")
    return replace(config, training=training, chat=replace(chat, roles_to_train=roles))


def clauses() -> str:
    """Text whose documents are about as long as small sequences: each part of a verse is one."""
    verses = (ROOT / "assets" / "kjv" / "01-genesis.txt").read_text(encoding="utf-8")[:130_000]
    found = [clause for clause in re.split(r"\n|(?<=[.:;?!]) ", verses) if clause]
    return "".join(json.dumps({"text": clause}) + "\n" for clause in found)


def chats() -> str:
    """Chats of one to three turns, of some words each: few fill a row."""
    words = re.findall(r"\w+", (ROOT / "assets" / "kjv" / "01-genesis.txt").read_text(encoding="utf-8"))[:6000]
    found, at = list[str](), 0
    for number in range(900):
        messages = []
        for turn in range(1 + number % 3):
            asked, said = words[at : at + 1], words[at + 1 : at + 2 + (number + turn) % 5]
            messages += [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": " ".join(said)}]
            at = (at + 1 + len(said)) % 5000
        found.append(json.dumps({"messages": messages}) + "\n")
    return "".join(found)


def pairs() -> str:
    """Pairs of completions of some words each after a word: few fill a row."""
    words = re.findall(r"\w+", (ROOT / "assets" / "kjv" / "01-genesis.txt").read_text(encoding="utf-8"))[:6000]
    found = list[str]()
    for number in range(900):
        prompt, chosen, rejected = (words[at : at + 3] for at in (5 * number, 5 * number + 1, 5990 - 5 * number))
        sides = {"chosen": " ".join(chosen[: 1 + number % 3]), "rejected": " ".join(rejected[: 1 + number % 2]) + "."}
        found.append(json.dumps({"prompt": prompt[0], **sides}) + "\n")
    return "".join(found)


def small_tokenizer() -> str:
    """The first merges of the bundled tokenizer; 256 special tokens fill the vocabulary."""
    ranks = (ROOT / "assets" / "tokenizer" / "tokenizer.model").read_text().splitlines(keepends=True)
    return "".join(ranks[: VOCABULARY - 256])


def _tokens() -> bytes:
    """20,000 tokens, as uint16."""
    return b"".join((7919 * place * place % (VOCABULARY - 256)).to_bytes(2, "little") for place in range(20_000))


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def _own_table(config: JobConfig) -> bool:
    return bool(config.parallelism.pipeline_parallel_schedule_csv)


def _stages(config: JobConfig, real: Degrees, small: Degrees) -> int:
    if _own_table(config):
        return number_of_stages(config.parallelism, sizes(config.model).n_layers)
    return small.pp * _a_rank(config, real)


def _a_rank(config: JobConfig, real: Degrees) -> int:
    """Stages of a rank: one, or two for more."""
    return min(number_of_stages(config.parallelism, sizes(config.model).n_layers) // real.pp, 2)


def _parallelism(config: JobConfig, real: Degrees, small: Degrees) -> Parallelism:
    given = config.parallelism
    listed = given.pipeline_parallel_layers_per_stage or given.module_fqns_per_model_part
    return replace(
        _with_degrees(given, small),
        enable_async_tensor_parallel=False,
        module_fqns_per_model_part=None,
        pipeline_parallel_layers_per_stage=2 if listed and small.pp > 1 else None,
        pipeline_parallel_first_stage_less_layers=min(given.pipeline_parallel_first_stage_less_layers, 1),
        pipeline_parallel_last_stage_less_layers=min(given.pipeline_parallel_last_stage_less_layers, 1),
        pipeline_parallel_sequence_splits=min(given.pipeline_parallel_sequence_splits, 2),
    )


def _with_degrees(parallelism: Parallelism, degrees: Degrees) -> Parallelism:
    return replace(
        parallelism,
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
        expert_parallel_degree=degrees.ep,
    )


def _rope_scaling(given: RopeScaling) -> RopeScaling:
    return replace(given, original_max_position_embeddings=16) if given.original_max_position_embeddings else given
