"""The same chats, weights and rate here and in trl's SFTTrainer: 20 losses side by side, in float32 on one process.

python -m pip install --no-deps --target .cache/peers/trl trl==1.16.0
PYTHONPATH=.cache/peers/trl python -m tests.benchmarks.sft

Chats are those of recipes/llama_debug_sft.toml, one a row. trl trains assistant tokens, which its template marks; here
the template alone says which tokens are trained.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from components.config import ROOT, JobConfig, load_config
from components.data.chats import export_template
from components.data.show import rows_of
from components.data.tokenizer import export_tokenizer
from models import MODELS
from tests.chats import LLAMA3

_TURN = "message['content'] | trim + '<|eot_id|>' }}"
_MARKED = LLAMA3.replace(
    " + " + _TURN,
    " }}\n    {%- if message['role'] == 'assistant' %}{% generation %}{{- " + _TURN + "{% endgeneration %}"
    "{%- else %}{{- " + _TURN + "{% endif %}",
)
_RATE, _STEPS, _BATCH = 1e-3, 20, 8


def save_weights(folder: Path, vocabulary: int) -> None:
    """Random weights of the debug model, by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = MODELS["llama"][1]["debug"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads,
        rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def ours(words: list[str], folder: Path) -> list[float]:
    subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [found["loss"] for line in lines if "loss" in (found := json.loads(line))]


def theirs(config: JobConfig, weights: Path, folder: Path) -> list[float]:
    """Losses of SFTTrainer over the same chats in the same order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    rows = rows_of(config)
    records = Path(ROOT / str(config.training.dataset_path)).read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(records), "a record has a row"
    order = rows.at(np.arange(_STEPS * _BATCH), config.debug.seed)
    arguments = SFTConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=_BATCH,
        max_steps=_STEPS,
        learning_rate=_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        assistant_only_loss=True,
        max_length=None,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    chats = Dataset.from_list([json.loads(records[number]) for number in order])
    tokenizer = AutoTokenizer.from_pretrained(weights)
    tokenizer.pad_token = "<|end_of_text|>"
    InOrder(str(weights), arguments, train_dataset=chats, processing_class=tokenizer, callbacks=[Losses()]).train()
    return losses


def main(argv: list[str]) -> int:
    """Print both losses of each step; 1 if one pair is more than 1e-4 apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        weights, run = Path(made) / "weights", Path(made) / "run"
        (Path(made) / "marked.jinja").write_text(_MARKED, encoding="utf-8")
        words = ["--job.config_file", "recipes/llama_debug_sft.toml", "--job.dump_folder", str(run)]
        words += ["--chat.template", str(Path(made) / "marked.jinja"), "--chat.packing", "none"]
        words += ["--training.local_batch_size", str(_BATCH), "--training.global_batch_size", str(_BATCH)]
        words += ["--training.steps", str(_STEPS), "--optimizer.lr", str(_RATE), "--optimizer.weight_decay", "0"]
        words += ["--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0", "--metrics.log_freq", "1"]
        words += ["--validation.enable", "false"]
        words += ["--checkpoint.initial_load_path", str(weights), "--checkpoint.initial_load_in_hf"]
        config = load_config(words)
        weights.mkdir()
        export_tokenizer(config.model.hf_assets_path, weights)
        export_template(config.chat, config.model.hf_assets_path, weights)
        save_weights(weights, MODELS["llama"][1]["debug"].vocab_size)
        here, there = ours(words, run), theirs(config, weights, Path(made) / "trl")
    print("| step | here | SFTTrainer | difference |\n|---|---|---|---|")
    for step, (own, other) in enumerate(zip(here, there, strict=True), 1):
        print(f"| {step} | {own:.6f} | {other:.6f} | {own - other:+.1e} |")
    return int(len(here) != _STEPS or max(abs(own - other) for own, other in zip(here, there, strict=True)) > 1e-4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
