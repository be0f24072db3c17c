"""litgpt's own pretraining loop on a CPU, timed: `python lit.py JOB` in an environment that has it. See clock.py."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.pretrain import fit

sys.path.insert(0, str(Path(__file__).parent))
from clock import Clock, job


class Tokens:
    """Batches without end; the clock ticks before each that is trained on."""

    def __init__(self, batch: int, seq: int, vocab: int, clock: Clock | None = None) -> None:
        self.tokens, self.clock = torch.randint(vocab, (batch, seq + 1)), clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.clock:
                self.clock.tick()
            yield self.tokens


def main() -> None:
    given = job()
    clock, tokens = Clock(given), (given["batch"], given["seq"], given["vocab"])
    mixed = given["dtype"] == "bfloat16"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if mixed else "32-true")
    config = Config(
        n_embd=given["dim"],
        n_layer=given["layers"],
        n_head=given["heads"],
        n_query_groups=given["kv_heads"],
        intermediate_size=given["ffn"],
        vocab_size=given["vocab"],
        padded_vocab_size=given["vocab"],
        block_size=given["seq"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rope_base=500000,
    )
    model = GPT(config)
    model.max_seq_length = given["seq"]
    if given["compile"]:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    train = TrainArgs(
        save_interval=None,
        log_interval=1000,
        global_batch_size=given["batch"],
        micro_batch_size=given["batch"],
        max_tokens=10**9,
        max_norm=1.0,
        lr_warmup_steps=10,
    )
    loaders = Tokens(*tokens, clock), Tokens(*tokens)
    fit(fabric, 1, state, *loaders, Path(tempfile.mkdtemp()), None, train, EvalArgs(interval=10**9, max_iters=1))


if __name__ == "__main__":
    main()
