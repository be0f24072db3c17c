"""A rank of torchtitan 0.2.2's own Trainer on a CPU, timed: `python titan.py JOB` in an environment that has it.

torchtitan is written for GPUs. What it calls that a CPU or gloo lacks is put in its place here, and nothing else:
the type, name and memory of the device; a module of Triton kernels, of mixture-of-experts models; averages over ranks,
which gloo cannot compute (sums take as long). Tokens are random, and made before.
"""

import dataclasses
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parent))
from clock import Clock, job

if job()["device"] == "cpu":
    memory = types.SimpleNamespace(total_memory=2**34)
    for name, value in {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: memory,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        "current_device": lambda: 0,
    }.items():
        setattr(torch.cpu, name, value)
    torch._utils._get_available_device_type = lambda: "cpu"
    all_reduce = functional.all_reduce
    vars(functional)["all_reduce"] = lambda x, reduceOp, group, tag="": all_reduce(
        x, "sum" if reduceOp.lower() == "avg" else reduceOp, group, tag
    )
kernels: Any = types.ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = None
sys.modules[kernels.__name__] = kernels

from torchtitan.config import JobConfig
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.train import Trainer

without_division = parallelize.disable_fsdp_gradient_division


def only_sums(model: torch.nn.Module) -> None:
    without_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


if job()["device"] == "cpu":
    parallelize.disable_fsdp_gradient_division = only_sums


class Tokens:
    """Batches without end, as torchtitan's loader gives them."""

    def __init__(self, batch: int, seq: int, vocab: int) -> None:
        self.tokens = torch.randint(vocab, (batch, seq + 1))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {"input": self.tokens[:, :-1].contiguous()}, self.tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}


def main() -> None:
    given = job()
    clock = Clock(given)
    # Its feed-forward width is two thirds of 4 dim, rounded up to multiple_of.
    assert 8 * given["dim"] // 3 <= given["ffn"]
    sizes = TransformerModelArgs(
        dim=given["dim"],
        n_layers=given["layers"],
        n_heads=given["heads"],
        n_kv_heads=given["kv_heads"],
        vocab_size=given["vocab"],
        multiple_of=given["ffn"],
        rope_theta=500000,
    )
    spec = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={"peers": sizes},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: Tokens(given["batch"], given["seq"], given["vocab"]),
    )
    register_train_spec("peers", spec)
    config, layout = JobConfig(), given["layout"]
    config.job.dump_folder = tempfile.mkdtemp()
    config.model.name, config.model.flavor = "peers", "peers"
    config.training.local_batch_size, config.training.seq_len = given["batch"], given["seq"]
    config.training.steps, config.metrics.log_freq = 1000, 1000
    config.training.mixed_precision_param = given["dtype"]
    checkpointing = given["checkpointing"]
    config.activation_checkpoint.mode = {"none": "none", "full": "full", "op": "selective"}.get(
        checkpointing, "memory_budget"
    )
    config.activation_checkpoint.selective_ac_option = "op"
    config.activation_checkpoint.memory_budget = 0.5
    if given["float8"]:
        config.model.converters = ["quantize.linear.float8"]
        config.quantize.linear.float8.recipe_name = "rowwise_with_gw_hp"
    config.compile.enable = given["compile"]
    config.parallelism.data_parallel_replicate_degree = layout.get("ddp", 1)
    config.parallelism.data_parallel_shard_degree = layout.get("fsdp", 1)
    config.parallelism.tensor_parallel_degree = layout.get("tp", 1)
    config.parallelism.pipeline_parallel_degree = layout.get("pp", 1)
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    step = Trainer.train_step

    def timed(self: Trainer, batches: Any) -> None:
        clock.tick()
        step(self, batches)

    Trainer.train_step = timed
    Trainer(config).train()


if __name__ == "__main__":
    main()
