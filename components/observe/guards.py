"""Skips updates: those from a gradient that is not finite and, on request, those at a spike of loss or norm.

Each step is judged on the device, by numbers that are the same on every rank. The host reads a judgement one step
later, so that it never waits for the step that it has just started. Once the run has to end, no step updates a weight.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from components.config import Training
from components.config.files import write_json
from components.data.loader import GlobalOrder, build_loader
from components.launch.exit_codes import ExitCode
from parallelize.groups import print_on_rank_0
from parallelize.mesh import Mesh, sum_over_token_ranks
from parallelize.sharding import is_copy, local_part


@dataclass
class Judgement:
    """The numbers of one step, copied to the host without a wait."""

    step: int
    sequences: int
    """Position of the step's global batch in the data order."""
    loss: Tensor
    """This rank's part."""
    norm: Tensor
    own_norms: list[Tensor]
    """Norms of this rank's gradient shards, in the order of local_gradients."""
    numbers: Tensor
    """Skipped steps in a row, followed by the numbers of Spikes.judge if spikes are skipped."""
    copied: torch.cuda.Event | None
    told: bool = False

    def read(self) -> list[float]:
        """The numbers, once the device has finished the step."""
        if self.copied:
            self.copied.synchronize()
        return self.numbers.tolist()


class Guards:
    """Judges every step. All ranks call judge, with the same result."""

    def __init__(self, training: Training, dump_folder: Path, mesh: Mesh, device: torch.device) -> None:
        self.limit, self.dump_folder, self.device = training.max_nonfinite_steps, dump_folder, device
        sigma, window = training.skip_spikes_sigma, training.skip_spikes_window
        self.spikes = Spikes(sigma, window, mesh, device) if sigma else None
        self.skipped_steps = torch.zeros((), device=device)
        """Steps since step 0 that changed no weight."""
        self.skipped_in_a_row = torch.zeros((), dtype=torch.float64, device=device)
        self.earlier: Judgement | None = None
        self.last: Judgement | None = None

    def judge(self, step: int, sequences: int, loss: Tensor, norm: Tensor, own_norms: list[Tensor]) -> Tensor:
        """Whether the update may be made, a tensor on the device. sequences: the batch's position in the data order."""
        accepted = norm.isfinite() & (self.skipped_in_a_row < self.limit)
        spike: list[Tensor] = []
        if self.spikes:
            calm, spike = self.spikes.judge(loss, norm)
            accepted = accepted & calm
        self.skipped_steps = self.skipped_steps + ~accepted
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * ~accepted
        numbers = torch.stack([self.skipped_in_a_row, *spike]).to("cpu", non_blocking=True)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self.earlier, self.last = self.last, Judgement(step, sequences, loss, norm, own_norms, numbers, copied)
        return accepted

    def check(self, order_from: Callable[[int], GlobalOrder], stages: Sequence[nn.Module], now: bool) -> None:
        """Report spikes; end the run after training.max_nonfinite_steps skipped steps in a row.

        Called each step. The judgement of the step before is always read, that of this step only if `now`. order_from:
        position of the data order -> this rank's sequences from there on. Raises SystemExit on every rank, after each
        rank has written its evidence.
        """
        for judgement in (self.earlier, self.last if now else None):
            if judgement:
                in_a_row, *spike = judgement.read()
                if spike and not judgement.told:
                    judgement.told = True
                    _tell_spike(judgement.step, *spike)
                if in_a_row >= self.limit:
                    self._tell_end(judgement.step)
                    folder = self.dump_folder / "nonfinite" / f"step-{judgement.step}"
                    write_evidence(judgement, order_from(judgement.sequences), stages, folder)
                    raise SystemExit(ExitCode.NONFINITE)

    def _tell_end(self, step: int) -> None:
        if dist.get_rank() == 0:
            what = "loss or gradient not finite" + " or a spike" * bool(self.spikes)
            print(
                f"steps {step - self.limit + 1} to {step}: {what} {self.limit} steps in a row "
                f"(training.max_nonfinite_steps = {self.limit}); weights are as they were before. "
                f"Each rank's batch and gradient norms: {self.dump_folder / 'nonfinite'}",
                file=sys.stderr,
            )

    @property
    def skipping(self) -> bool:
        """Whether the last step changed nothing. Waits for the device."""
        return self.last is not None and self.last.read()[0] > 0

    def counts(self) -> dict[str, float]:
        """For metrics.jsonl. Waits for the device."""
        spikes = {"skipped_spikes": self.spikes.skipped.item()} if self.spikes else {}
        return {"skipped_steps": self.skipped_steps.item(), **spikes}

    def state(self) -> dict[str, Any]:
        """The numbers that a checkpoint keeps."""
        spikes = {"spikes": self.spikes.state()} if self.spikes else {}
        return {"skipped_steps": int(self.skipped_steps), **spikes}

    def load(self, state: dict[str, Any]) -> None:
        self.skipped_steps.fill_(state["skipped_steps"])
        if self.spikes and "spikes" in state:
            self.spikes.load(state["spikes"])


class Spikes:
    """Finds steps whose loss or gradient norm is more than sigma standard deviations above the mean of recent steps.

    As in OLMo-core's SkipStepOptimizer, recent steps include spikes, so that a lasting change is soon accepted.
    """

    def __init__(self, sigma: float, window: int, mesh: Mesh, device: torch.device) -> None:
        self.sigma, self.window, self.mesh = sigma, window, mesh
        self.history = torch.full((2, window), math.nan, dtype=torch.float64, device=device)
        """Losses and norms of the last steps that were finite, the newest last; NaN where there was none yet."""
        self.skipped = torch.zeros((), device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns whether the step is no spike, and numbers: is a spike, loss, norm, highest accepted loss and norm.

        loss: this rank's part. Nothing is a spike until half the window is known.
        """
        whole = sum_over_token_ranks(loss.clone(), self.mesh)
        if self.mesh["tp"].size() > 1:  # tp ranks may round the same loss differently
            dist.all_reduce(whole, dist.ReduceOp.MAX, self.mesh["tp"].get_group())
        norm = norm.to(whole.device, non_blocking=True)  # the norm of offloaded weights is on the host
        now = torch.stack([whole, norm]).double()
        count = (~self.history[0].isnan()).sum()
        mean = self.history.nanmean(1, keepdim=True)
        deviation = ((self.history - mean).square().nansum(1) / (count - 1)).sqrt()
        highest = mean[:, 0] + self.sigma * deviation
        finite = now.isfinite().all()
        spike = finite & (count >= self.window // 2) & (now > highest).any()
        self.history = torch.where(finite, torch.cat([self.history[:, 1:], now[:, None]], 1), self.history)
        self.skipped = self.skipped + spike
        return ~spike, [spike.double(), *now, *highest]

    def state(self) -> dict[str, Any]:
        return {"skipped": int(self.skipped), "history": [row[~row.isnan()].tolist() for row in self.history]}

    def load(self, state: dict[str, Any]) -> None:
        self.skipped.fill_(state["skipped"])
        for row, values in zip(self.history, state["history"], strict=True):
            newest = values[-self.window :]
            row[self.window - len(newest) :] = torch.tensor(newest, dtype=row.dtype)


def _tell_spike(step: int, spike: float, loss: float, norm: float, highest_loss: float, highest_norm: float) -> None:
    if spike:
        print_on_rank_0(
            f"step {step} skipped, a spike: loss {loss:.4f} (highest accepted {highest_loss:.4f}), "
            f"grad norm {norm:.3f} (highest accepted {highest_norm:.3f})"
        )


def write_evidence(judgement: Judgement, order: GlobalOrder, stages: Sequence[nn.Module], folder: Path) -> None:
    """Write what this rank saw in a step: rank_R.safetensors (its sequences) and rank_R.json (its numbers).

    order: this rank's sequences from the step's first on. Tensors are those of a batch, each (sequences, seq_len).
    """
    rank = dist.get_rank()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        count = order.global_batch_size // order.batch_ranks // order.local_batch_size
        batches = list(islice(build_loader(order, document_mask=True), count))
        tensors = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        save_file(tensors, folder / f"rank_{rank}.safetensors")
        numbers = [n for positions in islice(order, count) for n in order.sequences.at(positions, order.seed).tolist()]
        write_json(folder / f"rank_{rank}.json", {"sequences": numbers, **_numbers(judgement, stages)})
    except OSError as error:  # the exit code says in any case how the run ended
        print(f"rank {rank}: {folder} could not be written: {error}", file=sys.stderr)


def _numbers(judgement: Judgement, stages: Sequence[nn.Module]) -> dict[str, Any]:
    """A rank's own numbers. Numbers that are not finite become text, because JSON has none."""
    names = defaultdict(list)
    for name, parameter in (each for stage in stages for each in stage.named_parameters()):
        if parameter.grad is not None and not is_copy(parameter):
            names[local_part(parameter.grad)[0]].append(name)
    ordered = [name for group in names.values() for name in group]
    norms = dict(zip(ordered, (norm.item() for norm in judgement.own_norms), strict=True))
    numbers: dict[str, Any] = {
        "step": judgement.step,
        "position": judgement.sequences,
        "own_loss": judgement.loss.item(),
    }
    numbers |= {"grad_norm": judgement.norm.item(), "own_grad_norms": norms}
    return json.loads(json.dumps(numbers), parse_constant=str)
