"""A rank of train.py, timed. See clock.py."""

import tempfile
from dataclasses import replace
from typing import Any

import train
from components.config import load_config
from components.launch.ending import run_to_exit
from models import MODELS
from models.llama import FLAVORS, LlamaConfig
from parallelize.rules import checked
from tests.benchmarks.peers.clock import Clock, Job, job
from tests.small import RECIPE

DEGREES = {
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}

CHECKPOINTING = {
    "none": (),
    "full": ("--activation_checkpoint.mode", "full"),
    "op": ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
}


def words(job: Job) -> list[str]:
    """The command line of a job; its own words: more settings; its folder: the run's, if it is to be kept."""
    degrees = {"ddp": 1, "fsdp": 1} | job["layout"]
    layout = (word for axis, degree in degrees.items() for word in (f"--parallelism.{DEGREES[axis]}", str(degree)))
    return [
        *("--job.config_file", str(RECIPE), "--model.flavor", "peers", "--training.seq_len", str(job["seq"])),
        *("--training.local_batch_size", str(job["batch"]), "--training.global_batch_size", "-1"),
        *("--training.mixed_precision_param", job["dtype"], "--training.steps", "1000"),
        *("--compile.enable", str(job["compile"]).lower(), "--validation.enable", "false"),
        *("--checkpoint.enable", "false", "--metrics.log_freq", "1000", *layout),
        *CHECKPOINTING.get(job["checkpointing"], ("--activation_checkpoint.mode", "memory_budget")),
        *(("--model.converters", '["quantize.linear.float8"]') if job["float8"] else ()),
        *(("--lora.rank", str(job["lora"]), "--lora.base", job["dtype"]) if job["lora"] else ()),
        *job.get("words", ()),
        *("--job.dump_folder", job.get("folder") or tempfile.mkdtemp()),
    ]


def sizes(job: Job) -> LlamaConfig:
    return replace(
        FLAVORS[job.get("flavor", "debug")],
        dim=job["dim"],
        n_layers=job["layers"],
        n_heads=job["heads"],
        n_kv_heads=job["kv_heads"],
        ffn_dim=job["ffn"],
        vocab_size=job["vocab"],
    )


def main() -> None:
    given = job()
    clock = Clock(given)
    FLAVORS["peers"] = sizes(given)
    if "experts" in given:  # of each layer of a debug model
        flavors = MODELS["qwen3_moe"][1]
        flavors["peers"] = replace(flavors["debug"], n_experts=given["experts"])
    step: Any = train.train_step

    def timed(*arguments: Any) -> Any:
        clock.tick()
        return step(*arguments)

    vars(train)["train_step"] = timed
    run_to_exit(train.main, checked(load_config(words(given))))


if __name__ == "__main__":
    main()
