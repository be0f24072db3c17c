"""Experts that tokens were sent to: recorded in one run, and replayed in another.

A token whose scores are all but equal may be sent elsewhere at another layout, and its gradients are then others. With
the routing of one process replayed, a layout has to be the same run: so a flip is told from a fault.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.moe import Router

Key = tuple[str, int]
"""A router's name, and the step; 0 is validation."""


@dataclass
class Routing:
    """Scores (T, E) and chosen experts (T, C) of all tokens of a run."""

    known: dict[Key, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    flips: int = 0
    """Tokens that would have been sent elsewhere, where this was replayed."""
    within: float = 1e-3
    """A token's scores are at most so far from those that it has in the run that is replayed."""

    def smallest_gap(self) -> float:
        """Between the last chosen expert of any token and the first that is not chosen."""
        gaps = []
        for scores, chosen in (each for known in self.known.values() for each in known):
            others = scores.scatter(1, chosen, -torch.inf).amax(1)
            gaps.append((scores.gather(1, chosen).amin(1) - others).min().item())
        return min(gaps)


def watch(run: Any, given: Routing | None) -> Routing:
    """Record the routing of a run that was built, or replay the given one; returns what is seen."""
    seen = Routing()
    for stage in run.stages:
        for name, module in stage.named_modules():
            if isinstance(module, Router):
                _watch(name, module, run, given, seen)
    return seen


def _watch(name: str, router: Router, run: Any, given: Routing | None, seen: Routing) -> None:
    choose = router.choose

    def watched(scores_TE: Tensor) -> Tensor:
        scores = scores_TE
        chosen = choose(scores)
        key = name, run.step if torch.is_grad_enabled() else 0
        if given is None:
            seen.known.setdefault(key, []).append((scores.clone(), chosen))
            return chosen
        all_scores, all_chosen = (torch.cat(tensors) for tensors in zip(*given.known[key], strict=True))
        # A token is found by its scores, of which equal ones have equal choices. Distances that cdist computes by a
        # product of matrices, as it does for more than 25 tokens, are off by as much as neighbours are apart.
        distances = torch.cdist(scores, all_scores, compute_mode="donot_use_mm_for_euclid_dist")
        distance, nearest = distances.min(1)
        assert not len(scores) or distance.max() < given.within, "scores that one process has not"
        replayed = all_chosen[nearest]
        if torch._C._current_graph_task_id() == -1:  # not computed again for backward
            seen.flips += int((replayed != chosen).any(1).sum())
        return replayed

    router.choose = watched  # type: ignore[method-assign]
