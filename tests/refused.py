"""Cases of each rule that refuses a job, for tests/test_rules.py and docs/refusals.md."""

import dataclasses
from typing import Any

TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
METHOD, LENGTH = "--parallelism.context_parallel_method", "--training.seq_len"
LORA = ("--lora.rank", "4", "--lora.target_modules", '["wqq"]')
KERNEL = "--model.attention_kernel"
ROPE, SINKS = "--model.rope_scaling.", ("--model.name", "gpt_oss", "--model.flavor", "tiny")
GEMMA = ("--model.name", "gemma3", "--model.flavor", "tiny")
YARN = (ROPE + "rope_type", "yarn", ROPE + "factor", "2.0")
PREFERENCE = ("--training.dataset_format", "preference", "--training.dataset_path", "x")
GLOBAL, LOCAL = "--training.global_batch_size", "--training.local_batch_size"
PP, SCHEDULE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule"
MICRO, RESHARD = "--parallelism.pipeline_parallel_microbatch_size", "--parallelism.fsdp_reshard_after_forward"
SHARD = "--parallelism.data_parallel_shard_degree"
STAGE = "--parallelism.pipeline_parallel_layers_per_stage"
LIGHTER = "--parallelism.pipeline_parallel_first_stage_less_layers"
MODULES = ("--parallelism.module_fqns_per_model_part", '[["tok_embeddings", "layers.0"], ["norm", "output"]]')
EP, EXPERTS = "--parallelism.expert_parallel_degree", ("--model.name", "qwen3_moe", "--model.flavor", "tiny")
EXPORT = ("--checkpoint.last_save_in_hf", "--checkpoint.enable")
PHI3 = ("--model.name", "phi3", "--model.flavor", "tiny")
LATENTS = ("--model.name", "deepseek_v3", "--model.flavor", "tiny")
SPLITS = "--parallelism.pipeline_parallel_sequence_splits"
REDUCE = "--parallelism.fsdp_reduce_gradients"
COMPILE = ("--compile.enable", "true")
BUDGET = ("--activation_checkpoint.mode", "memory_budget")
SCALED = ("--model.converters", '["quantize.linear.float8"]')
OP = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
LOG = ("--activation_checkpoint.mode", "full", "--activation_checkpoint.debug", "true")
FILTERS = "--quantize.linear.float8.filter_fqns"
ASYNC = "--parallelism.enable_async_tensor_parallel"
FLOAT8 = (*SCALED, "--quantize.linear.float8.emulate", "true")
ROWWISE = (*SCALED, "--quantize.linear.float8.recipe_name", "rowwise")
BFLOAT16 = ("--training.dtype", "bfloat16")
SIX = {"n_layers": 6}
ONE_A_STAGE = (PP, "2", SCHEDULE, "ZBVZeroBubble", MICRO, "6", RESHARD, "always")
LONG_MIXTURE = ("--model.name", "qwen3_moe", "--model.flavor", "long3")
NARROW, WIDE = ({"n_heads": 16, "n_kv_heads": heads, "ffn_dim": ffn} for heads, ffn in ((2, 120), (16, 64)))


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layout that breaks one rule, what the rule says, and what happens without it."""

    rule: str
    layout: tuple[str, ...]
    says: str
    without: str
    """"error", the name of a figure that breaks, or empty where no rank does anything with it yet."""
    ranks: int = 2
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes that differ from the harness's tiny model."""
    run: tuple[str, ...] = ()
    """Settings that one process has too."""


CASES = [
    Refused("stages", (PP, "2", SCHEDULE, "GPipe", STAGE, "3"), "on 2 ranks it needs 2 stages", "error", model=SIX),
    Refused("stages", (PP, "2", SCHEDULE, "DualPipeV", STAGE, "6"), "needs 4 stages, not 2", "error", model=SIX),
    Refused("stages", (PP, "2", SCHEDULE, "LoopedBFS", STAGE, "3"), "it needs 4, 6, .+ stages", "error", model=SIX),
    Refused("layers", (PP, "2", SCHEDULE, "LoopedBFS", LIGHTER, "4"), "2 layers are too few for 4 stages", "error"),
    Refused("modules", (PP, "2", *MODULES), "look at layers.1", "weights at step 0"),
    Refused("micro-batches", (PP, "2", MICRO, "5"), "local_batch_size = 36 is no multiple; 35 or 40 would", "error"),
    Refused("micro-batches", (PP, "2", MICRO, "36"), "1 micro-batches, but 1F1B needs as many as stages, 2", "error"),
    Refused(
        "micro-batches",
        (PP, "2", MICRO, "4", SCHEDULE, "Interleaved1F1B"),
        "9 micro-batches, but Interleaved1F1B needs a multiple of 4: 8 or 10 would be",
        "error",
        model=SIX,
    ),
    Refused("splits", (SPLITS, "33", PP, "2"), "sequences have 32 tokens; use 32 parts or fewer", "", ranks=2),
    Refused("splits", (SPLITS, "2"), "parts of sequences need parallelism.pipeline_parallel_degree of 2", "", ranks=1),
    Refused("splits", (SPLITS, "2", PP, "2", SCHEDULE, "GPipe"), 'need .*schedule = "1F1B"', ""),
    Refused("splits", (SPLITS, "2", PP, "2"), "parts of a pair come one after another", "", run=PREFERENCE),
    Refused("splits", (SPLITS, "2", PP, "2", CP, "2"), "need .*context_parallel_degree = 1", "", ranks=4),
    Refused(
        "reshard",
        (PP, "2", SHARD, "2", LOCAL, "18", MICRO, "3", SCHEDULE, "DualPipeV", RESHARD, "always"),
        "gradients would be wrong without an error",
        "gradient",
        ranks=4,
        model=SIX,
    ),
    # One rank a stage, whose weights fully_shard wraps for another reason.
    *(
        Refused("reshard", (*ONE_A_STAGE, *more), "finds the weights freed", without, model=SIX, run=run)
        for more, run, without in (
            (("--training.enable_cpu_offload", "true"), (), "error"),
            ((), ("--training.mixed_precision_param", "bfloat16"), ""),
            ((), BFLOAT16, ""),
            ((), ("--lora.rank", "4", "--lora.base", "bfloat16"), ""),
        )
    ),
    *(
        Refused(
            "ahead",
            (PP, "2", SCHEDULE, "ZBVZeroBubble", MICRO, "6"),
            "embeds tokens for",
            "error",
            model=SIX | sizes,
            run=("--model.sizes.mtp_layers", layers),
        )
        for layers, sizes in (("2", {}), ("1", {"tie_embeddings": True}))
    ),
    Refused("reshard", (*ONE_A_STAGE, TP, "2"), "finds the weights freed", "error", ranks=4, run=LONG_MIXTURE),
    Refused("reduce", (PP, "2", REDUCE, "each"), 'use "last"', "", model=SIX),
    Refused("sums", (SHARD, "2", LOCAL, "6", REDUCE, "each"), '"last" adds them up in float32', "", run=BFLOAT16),
    Refused("turns", (PP, "2", LOCAL, "18", MICRO, "6"), "after each 18 sequences; 36 would be", "", run=BFLOAT16),
    Refused(
        "blocks",
        (TP, "32", "--optimizer.state_dtype", "int8"),
        "32 ranks would cut .*: n_heads x head_dim 64, ffn_dim 128; ",
        "",
        ranks=32,
        model={"n_heads": 32, "n_kv_heads": 32},
    ),
    Refused(
        "checkpointing per operation",
        (*OP, "--compile.enable", "true", CP, "2", "--parallelism.context_parallel_method", "ulysses"),
        "gradients would be wrong without an error",
        "gradient",
    ),
    Refused("log of operations", (*LOG, *OP), 'use selective_ac_option = "1"', "error", ranks=1),
    Refused("log of operations", (*LOG, *COMPILE), "no operation that could be logged", "error", ranks=1),
    Refused("log of operations", (*LOG, PP, "2", SCHEDULE, "DualPipeV"), "each layer twice again", "error", 2, SIX),
    *(
        Refused("memory budget", (*BUDGET, *more), "the compiler keeps to the budget: it needs", "", ranks=1)
        for more in ((), (*COMPILE, "--compile.components", '["loss"]'), (*COMPILE, "--compile.backend", "eager"))
    ),
    Refused("async tensor parallel", (ASYNC, "true"), "it needs parallelism.tensor_parallel_degree of 2 or", "", 1),
    Refused("async tensor parallel", (ASYNC, "true", TP, "2"), "it needs compile.enable = true", ""),
    Refused(
        "async tensor parallel",
        (ASYNC, "true", TP, "2", "--parallelism.sequence_parallel", "false", *COMPILE),
        "it needs parallelism.sequence_parallel = true$",
        "",
    ),
    *(
        Refused("filters of float8", (*FLOAT8, FILTERS, f'["{part}"]'), says, "", ranks=1)
        for part, says in (
            ("feed_foward", "feed_foward: not one of .*did you mean feed_forward"),
            ("auto_filter_small_kn", "auto_filter_small_kn: not one of"),
            ("layers", "no matrix would be left"),
            ("", "no matrix would be left"),
        )
    ),
    Refused("float8", (*SCALED, TP, "2"), "not so: n_kv_heads x head_dim 4, ffn_dim 60", "", model=NARROW),
    Refused("float8", (*ROWWISE, LENGTH, "30", LOCAL, "2"), r"tokens of a pass \(recipe rowwise\) 60$", "", 1, WIDE),
    Refused("backend", (*COMPILE, "--compile.backend", "inductr"), "did you mean inductor", "error", ranks=1),
    Refused("rope scaling", (ROPE + "beta_fast", "16"), "does not take beta_fast; yarn would", "", ranks=1),
    Refused("rope scaling", (*YARN, ROPE + "beta_slow", "64"), "beta_fast = 32 is not above beta_slow", "", ranks=1),
    Refused("rope scaling", (*YARN, *GEMMA), "set original_max_position_embeddings", "", ranks=1),
    Refused("rope scaling", (ROPE + "rope_type", "yarn"), "stretches nothing with factor = 1", "", ranks=1),
    Refused("adapters", LORA, "wqq is no matrix of the layers; did you mean wq?", "error", ranks=1),
    Refused("blocks of a base", ("--lora.rank", "4", "--lora.base", "nf4", TP, "2"), "no whole blocks of 64", ""),
    Refused("attention kernel", (CP, "2", KERNEL, "sdpa"), "the ring has kernels of its own", ""),
    Refused("attention kernel", (KERNEL, "sdpa", *SINKS), "the sinks of gpt_oss has kernels of its own", "", ranks=1),
    Refused(
        "key/value heads",
        (TP, "2"),
        "3 key/value heads.*degrees that can: 1, 3, 6, 9",
        "gradient",
        model={"n_heads": 12, "n_kv_heads": 3, "dim": 96},
    ),
    Refused("key/value heads", (TP, "4", *FLOAT8), "a part of the matrices of 2 key/value heads", "gradient", ranks=4),
    Refused(
        "attention heads",
        (TP, "4"),
        "6 attention heads.*degrees that can: 1, 2, 3, 6",
        "error",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 2, "dim": 96},
    ),
    Refused("latents", (TP, "2"), "each multiply latents with whole matrices", "gradient", run=(*LATENTS, *FLOAT8)),
    Refused("feed-forward", (TP, "2"), "131 feed-forward columns", "error", model={"ffn_dim": 131}),
    Refused(
        "vocabulary",
        (TP, "2", SHARD, "3", LOCAL, "12"),
        "share 1027 rows of the vocabulary unevenly.*; use 1, 2, 4, .* FSDP ranks",
        "weights at step 0",
        ranks=6,
        model={"vocab_size": 1027},
    ),
    Refused(
        "ulysses",
        (CP, "4", METHOD, "ulysses"),
        "6 heads and 3 key/value heads.* use context_parallel_degree = 1 or 3",
        "error",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 3, "dim": 96},
    ),
    Refused(
        "ulysses",
        (TP, "2", CP, "2", METHOD, "ulysses"),
        "3 heads and 1 key/value heads.* use context_parallel_degree = 1",
        "",
        ranks=4,
        model={"n_heads": 6, "n_kv_heads": 1, "dim": 96},
    ),
    Refused("experts' ranks", (TP, "2", EP, "2"), "llama changed has no experts; use 1", ""),
    Refused("experts' ranks", (*EXPERTS, TP, "2", EP, "4"), "8 experts on 2 ranks.*; use 1 or 2", ""),
    *(
        Refused(f"experts.{key}", (f"--experts.{key}", "0.1"), "llama changed has no experts; use 0", "", ranks=1)
        for key in ("bias_update_speed", "sequence_loss_factor", "z_loss_factor")
    ),
    Refused(
        "experts of parts",
        (*EXPERTS, PP, "2", SPLITS, "2", "--experts.sequence_loss_factor", "0.1"),
        "a part does not know the experts of later parts",
        "",
    ),
    Refused(
        "biases beside adapters",
        (*EXPERTS, "--lora.rank", "4", "--experts.bias_update_speed", "0.1"),
        "biases of routers, which are frozen beside adapters",
        "",
        ranks=1,
    ),
    Refused(
        "export of biases",
        (*EXPERTS, "--experts.bias_update_speed", "0.1", "--checkpoint.last_save_in_hf", "--checkpoint.enable"),
        "have no place for the biases",
        "",
        ranks=1,
    ),
    Refused(
        "export of another scaling",
        (*PHI3, f"{ROPE}rope_type", "yarn", f"{ROPE}factor", "2", *EXPORT),
        "phi3 have no place for model.rope_scaling.rope_type",
        "",
        ranks=1,
    ),
    Refused(
        "base of widths",
        ("--optimizer.mup_base", "debug", *EXPERTS, "--model.sizes.n_shared", "1"),
        "the base has no layers.*.feed_forward.shared.w1.weight; use a flavor that has layers of the same kinds",
        "error",
        ranks=1,
    ),
    Refused(
        "global_batch_size",
        (LOCAL, "12"),
        "x 2 batch ranks; 24 or 48 would be; or use training.local_batch_size = 6",
        "tokens",
    ),
]  # fmt: skip

MIXTURE = "--training.mixture[1].name a --training.mixture[1].dataset_path a"
TWO_SOURCES = f"{MIXTURE} --training.mixture[2].name b --training.mixture[2].dataset_path b"
CONTRADICTIONS = [
    ("--optimizer.momentum 0.9", "optimizer.momentum"),
    ("--optimizer.newton_schulz_steps 4", "optimizer.newton_schulz_steps"),
    ("--optimizer.mup_base debug --optimizer.name Adam", "optimizer.mup_base"),
    ("--optimizer.mup_base debug --lora.rank 4", "optimizer.mup_base"),
    ("--lr_scheduler.total_steps 300 --training.steps 400", "lr_scheduler.total_steps"),
    ("--checkpoint.initial_load_in_hf", "checkpoint.initial_load_in_hf"),
    ("--checkpoint.initial_load_in_hf_quantized", "checkpoint.initial_load_in_hf_quantized"),
    (
        "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path x --checkpoint.no_initial_load_model_only",
        "checkpoint.initial_load_model_only",
    ),
    ("--activation_checkpoint.debug", "activation_checkpoint.debug"),
    ("--compile.enable --compile.components []", "compile.components"),
    (
        "--parallelism.pipeline_parallel_layers_per_stage 1 --parallelism.module_fqns_per_model_part [['norm']]",
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    *((f"--distill.{key}", f"distill.{key.split()[0]}") for key in ("temperature 2", "top 8", "teacher_path x")),
    ("--distill.alpha 0.5 --training.dataset org/name", "distill.alpha"),
    ("--distill.alpha 0.5 --training.label_smoothing 0.1", "training.label_smoothing"),
    ("--distill.alpha 0.5 --model.sizes.mtp_layers 1", "distill.alpha"),
    ("--checkpoint.load_step 20", "checkpoint.load_step"),
    ("--checkpoint.load_only", "checkpoint.load_only"),
    ("--model.vocab_multiple 8", "model.vocab_multiple"),
    ("--checkpoint.initial_load_new_rows mean", "checkpoint.initial_load_new_rows"),
    ("--checkpoint.remote s3://bucket/run", "checkpoint.remote"),
    ("--checkpoint.enable --job.dump_folder /tmp/a --checkpoint.remote file:///tmp/a/copies", "checkpoint.remote"),
    ("--lora.rank 4 --model.sizes.frozen ['layers.0']", "model.sizes.frozen"),
    ("--checkpoint.remote_timeout_seconds 9", "checkpoint.remote_timeout_seconds"),
    ("--checkpoint.enable --checkpoint.hf_repo org/name", "checkpoint.hf_repo"),
    ("--checkpoint.no_hf_repo_private", "checkpoint.hf_repo_private"),
    ("--checkpoint.no_initial_load_model_only", "checkpoint.initial_load_model_only"),
    ("--checkpoint.enable --checkpoint.last_save_in_hf --checkpoint.folder hugging_face/x", "checkpoint.folder"),
    (
        "--checkpoint.enable --checkpoint.last_save_in_hf --metrics.save_tb_folder hugging_face",
        "metrics.save_tb_folder",
    ),
    ("--checkpoint.last_save_in_hf", "checkpoint.last_save_in_hf"),
    ("--checkpoint.last_save_in_hf --checkpoint.enable --checkpoint.load_only", "checkpoint.last_save_in_hf"),
    ("--checkpoint.export_dtype float16 --checkpoint.enable", "checkpoint.export_dtype"),
    ("--averages.ema_decay 0.9", "averages.ema_decay"),
    ("--averages.ema_decay 0.9 --checkpoint.enable --checkpoint.load_only", "averages.ema_decay"),
    ("--averages.ema_decay 0.9 --averages.export --checkpoint.enable", "averages.export"),
    ("--averages.export --checkpoint.enable --checkpoint.last_save_in_hf", "averages.export"),
    ("--training.dataloader.persistent_workers", "training.dataloader.persistent_workers"),
    ("--training.dataloader.prefetch_factor 2", "training.dataloader.prefetch_factor"),
    ("--training.global_batch_size 12 --training.local_batch_size 8", "training.global_batch_size"),
    ("--debug.deterministic_warn_only", "debug.deterministic_warn_only"),
    ("--training.skip_spikes_window 64", "training.skip_spikes_window"),
    ("--profiling.profile_freq 3", "profiling.profile_freq"),
    (
        "--parallelism.context_parallel_method ulysses --parallelism.context_parallel_rotate_method alltoall",
        "parallelism.context_parallel_rotate_method",
    ),
    (
        "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 0",
        "activation_checkpoint.selective_ac_option",
    ),
    ("--activation_checkpoint.offload", "activation_checkpoint.offload"),
    (
        "--activation_checkpoint.offload --activation_checkpoint.mode selective"
        " --activation_checkpoint.selective_ac_option op",
        "activation_checkpoint.offload",
    ),
    ("--training.dtype bfloat16 --optimizer.implementation foreach", "optimizer.implementation"),
    ("--optimizer.state_dtype int8 --optimizer.implementation for-loop", "optimizer.implementation"),
    ("--optimizer.state_offload true --training.enable_cpu_offload true", "optimizer.state_offload"),
    ("--quantize.linear.float8.emulate", "quantize.linear.float8.emulate"),
    ("--quantize.linear.float8.recipe_name rowwise", "quantize.linear.float8.recipe_name"),
    (
        "--validation.enable --validation.held_out_fraction 0.1 --validation.dataset_path other.txt",
        "validation.held_out_fraction",
    ),
    *(
        (f"--validation.{key} {value}", f"validation.{key}")
        for key, value in {
            "dataset_path": "other.txt",
            "text_path": "other.txt",
            "held_out_fraction": 0.1,
            "at_start": "true",
            "local_batch_size": 2,
            "seq_len": 8,
            "freq": 9,
            "steps": 2,
        }.items()
    ),
    *((f"--optimizer.adapter.{key} 0.5", f"optimizer.adapter.{key}") for key in ("lr_factor", "weight_decay")),
    ("--checkpoint.exclude_from_loading ['optimizer']", "checkpoint.exclude_from_loading"),
    (
        "--checkpoint.exclude_from_loading ['optimizer'] --checkpoint.initial_load_path x",
        "checkpoint.exclude_from_loading",
    ),
    *(
        (f"--samples.{key} {value}", f"samples.{key}")
        for key, value in {"freq": 9, "tokens": 9, "temperature": 0.5, "top_k": 9}.items()
    ),
    ("--samples.prompts ['a'] --samples.top_k 9", "samples.top_k"),
    *((f"--evaluation.{key} 9", f"evaluation.{key}") for key in ("freq", "limit")),
    ("--training.seq_len 1000000 --training.local_batch_size 1000000", "training.seq_len"),
    ("--validation.enable --validation.seq_len 1000000 --validation.local_batch_size 1000000", "validation.seq_len"),
    (
        "--parallelism.data_parallel_replicate_degree -1",
        "parallelism.data_parallel_replicate_degree",
    ),
    *(
        (
            f"--parallelism.pipeline_parallel_{key} 1 --parallelism.module_fqns_per_model_part [['norm']]",
            f"parallelism.pipeline_parallel_{key}",
        )
        for key in ("first_stage_less_layers", "last_stage_less_layers")
    ),
    ("--lora.alpha 8", "model.lora.alpha"),
    ("--lora.target_modules ['wq']", "model.lora.target_modules"),
    ("--lora.use_rslora", "model.lora.use_rslora"),
    ("--lora.dropout 0.1", "model.lora.dropout"),
    ("--lora.base nf4", "model.lora.base"),
    ("--lora.initial_load_path x", "model.lora.initial_load_path"),
    ("--lora.rank 4 --model.converters ['quantize.linear.float8']", "model.lora.rank"),
    (
        "--lora.rank 4 --checkpoint.initial_load_path x --checkpoint.no_initial_load_model_only",
        "checkpoint.initial_load_model_only",
    ),
    ("--training.dataset_format chat --training.dataset_path x --chat.template_kwargs [1]", "chat.template_kwargs"),
    ("--training.dataset_format chat", "training.dataset_format"),
    *(
        (f"--training.dataset_format chat --training.dataset_path x --training.{key} {value}", f"training.{key}")
        for key, value in {
            "dataset_text_field": "body",
            "dataset_separator": "none",
            "dataset_streaming": "true",
            "document_mask": "false",
        }.items()
    ),
    ("--training.dataset_format preference", "training.dataset_format"),
    *(
        (f"--training.dataset_format preference --training.dataset_path x --{key} {value}", key)
        for key, value in {
            "training.dataset_text_field": "body",
            "training.dataset_separator": "none",
            "training.dataset_streaming": "true",
            "training.document_mask": "false",
            "training.objective": "another",
            "training.z_loss_factor": "0.1",
            "training.label_smoothing": "0.1",
            "chat.roles_to_train": "['user']",
            "chat.message_field_training": "weight",
            "chat.history": "last_turn",
            "preference.gamma": "0.3",
        }.items()
    ),
    (
        "--training.dataset_format preference --training.dataset_path x --preference.loss ipo"
        " --preference.label_smoothing 0.1",
        "preference.label_smoothing",
    ),
    (
        "--training.dataset_format preference --training.mixture[1].name a --training.mixture[1].dataset_path x",
        "training.mixture",
    ),
    *((f"--preference.{key} {value}", f"preference.{key}") for key, value in {"loss": "ipo", "beta": 0.2}.items()),
    ("--preference.label_smoothing 0.1", "preference.label_smoothing"),
    *(
        (f"--training.dataset_format preference --training.dataset_path x {words}", key)
        for words, key in (("--distill.alpha 0.5", "distill.alpha"), ("--model.sizes.mtp_layers 1", "model.sizes"))
    ),
    ("--preference.gamma 0.1", "preference.gamma"),
    ("--training.dataset_format tokens --training.dataset org/name", "training.dataset_format"),
    ("--training.token_dtype uint16", "training.token_dtype"),
    ("--training.dataset_shuffle_window 100", "training.dataset_shuffle_window"),
    *(
        (f"--training.dataset_format tokens --training.dataset_path x --training.{key} {value}", f"training.{key}")
        for key, value in {"dataset_streaming": "true", "dataset_text_field": "body", "dataset_errors": "skip"}.items()
    ),
    (f"{MIXTURE} --training.dataset_path x", "training.mixture"),
    (f"{MIXTURE} --training.mixture[2].name a --training.mixture[2].dataset_path b", "training.mixture"),
    *(
        (f"{MIXTURE} {words}", "training.mixture")
        for words in (
            "--training.mixture[1].weight 0",
            "--training.dataset_streaming",
            "--training.mixture[1].dataset org/name",
            "--training.mixture[2].name b",
            "--training.mixture[2].name b --training.mixture[2].dataset kjv",
            "--training.mixture[1].dataset_format chat",
            "--training.dataset_format chat --training.mixture[1].dataset_text_field body",
            "--training.mixture[1].dataset_format tokens --training.mixture[1].dataset_text_field body",
        )
    ),
    ("--training.mixture_temperature 2", "training.mixture_temperature"),
    (f"{TWO_SOURCES} --training.mixture[2].weight 1 --training.mixture_temperature 2", "training.mixture_temperature"),
    (f"{TWO_SOURCES} --training.mixture[2].weight 1e-10", "training.mixture"),
    *(
        (f"{given} --training.mixture_phase[1].from_sequence 8 --training.mixture_phase[1].weights {weights}", key)
        for given, weights, key in (
            ("", "{a=1}", "training.mixture_phase"),
            (MIXTURE, "{b=1}", "training.mixture_phase"),
            (MIXTURE, "{a=0}", "training.mixture_phase"),
            (
                f"{MIXTURE} --training.mixture[2].name b --training.mixture[2].dataset_path b",
                "{a=1,b=1e-10}",
                "training.mixture_phase",
            ),
        )
    ),
    *(
        (f"--chat.{key} {value}", f"chat.{key}")
        for key, value in {
            "template": "x.jinja",
            "special_tokens_in_text": "as_text",
            "template_kwargs": "{}",
            "messages_field": "talk",
            "roles_to_train": "['user']",
            "message_field_training": "weight",
            "history": "last_turn",
            "too_long": "skip",
            "packing": "none",
        }.items()
    ),
    ("--training.mtp_loss_factor 0.1", "training.mtp_loss_factor"),
    ("--model.sizes.mtp_layers 4 --training.seq_len 4", "model.sizes"),
    ("--parallelism.auto", "parallelism.auto"),
    ("--parallelism.auto --training.global_batch_size 8 --comm.share_gpus", "parallelism.auto"),
    ("--parallelism.auto_device cpu", "parallelism.auto_device"),
    ("--checkpoint.folder ../elsewhere", "checkpoint.folder"),
    ("--metrics.save_tb_folder ../elsewhere", "metrics.save_tb_folder"),
    ("--profiling.save_traces_folder ../elsewhere", "profiling.save_traces_folder"),
    ("--profiling.save_memory_snapshot_folder ../elsewhere", "profiling.save_memory_snapshot_folder"),
]
"""Words of the command line that contradict each other, and the key that the mistake names."""
LACKING: list[tuple[str, dict[str, Any], str]] = [
    ("--comm.mode fake_backend", {}, "comm.mode"),
    ("--comm.share_gpus", {}, "comm.share_gpus"),
    ("--compile.enable", {"torch_path": "/a folder/torch"}, "compile.backend"),
    ("--profiling.enable_memory_snapshot", {}, "profiling.enable_memory_snapshot"),
    ("--parallelism.enable_async_tensor_parallel", {}, "parallelism.enable_async_tensor_parallel"),
    ("--model.attention_kernel flex", {}, "model.attention_kernel"),
    ("--model.converters ['quantize.linear.float8']", {"cuda": (8, 0)}, "model.converters"),
    ("--model.converters ['quantize.linear.float8']", {"cuda": (9, 4), "hip": "7.1"}, "model.converters"),
    *(
        (words, {"cuda": (9, 0), "environment": {variable: value}}, key)
        for variable, value, words, key in (
            ("TORCHDYNAMO_DISABLE", "1", "--compile.enable", "compile.enable"),
            ("TORCHDYNAMO_DISABLE", "1", "--model.attention_kernel flex", "model.attention_kernel"),
            ("TORCH_COMPILE_DISABLE", "1", "--compile.enable", "compile.enable"),
            ("TORCH_COMPILE_DISABLE", "1", "--model.attention_kernel flex", "model.attention_kernel"),
            # torch reads any text as true
            ("TORCHDYNAMO_SUPPRESS_ERRORS", "0", "--compile.enable", "compile.enable"),
            ("TORCH_COMPILE_OVERRIDE_BACKENDS", ">=0:eager", "--compile.enable", "compile.backend"),
            ("NVIDIA_TF32_OVERRIDE", "1", "", "training.float32_matmul_precision"),
            (
                "NVIDIA_TF32_OVERRIDE",
                "0",
                "--training.float32_matmul_precision high",
                "training.float32_matmul_precision",
            ),
            ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "--debug.deterministic", "debug.deterministic"),
            ("WANDB_MODE", "disabled", "--metrics.enable_wandb", "metrics.enable_wandb"),
            ("WANDB_DISABLED", "true", "--metrics.enable_wandb", "metrics.enable_wandb"),
        )
    ),
]
"""Words of the command line, what differs from a CPU without such variables, and the key that the mistake names."""
