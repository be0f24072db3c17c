"""transformers' Trainer, with accelerate, on a CPU, timed. See clock.py."""

import os
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.benchmarks.peers.clock import Clock, job


class Tokens(Dataset):
    """Random sequences."""

    def __init__(self, seq: int, vocab: int) -> None:
        self.tokens = torch.randint(vocab, (64, seq))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index % 64]
        return {"input_ids": tokens, "labels": tokens}


class Ticks(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *arguments: Any, **more: Any) -> None:
        self.clock.tick()


def main() -> None:
    given = job()
    sizes = LlamaConfig(
        hidden_size=given["dim"],
        num_hidden_layers=given["layers"],
        num_attention_heads=given["heads"],
        num_key_value_heads=given["kv_heads"],
        intermediate_size=given["ffn"],
        vocab_size=given["vocab"],
        max_position_embeddings=given["seq"],
        rope_theta=500000.0,
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # one process, no process group
        if name != "RANK":
            os.environ.pop(name, None)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=given["dtype"] == "bfloat16",
        per_device_train_batch_size=given["batch"],
        max_steps=1000,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        torch_compile=given["compile"],
    )
    tokens = Tokens(given["seq"], given["vocab"])
    model: Any = LlamaForCausalLM(sizes)
    if given["lora"]:
        model = get_peft_model(
            model.to(getattr(torch, given["dtype"])),
            LoraConfig(r=given["lora"], lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    clock = Clock(given)
    Trainer(model, arguments, train_dataset=tokens, callbacks=[Ticks(clock)]).train()


if __name__ == "__main__":
    main()
