"""Folders that transformers makes of random configurations; each trains for one step through the launcher.

    python -m tests.folders --draws 200 --seed 0

The step has the loss and the gradient norm of transformers' autograd, or the launcher refuses the folder and names a
field of config.json. Prints a line for each folder, and the worst difference; exit code 1 if a folder does neither.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from components.config import ROOT, ConfigError, load_config
from components.data import build_datasets
from components.data.loader import GlobalOrder, build_loader
from tests.small import RECIPE, SMALL, VOCABULARY

LIMIT = 1e-5
"""Largest relative difference of loss and gradient norm."""
ACTS = ("silu", "silu", "silu", "gelu", "gelu_pytorch_tanh", "relu2", "quick_gelu")


@dataclass
class Draw:
    """The configuration of one folder, and how its config.json is written."""

    kind: str
    """model_type."""
    fields: dict[str, Any]
    older: bool
    """RoPE is written as before transformers 5: rope_theta and rope_scaling."""
    left_out: float
    """Share of the fields with transformers' default that the file leaves out."""
    seed: int


def _sizes(rng: random.Random, **more: Any) -> dict[str, Any]:
    heads = rng.choice([2, 3, 4, 6])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([size for size in range(1, heads + 1) if heads % size == 0]),
        "hidden_size": heads * rng.choice([8, 12, 16]),
        "num_hidden_layers": rng.choice([1, 2, 3, 4]),
        "intermediate_size": rng.choice([24, 40, 64]),
        "vocab_size": VOCABULARY + rng.choice([0, 1, 40]),
        "max_position_embeddings": rng.choice([32, 64, 4096]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 0.01]),
        "tie_word_embeddings": rng.random() < 0.4,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_dropout": 0.1 if rng.random() < 0.05 else 0.0,
        "rope_parameters": _rope(rng),
        **more,
    }


def _rope(rng: random.Random, kinds: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic")) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice([100.0, 10_000.0, 1e6])}
    if rng.random() < 0.4:
        rope |= {"rope_type": rng.choice(kinds), "factor": rng.choice([2.0, 8.0])}
        rope |= {"original_max_position_embeddings": 16} if rope["rope_type"] in ("llama3", "yarn") else {}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope["rope_type"] == "llama3" else {}
        if rope["rope_type"] == "yarn" and rng.random() < 0.3:
            rope |= {"truncate": False, "attention_factor": rng.choice([None, 0.8])}
    return rope


def _head_dim(rng: random.Random) -> dict[str, Any]:
    return {"head_dim": rng.choice([8, 16, 20])} if rng.random() < 0.5 else {}


def _biases(rng: random.Random, *names: str) -> dict[str, Any]:
    return {name: rng.random() < 0.3 for name in names}


def _experts(rng: random.Random, count: str, width: str = "moe_intermediate_size") -> dict[str, Any]:
    return {count: rng.choice([4, 6, 8]), "num_experts_per_tok": rng.choice([2, 3]), width: rng.choice([16, 24])}


def _llama(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng, hidden_act=rng.choice(ACTS), **_biases(rng, "attention_bias", "mlp_bias"), **_head_dim(rng))


def _mistral(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng, sliding_window=rng.choice([None, 5, 4096]), hidden_act=rng.choice(ACTS), **_head_dim(rng))


def _qwen2(rng: random.Random) -> dict[str, Any]:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if rng.random() < 0.2 else {}
    return _sizes(rng, hidden_act=rng.choice(ACTS), **windows)


def _qwen3(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng, head_dim=rng.choice([8, 16]), hidden_act=rng.choice(ACTS), **_biases(rng, "attention_bias"))


def _qwen3_moe(rng: random.Random) -> dict[str, Any]:
    dense = {"mlp_only_layers": [0]} if rng.random() < 0.1 else {}
    routed = {"norm_topk_prob": rng.random() < 0.5, **_experts(rng, "num_experts")}
    return _sizes(rng, head_dim=16, **_biases(rng, "attention_bias"), **routed, **dense)


def _gemma3(rng: random.Random) -> dict[str, Any]:
    capped = {"final_logit_softcapping": 30.0} if rng.random() < 0.1 else {}
    theta = {"rope_type": "default", "rope_theta": 10_000.0}
    rope = {"full_attention": _rope(rng, ("linear",)), "sliding_attention": theta}
    own = {"query_pre_attn_scalar": rng.choice([8, 24]), "sliding_window": 5, "rope_parameters": rope}
    return _sizes(rng, head_dim=16, sliding_window_pattern=rng.choice([2, 3]), **own, **capped)


def _gpt_oss(rng: random.Random) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 150_000.0}
    rope = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": rng.random() < 0.5}
    return _sizes(rng, head_dim=16, sliding_window=5, rope_parameters=rope, **_experts(rng, "num_local_experts"))


def _deepseek(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4])
    latents = {"q_lora_rank": rng.choice([None, 24]), "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    routed = {**_experts(rng, "n_routed_experts"), "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    return _sizes(
        rng,
        **latents,
        **routed,
        qk_rope_head_dim=rng.choice([4, 8]),
        v_head_dim=rng.choice([8, 12]),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        first_k_dense_replace=rng.choice([0, 1]),
        n_shared_experts=rng.choice([1, 2]),
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )


def _mixtral(rng: random.Random) -> dict[str, Any]:
    routed = {name: value for name, value in _experts(rng, "num_local_experts").items() if name[:3] == "num"}
    return _sizes(rng, sliding_window=rng.choice([None, 5]), **routed, **_head_dim(rng))


def _olmo2(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng, hidden_act=rng.choice(ACTS), **_biases(rng, "attention_bias"))


def _olmo3(rng: random.Random) -> dict[str, Any]:
    given = _olmo2(rng) | {"sliding_window": 5}
    every, layers = rng.choice([2, 4, 9]), given["num_hidden_layers"]
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    rope = {"full_attention": given["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
    return given | {"rope_parameters": rope} | ({"layer_types": kinds} if rng.random() < 0.6 else {})


def _smollm3(rng: random.Random) -> dict[str, Any]:
    layers = rng.choice([1, 2, 3, 4])
    kinds: list[dict[str, Any]] = [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]},
    ]
    windows = {"use_sliding_window": True, "sliding_window": 5} if rng.random() < 0.1 else {}
    own = {"num_hidden_layers": layers, "hidden_act": rng.choice(ACTS), **rng.choice(kinds), **windows}
    return _sizes(rng, **own, **_biases(rng, "attention_bias", "mlp_bias"))


def _granite(rng: random.Random) -> dict[str, Any]:
    factors = {"embedding_multiplier": rng.choice([1.0, 3.0]), "logits_scaling": rng.choice([1.0, 4.0, 3.0])}
    factors |= {"attention_multiplier": rng.choice([0.1, 0.25]), "residual_multiplier": rng.choice([1.0, 0.22])}
    return _sizes(rng, hidden_act=rng.choice(ACTS), **factors, **_biases(rng, "attention_bias", "mlp_bias"))


def _glm4_moe(rng: random.Random) -> dict[str, Any]:
    routed = {**_experts(rng, "n_routed_experts"), "n_routed_experts": 8}
    routed |= rng.choice([{"n_group": 1, "topk_group": 1}, {"n_group": 2, "topk_group": 1}])
    own = {"first_k_dense_replace": rng.choice([0, 1]), "routed_scaling_factor": rng.choice([1.0, 2.5])}
    given = _sizes(rng, head_dim=16, **routed, **own, **_biases(rng, "use_qk_norm", "attention_bias"))
    return given | {"rope_parameters": given["rope_parameters"] | {"partial_rotary_factor": rng.choice([0.5, 0.25])}}


def _phi3(rng: random.Random) -> dict[str, Any]:
    given = _sizes(rng, sliding_window=rng.choice([None, 5]), hidden_act=rng.choice(ACTS))
    given["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    rotated = given["hidden_size"] // given["num_attention_heads"]
    if rng.random() < 0.3:
        rotated //= 2
        given["rope_parameters"]["partial_rotary_factor"] = 0.5
    if rng.random() < 0.6:
        given |= {"original_max_position_embeddings": rng.choice([16, 64]), "max_position_embeddings": 256}
        short, long = ([rng.uniform(1, most) for _ in range(rotated // 2)] for most in (1.2, 8.0))
        given["rope_parameters"] |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        given["rope_parameters"]["original_max_position_embeddings"] = given["original_max_position_embeddings"]
    return given | ({"resid_pdrop": 0.1} if rng.random() < 0.1 else {})


DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "smollm3": _smollm3,
    "granite": _granite,
    "glm4_moe": _glm4_moe,
    "phi3": _phi3,
    "deepseek_v2": lambda rng: _deepseek(rng) | {"norm_topk_prob": False, "topk_method": "group_limited_greedy"},
}
"""model_type -> fields of a random configuration."""


def draw(kind: str, seed: int) -> Draw:
    rng = random.Random(f"{kind} {seed}")
    return Draw(kind, DRAWS[kind](rng), rng.random() < 0.4, rng.choice([0.0, 0.5]), seed)


def make(given: Draw, folder: Path) -> None:
    """Write the folder: config.json and weights with which every part of the model matters."""
    config = transformers.AutoConfig.for_model(given.kind, **given.fields)
    torch.manual_seed(given.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()))
            elif "embed" not in name:
                parameter.mul_(5)
    model.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text())
    rng = random.Random(given.seed)
    if given.older and isinstance(rope := written.get("rope_parameters"), dict) and "rope_type" in rope:
        del written["rope_parameters"]
        theta = rope.pop("rope_theta")
        written |= {"rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}
    default = type(config)().to_dict()
    kept = {"model_type", "architectures", "vocab_size", "pad_token_id"}
    for name in [*written]:
        if name not in kept and written[name] == default.get(name, written) and rng.random() < given.left_out:
            del written[name]
    file.write_text(json.dumps(written, indent=1))


def reference(folder: Path, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Loss and gradient norm of transformers, which reads the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).train()
    logits = model(batch["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    norms = [each.grad.double().norm() for each in model.parameters() if each.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


def words(folder: Path, dump: Path) -> list[str]:
    """The job of one step, for a command line."""
    start = ("--model.flavor", str(folder), "--checkpoint.initial_load_in_hf", "true", "--training.steps", "1")
    return ["--job.config_file", str(RECIPE), *SMALL, *start, "--job.dump_folder", str(dump)]


def first_batch() -> dict[str, torch.Tensor]:
    """The batch of the first step of such a job."""
    config = load_config(["--job.config_file", str(RECIPE), *SMALL])
    train_set, _ = build_datasets(config, VOCABULARY)
    size = config.training.global_batch_size
    order = GlobalOrder(train_set, config.debug.seed, size, size, 0, 1, 0)
    return next(iter(build_loader(order, False, config.training.dataloader)))


def fields_of(said: str, folder: Path) -> list[str]:
    """The fields of config.json, and the misfits of its tensors, that a refusal names."""
    given = json.loads((folder / "config.json").read_text())
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    inside = [name for part in (rope, *rope.values()) if isinstance(part, dict) for name in part]
    return [name for name in (*given, *inside) if f"{name} = " in said]


def difference(loss: float, norm: float, folder: Path, batch: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a step's loss and gradient norm from those of transformers."""
    their_loss, their_norm = reference(folder, batch)
    return max(abs(loss / their_loss - 1), abs(norm / their_norm - 1))


def compare(given: Draw, batch: dict[str, torch.Tensor], at: Path) -> tuple[str, float, str]:
    """("trained", worst relative difference, ""), ("refused", 0, fields), or ("failed", 0, why)."""
    folder, dump = at / f"{given.kind} {given.seed}", at / "out"
    shutil.rmtree(dump, ignore_errors=True)
    make(given, folder)
    command = [str(ROOT / "run_train.sh"), *words(folder, dump)]
    alone = {**os.environ, "NGPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    if done.returncode == 2:
        named = fields_of(done.stderr, folder)
        return ("refused", 0.0, ", ".join(named)) if named else ("failed", 0.0, done.stderr.strip())
    if done.returncode:
        return "failed", 0.0, done.stderr[-2000:]
    row = json.loads((dump / "metrics.jsonl").read_text().splitlines()[-1])
    worst = difference(row["loss"], row["grad_norm"], folder, batch)
    shutil.rmtree(folder)
    return ("trained" if worst <= LIMIT else "failed"), worst, ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.folders", description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200, help="folders (200), of the families in turn")
    parser.add_argument("--seed", type=int, default=0, help="number of the first draw (0)")
    parser.add_argument("--kind", choices=DRAWS, help="only this model_type")
    options = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kinds, batch = [options.kind] if options.kind else [*DRAWS], first_batch()
    counts, worst = Counter[tuple[str, str]](), 0.0
    with tempfile.TemporaryDirectory() as at:
        for number in range(options.draws):
            kind = kinds[number % len(kinds)]
            given = draw(kind, options.seed + number // len(kinds))
            try:
                outcome, error, why = compare(given, batch, Path(at))
            except (ConfigError, ValueError) as caught:  # transformers does not make it
                outcome, error, why = "not made", 0.0, str(caught).partition("\n")[0]
            counts[kind, outcome] += 1
            worst = max(worst, error)
            print(f"{number + 1:4}/{options.draws}  {kind} {given.seed}: {outcome} {error:.1e} {why}", flush=True)
    for kind in kinds:
        print(f"{kind:14}", ", ".join(f"{count} {what}" for (of, what), count in counts.items() if of == kind))
    print(f"largest difference of loss or gradient norm: {worst:.1e}")
    return int(any(what == "failed" for _, what in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
