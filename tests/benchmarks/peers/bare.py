"""A plain PyTorch loop over the same model: no layout, no configuration, no data. See clock.py."""

from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_

from models.llama import Llama
from tests.benchmarks.peers.clock import Clock, job
from tests.benchmarks.peers.ours import sizes


def main() -> None:
    given = job()
    torch.manual_seed(0)
    clock, device = Clock(given), given["device"]
    with torch.device(device):
        model = Llama(sizes(given))
    if given["compile"]:
        for layer in model.layers.children():
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(given["vocab"], (given["batch"], given["seq"] + 1), device=device)
    mixed = torch.autocast(device, torch.bfloat16) if given["dtype"] == "bfloat16" else nullcontext()
    while True:
        clock.tick()
        optimizer.zero_grad()
        with mixed:
            loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
