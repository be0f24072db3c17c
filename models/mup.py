"""Rates and starting values by width: muP (arXiv:2203.03466, table 8), relative to a base model of the same family.

The forward pass stays as it is. A factor c of a weight's values equals a factor c of its start and of its rate
(arXiv:2203.03466, appendix J.2.1). So the two multipliers of muP are factors of weights too. The norm before the head
carries the multiplier of the logits, also if the head is tied to the embeddings. The queries carry that of attention.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Scale(NamedTuple):
    """Factors of one parameter."""

    start: float = 1.0
    """Factor of the values at step 0."""
    rate: float = 1.0
    """Factor of Adam's rate. The decay is divided by it, so that rate x decay does not depend on the width."""
    orthogonal_rate: float = 1.0
    """The same for Muon, whose updates are orthogonal matrices."""

    def times(self, factor: float) -> "Scale":
        """The scale of values that are multiplied by a factor."""
        return Scale(self.start * factor, self.rate * factor, self.orthogonal_rate * factor)


UNSCALED = Scale()


def scales(model: Any, base: Any) -> dict[str, Scale]:
    """Parameter name -> Scale, for two whole models of one family, which may be on the meta device.

    Raises ValueError if the base has no matrix of the same name in any layer.
    """
    own, theirs = model.config, base.config
    width, embedded = own.dim / theirs.dim, own.embedding_factor / theirs.embedding_factor
    logits = own.logits_scaling / theirs.logits_scaling / width * (embedded if own.tie_embeddings else 1.0)
    # Logits of attention are q k x factor / sqrt(head_dim); muP needs a factor of 1 / sqrt(head_dim) more.
    queries = theirs.query_factor / own.query_factor * math.sqrt(theirs.head_dim / own.head_dim)
    scaled_queries = ("q_norm.weight",) if own.qk_norm else ("wq.weight", "wq.bias", "wq_b.weight")
    shapes = {_in_any_layer(name): parameter.shape for name, parameter in base.named_parameters()}

    def scale(name: str, shape: Sequence[int]) -> Scale:
        role, in_any_layer = model.kind(name).role, _in_any_layer(name)
        found = UNSCALED
        if role in ("matrix", "expert", "router") and len(shape) > 1:
            if in_any_layer not in shapes:
                raise ValueError(f"the base has no {in_any_layer}; use a flavor that has layers of the same kinds")
            found = _of_matrix(shape, shapes[in_any_layer], to_few=role == "router")
        elif role == "embedding":
            found = UNSCALED.times(1 / embedded)
        elif in_any_layer in ("norm.weight", "layers.*.mtp.norm.weight"):
            found = UNSCALED.times(logits)
        return found.times(queries) if name.endswith(tuple(f".attention.{each}" for each in scaled_queries)) else found

    return {name: scale(name, parameter.shape) for name, parameter in model.named_parameters()}


def _in_any_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _of_matrix(shape: Sequence[int], base: Sequence[int], to_few: bool) -> Scale:
    """The scale of a matrix (..., out, in). to_few: its output does not grow with the width, as that of a router."""
    inputs = shape[-1] / base[-1]
    return Scale(1 / inputs if to_few else inputs**-0.5, 1 / inputs, _spread(base) / _spread(shape))


def _spread(shape: Sequence[int]) -> float:
    """Spectral norm of Muon's update over sqrt(out / in), which muP keeps (arXiv:2310.17813, condition 1).

    Muon scales its orthogonal matrix by sqrt(max(out, in)) (components/optim/muon.py).
    """
    rows, columns = shape[-2:]
    return math.sqrt(max(rows, columns) / (rows / columns))
