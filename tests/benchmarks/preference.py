"""The same pairs, weights and rate here and in trl: 20 losses and reward margins of each loss, on one process.

python -m pip install --no-deps --target .cache/peers/trl trl==1.16.0
PYTHONPATH=.cache/peers/trl python -m tests.benchmarks.preference            prints both, and writes trl's into RECORD
PYTHONPATH=.cache/peers/trl python -m tests.benchmarks.preference --loss dpo one loss, and writes nothing

dpo and ipo are of trl's DPOTrainer, simpo of its CPOTrainer, orpo of its ORPOTrainer, each with one pair a batch and
accumulation. trl's orpo trains the prompt of the chosen completion too, and here only completions are trained: so the
template of its pairs shows no prompt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.config import ROOT, JobConfig, load_config
from components.data.chats import export_template
from components.data.show import rows_of
from components.data.tokenizer import export_tokenizer
from components.state.init import initialize_weights
from components.state.weights import export
from models import meta_model
from tests.ranks import group_of_one

RECORD = ROOT / "tests" / "benchmarks" / "preference.jsonl"
"""trl's losses and margins, by loss."""
STEPS, BATCH, RATE = 20, 4, 1e-3
CASES: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.5},
    "ipo": {"beta": 0.2},
    "simpo": {"beta": 2.0, "gamma": 0.6, "label_smoothing": 0.1},
    "orpo": {"beta": 0.3},
}
"""preference.loss -> the other keys of the table."""
_END = "{{ message.content + '<|eot_id|>' }}"
TEMPLATE = (
    "<|begin_of_text|>{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' }}"
    + _END
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
)
WITHOUT_PROMPT = (
    "<|begin_of_text|>{% for message in messages %}{% if message.role == 'assistant' %}"
    + _END
    + "{% endif %}{% endfor %}"
)


def job(loss: str, folder: Path) -> list[str]:
    """Words of the job of a loss, whose template is written into the folder."""
    template = folder / "template.jinja"
    template.write_text(WITHOUT_PROMPT if loss == "orpo" else TEMPLATE, encoding="utf-8")
    words = ["--job.config_file", "recipes/llama_debug_dpo.toml", "--job.dump_folder", str(folder / "run")]
    words += ["--chat.template", str(template), "--chat.packing", "none", "--training.seq_len", "192"]
    words += ["--model.sizes.dim", "64", "--model.sizes.n_layers", "2", "--model.sizes.n_heads", "4"]
    words += ["--model.sizes.n_kv_heads", "2", "--model.sizes.ffn_dim", "128"]
    words += ["--training.local_batch_size", str(BATCH), "--training.global_batch_size", str(BATCH)]
    words += ["--training.steps", str(STEPS), "--optimizer.lr", str(RATE), "--optimizer.weight_decay", "0"]
    words += ["--lr_scheduler.warmup_steps", "0", "--lr_scheduler.decay_ratio", "0", "--metrics.log_freq", "1"]
    words += ["--validation.enable", "false", "--checkpoint.enable", "false", "--preference.loss", loss]
    for key, value in CASES[loss].items():
        words += [f"--preference.{key}", str(value)]
    return words


def ours(loss: str, folder: Path) -> list[tuple[float, float]]:
    """(loss, reward margin) of each step of train.py."""
    command = [sys.executable, "train.py", *job(loss, folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["loss"], row["reward_margin"]) for row in rows if "reward_margin" in row]


def save_model(config: JobConfig, folder: Path) -> None:
    """The weights of the job at step 0, with tokenizer and template, as transformers loads them."""
    model = meta_model(config.model).to_empty(device="cpu")
    initialize_weights(model, model.init_std, config.debug.seed)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export(meta_model(config.model), weights, folder, config.model.hf_assets_path, torch.float32)
    export_tokenizer(config.model.hf_assets_path, folder)
    export_template(config.chat, config.model.hf_assets_path, folder)


def theirs(loss: str, folder: Path) -> list[tuple[float, float]]:
    """(loss, reward margin) of each step of trl's trainer, over the same pairs in the same order."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config = load_config(job(loss, folder))
    with group_of_one():
        save_model(config, folder / "model")
    rows = rows_of(config)
    records = Path(ROOT / str(config.training.dataset_path)).read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(records), "a record has a row"
    order = rows.at(np.arange(STEPS * BATCH), config.debug.seed)
    turns = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    pairs = [
        {name: [{"role": role, "content": record[name]}] for name, role in turns.items()}
        for record in (json.loads(records[number]) for number in order)
    ]
    found: list[tuple[float, float]] = []

    class Logged(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                found.append((float(logs["loss"]), float(logs["rewards/margins"])))

    settings, made = CASES[loss], {"dpo": (DPOConfig, DPOTrainer), "ipo": (DPOConfig, DPOTrainer)}
    made |= {"simpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}
    arguments_of, trainer_of = made[loss]
    more: dict[str, Any] = {"beta": settings["beta"]}
    if loss == "simpo":
        more |= {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": settings["gamma"]}
        more |= {"label_smoothing": settings["label_smoothing"]}
    if loss in ("dpo", "ipo"):
        more |= {"loss_type": ["sigmoid" if loss == "dpo" else "ipo"]}
    arguments = arguments_of(
        str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=config.optimizer.beta1,
        adam_beta2=config.optimizer.beta2,
        max_grad_norm=config.training.max_norm,
        max_length=1024,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token, tokenizer.pad_token = "<|eot_id|>", "<|end_of_text|>"

    class InOrder(trainer_of):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    InOrder(
        model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer, callbacks=[Logged()]
    ).train()
    return found


def apart(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The largest difference between two runs' losses or margins."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


def main(argv: list[str]) -> int:
    """Print losses and margins of both, and write trl's; 1 if two are more than 1e-4 apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=[*CASES])
    options = parser.parse_args(argv)
    found: dict[str, list[tuple[float, float]]] = {}
    worst = 0.0
    for loss in [options.loss] if options.loss else CASES:
        with tempfile.TemporaryDirectory() as folder:
            here = ours(loss, Path(folder))
            found[loss] = theirs(loss, Path(folder))
        print(f"\n{loss}\n| step | loss here | trl | margin here | trl |\n|---|---|---|---|---|")
        for step, (own, other) in enumerate(zip(here, found[loss], strict=True), 1):
            print(f"| {step} | {own[0]:.6f} | {other[0]:.6f} | {own[1]:.6f} | {other[1]:.6f} |")
        print(f"largest difference: {apart(here, found[loss]):.1e}", flush=True)
        worst = max(worst, apart(here, found[loss]))
    if not options.loss:
        lines = [json.dumps({"loss": loss, "steps": steps}) + "\n" for loss, steps in found.items()]
        RECORD.write_text("".join(lines), encoding="utf-8")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
