"""Keys and values of torchtitan and other systems that job files may contain, as tables for load.py."""

from typing import Any, NamedTuple


class Unavailable(NamedTuple):
    """A key of torchtitan v0.2 that is not available here.

    The value `accepted` is ignored, because it changes nothing; any other value is an error with `reason`.
    """

    accepted: Any
    reason: str
    only_with: tuple[str, ...] = ()
    """The error needs all of these keys to be on, because job files also list the tables of disabled features."""


_LORA = ("rank", "alpha", "target_modules", "use_rslora", "dropout", "base", "initial_load_path")

# Other name -> (key here, "same" or "negate" for its value). Keys named "disable" become positive keys.
RENAMED: dict[str, tuple[str, str]] = {
    "metrics.disable_color_printing": ("metrics.color_printing", "negate"),
    "model.tokenizer_path": ("model.hf_assets_path", "same"),
    "memory_estimation.disable_fake_mode": ("memory_estimation.fake_mode", "negate"),
    "parallelism.disable_loss_parallel": ("parallelism.loss_parallel", "negate"),
    **{f"lora.{name}": (f"model.lora.{name}", "same") for name in _LORA},
    **{f"lora.{name}": ("model.lora.rank", "same") for name in ("r", "lora_r")},
    "lora.lora_alpha": ("model.lora.alpha", "same"),
    "lora.lora_dropout": ("model.lora.dropout", "same"),
}

# (key, torchtitan's value) -> value here.
RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("model.name", "llama3"): "llama",
    ("model.flavor", "debugmodel"): "debug",
    # Each repository bundles a tokenizer and a dataset for trials.
    ("model.hf_assets_path", "./tests/assets/tokenizer"): "assets/tokenizer",
    ("training.dataset", "c4_test"): "kjv",
}

# Models that belong to another family here: torchtitan's (name, flavor) -> (name, flavor) here.
RENAMED_MODELS: dict[tuple[str, str], tuple[str, str]] = {
    ("qwen3", "debugmodel_moe"): ("qwen3_moe", "debug"),
    **{("qwen3", flavor): ("qwen3_moe", flavor) for flavor in ("30B-A3B", "235B-A22B")},
}

_NOT_YET = "not available yet"
_FAMILIES = "not available; the families with experts here are deepseek_v3, glm4_moe, gpt_oss, mixtral and qwen3_moe"
_WHOLE_EXPERTS = "experts are whole on a rank: tensor parallel ranks each route their own part of a sequence"
_GROUPED = "the products of experts are in the precision of training.mixed_precision_param"
_TORCHFT = "fault tolerance across replica groups (torchft) is not available"
_GATHERED = "weights are gathered in the precision of training.mixed_precision_param"
_MX = "MX formats are not available"
_MASK = "it masks documents: here that is training.document_mask = true, with any flavor"
_FLOAT8 = ("model.converters",)
_FAULTS = ("fault_tolerance.enable",)
_VALIDATION = ("validation.enable",)

# (key, torchtitan's value that does not exist here) -> the reason, or the equivalent setting.
UNAVAILABLE_VALUES: dict[tuple[str, str], str] = {
    **{("model.name", name): _FAMILIES for name in ("llama4",)},
    **{("model.flavor", f"debugmodel_{kind}_attn"): _MASK for kind in ("flex", "varlen")},
    **{("model.flavor", f"8B_{kind}"): _MASK for kind in ("flex", "varlen")},
    ("comm.mode", "local_tensor"): "not available; CUDA_VISIBLE_DEVICES= runs all ranks on the CPU",
    ("checkpoint.async_mode", "async_with_pinned_mem"): '"async" copies to host memory too, and writes behind training',
}

UNAVAILABLE: dict[str, Unavailable] = {
    "job.save_config_file": Unavailable(None, "run.json in dump_folder always holds the resolved job file"),
    "job.custom_config_module": Unavailable("", "add keys to components/config/tables.py instead"),
    "metrics.save_for_all_ranks": Unavailable(False, "logged numbers are the same on every rank; rank 0 writes them"),
    "model.vocab_size": Unavailable(0, "it has moved to model.sizes.vocab_size"),
    "model.print_after_conversion": Unavailable(False, _NOT_YET),
    "optimizer.early_step_in_backward": Unavailable(False, "it cannot clip by the global gradient norm"),
    "training.gc_debug": Unavailable(False, _NOT_YET),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Unavailable(
        True, "schedules do not overlap the messages of experts with another micro-batch; leave it out"
    ),
    "parallelism.expert_tensor_parallel_degree": Unavailable(1, _WHOLE_EXPERTS),
    "parallelism.expert_parallel_comm_backend": Unavailable(
        "standard", "rows are exchanged by all-to-alls; another Exchange would stand in parallelize/expert.py"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Unavailable(True, _TORCHFT),
    "checkpoint.create_seed_checkpoint": Unavailable(
        False, "weights at step 0 are the same at every layout without one; leave it out"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Unavailable(
        ["moe.router.gate"], "routers are always computed again, other products in turns; leave it out"
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Unavailable(False, _NOT_YET),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": Unavailable(False, _GATHERED, _FLOAT8),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": Unavailable(False, _GATHERED, _FLOAT8),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": Unavailable("triton", _MX, _FLOAT8),
    "quantize.linear.mx.recipe_name": Unavailable("mxfp8_cublas", _MX, _FLOAT8),
    "quantize.linear.mx.filter_fqns": Unavailable(["output"], _MX, _FLOAT8),
    "quantize.grouped_mm.float8.fqns": Unavailable([], _GROUPED, _FLOAT8),
    "quantize.grouped_mm.mx.recipe_name": Unavailable("mxfp8", _MX, _FLOAT8),
    "quantize.grouped_mm.mx.fqns": Unavailable([], _GROUPED, _FLOAT8),
    "comm.trace_buf_size": Unavailable(20000, "set TORCH_FR_BUFFER_SIZE in the environment instead"),
    "comm.save_traces_folder": Unavailable("comm_traces", "set TORCH_FR_DUMP_TEMP_FILE in the environment instead"),
    "comm.save_traces_file_prefix": Unavailable("rank_", "set TORCH_FR_DUMP_TEMP_FILE in the environment instead"),
    "memory_estimation.enable": Unavailable(False, 'comm.mode = "fake_backend" tells what a rank would hold'),
    "memory_estimation.fake_mode": Unavailable(True, "the tensors of a dry run are always fake"),
    "fault_tolerance.enable": Unavailable(False, _TORCHFT),
    "fault_tolerance.process_group": Unavailable("gloo", _TORCHFT, _FAULTS),
    "fault_tolerance.process_group_timeout_ms": Unavailable(10000, _TORCHFT, _FAULTS),
    "fault_tolerance.replica_id": Unavailable(0, _TORCHFT, _FAULTS),
    "fault_tolerance.group_size": Unavailable(0, _TORCHFT, _FAULTS),
    "fault_tolerance.min_replica_size": Unavailable(1, _TORCHFT, _FAULTS),
    "fault_tolerance.semi_sync_method": Unavailable(None, _TORCHFT, _FAULTS),
    "experimental.custom_import": Unavailable("", "add your model to models/ and parallelize/ instead"),
    "experimental.custom_args_module": Unavailable("", "add keys to components/config/tables.py instead"),
    "validation.dataset": Unavailable(
        None, "give validation.dataset_path, or leave both out for a held-out part", _VALIDATION
    ),
    "validation.dataloader.num_workers": Unavailable(0, "validation loads in the rank itself", _VALIDATION),
    "validation.dataloader.persistent_workers": Unavailable(False, "validation loads in the rank itself", _VALIDATION),
    "validation.dataloader.pin_memory": Unavailable(False, "validation loads in the rank itself", _VALIDATION),
    "validation.dataloader.prefetch_factor": Unavailable(None, "validation loads in the rank itself", _VALIDATION),
    "debug.moe_force_load_balance": Unavailable(
        False, "tokens go where the router sends them; a dry run assumes equal loads"
    ),
}

_SHARD = "parallelism.data_parallel_shard_degree"
_REPLICATE = "parallelism.data_parallel_replicate_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_OFFLOAD = "training.enable_cpu_offload"
_WEIGHTS_ALONE = f"{_OFFLOAD}: weights alone would have to come back for every update"
_STATES_ALONE = f"optimizer.state_offload; {_OFFLOAD} keeps weights and gradients on the host too"
_CP = "parallelism.context_parallel_degree"
_ACCUMULATION = "training.global_batch_size, from which accumulation steps follow"

_CAPACITY = "nothing: no row is dropped, since which one would depend on the layout"
_BALANCE = "experts.sequence_loss_factor, whose loss is of each sequence: one of each micro-batch depends on the layout"

# Last part of another system's key -> the equivalent here.
FOREIGN: dict[str, str] = {
    # Experts
    **dict.fromkeys(("ep", "ep_size", "ep_degree", "expert_model_parallel_size"), "parallelism.expert_parallel_degree"),
    **dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor", "expert_capacity"), _CAPACITY),
    **dict.fromkeys(("drop_tokens", "moe_pad_expert_input_to_capacity"), _CAPACITY),
    **dict.fromkeys(("router_jitter_noise", "jitter_noise", "moe_input_jitter_eps"), "nothing: no noise is added"),
    **dict.fromkeys(
        ("aux_loss_coef", "router_aux_loss_coef", "moe_aux_loss_coeff", "load_balance_loss_weight"), _BALANCE
    ),
    **dict.fromkeys(("z_loss_coef", "moe_z_loss_coeff", "router_z_loss_coef"), "experts.z_loss_factor"),
    **dict.fromkeys(("z_loss_multiplier", "lm_head_z_loss"), "training.z_loss_factor"),
    "label_smoothing_factor": "training.label_smoothing",
    **dict.fromkeys(("mtp_num_layers", "num_nextn_predict_layers", "num_mtp_modules"), "model.sizes.mtp_layers"),
    **dict.fromkeys(("mtp_loss_scaling_factor", "mtp_loss_weight"), "training.mtp_loss_factor"),
    **dict.fromkeys(("load_balance_coeff", "moe_router_bias_update_rate"), "experts.bias_update_speed"),
    # DDP, FSDP, HSDP
    "dp_replicate_size": _REPLICATE,
    "dp_shard_size": _SHARD,
    **dict.fromkeys(("fsdp_sharding_strategy", "sharding_strategy"), f"{_SHARD}, {_REPLICATE} and {_RESHARD}"),
    "zero_stage": f'{_RESHARD}: "never" for stages 1 and 2, "always" for stage 3',
    **dict.fromkeys(("fsdp_backward_prefetch", "fsdp_forward_prefetch"), "parallelism.fsdp_prefetch_layers"),
    # adapters
    **dict.fromkeys(("lora_r", "lora_rank"), "lora.rank"),
    "lora_alpha": "lora.alpha",
    **dict.fromkeys(("lora_target_modules", "lora_target_linear"), 'lora.target_modules: "all-linear", or a list'),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type", "bnb_config_kwargs"), 'lora.base = "nf4"'),
    "adapter": 'lora.rank, and for qlora lora.base = "nf4"',
    "lora_dropout": "lora.dropout",
    "lora_model_dir": "lora.initial_load_path",
    "peft_use_rslora": "lora.use_rslora",
    "base_model": "model.flavor, a folder, with checkpoint.initial_load_in_hf = true",
    **dict.fromkeys(("use_dora", "peft_use_dora"), "nothing: adapters have no norms"),
    # sizes of a model
    **{name: f"model.sizes.{name}" for name in ("n_layers", "n_heads", "n_kv_heads", "dim", "ffn_dim")},
    "hidden_size": "model.sizes.dim",
    "num_hidden_layers": "model.sizes.n_layers",
    "num_attention_heads": "model.sizes.n_heads",
    "num_key_value_heads": "model.sizes.n_kv_heads",
    "intermediate_size": "model.sizes.ffn_dim",
    # other axes
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tensor_parallel"), "parallelism.tensor_parallel_degree"),
    "sequence_tensor_parallel": "parallelism.sequence_parallel",
    **dict.fromkeys(("cp_size", "context_parallel_size", "sequence_parallel_degree", "sequence_data_parallel"), _CP),
    "micro_batch_splits": f"{_CP}, which splits sequences",
    **dict.fromkeys(("pp_size", "pipeline_parallel"), "parallelism.pipeline_parallel_degree"),
    "pipeline_first": "parallelism.pipeline_first",
    "breadth_first_micro_batches": 'parallelism.pipeline_parallel_schedule = "LoopedBFS"',
    # batch, precision, memory
    **dict.fromkeys(("depth_first_micro_batches", "gradient_accumulation_steps"), _ACCUMULATION),
    "micro_batch_size": "training.local_batch_size",
    "sequence_len": "training.seq_len",
    "gradient_checkpointing": 'activation_checkpoint.mode = "full"',
    "mixed_precision": "training.mixed_precision_param",
    "cpu_offload": _OFFLOAD,
    **dict.fromkeys(("fsdp_offload_params", "offload_param"), _WEIGHTS_ALONE),
    **dict.fromkeys(("offload_optimizer", "optimizer_cpu_offload"), _STATES_ALONE),
}

# Value of a key in FOREIGN -> the equivalent settings.
FOREIGN_VALUES: dict[str, str] = {
    "FULL_SHARD": f'{_SHARD} = -1 and {_RESHARD} = "always"',
    "SHARD_GRAD_OP": f'{_SHARD} = -1 and {_RESHARD} = "never"',
    "NO_SHARD": f"{_REPLICATE} = the number of ranks and {_SHARD} = 1",
    "HYBRID_SHARD": f'{_REPLICATE} = the number of nodes, {_SHARD} = -1 and {_RESHARD} = "always"',
}
