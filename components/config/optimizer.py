"""Tables of a job file about the update of weights, as in tables.py: [optimizer] and [lr_scheduler]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from components.config.bounds import Beta, Fraction, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Role:
    """Learning rate and decay of the parameters of a role."""

    lr_factor: Annotated[float, Ge(0)] = 1.0
    """Factor of the learning rate of each step."""
    weight_decay: Annotated[float, Ge(0)] | None = None
    """Decay of these parameters; optimizer.weight_decay if unset."""


@dataclass(frozen=True, kw_only=True)
class NormRole(Role):
    """The same, of vectors."""

    weight_decay: Annotated[float, Ge(0)] | None = 0.0
    """Decay of these parameters."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update of weights."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """Adam (arXiv:1412.6980) decays the weights through the gradient, AdamW (arXiv:1711.05101) directly. Muon
    (arXiv:2502.16982) orthogonalises the momentum of matrices of layers, experts and adapters; the rest has AdamW."""
    lr: PositiveFloat = 8e-4
    """Peak learning rate."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decay of all parameters but norms and biases, which have none."""
    momentum: Beta = 0.95
    """Muon: decay of the momentum, which is Nesterov's."""
    newton_schulz_steps: Positive = 5
    """Muon: iterations of the orthogonalisation, in the precision of training.mixed_precision_param."""
    embedding: Role = field(default_factory=Role)
    """The table of token embeddings, also where it is the head's too."""
    matrix: Role = field(default_factory=Role)
    """The matrices of the layers."""
    bias: NormRole = field(default_factory=NormRole)
    """Biases of products, and the sinks of attention."""
    norm: NormRole = field(default_factory=NormRole)
    """The vectors of the norms."""
    router: Role = field(default_factory=Role)
    """The matrices that choose a token's experts."""
    expert: Role = field(default_factory=Role)
    """The matrices of the experts."""
    adapter: Role = field(default_factory=Role)
    """Both matrices of each adapter."""
    head: Role = field(default_factory=Role)
    """The matrix from the last hidden state to the logits."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of moments and momentum of all but vectors, rounded at random; int8 has a scale for each block."""
    state_offload: bool = False
    """Keep moments and momentum in host memory; for the update they visit the device, some parameters at a time."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Kernel of the update where weights and moments are float32; fused is fastest on CPU and CUDA."""


OPTIMIZER_KEYS: dict[str, tuple[str, ...]] = {
    "AdamW": ("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
    "Adam": ("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
    "Muon": (
        *("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
        *("momentum", "newton_schulz_steps"),
    ),
}
"""optimizer.name -> the keys that it takes, beside lr, weight_decay and the roles, which all take.

An optimizer without state_dtype rounds nothing at random, so it takes no bfloat16 weights either.
"""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Warm-up, stable, decay (arXiv:2404.06395)."""

    warmup_steps: NonNegative = 200
    """Steps of linear warm-up from 0; a run may end within them. If unset, at most the schedule's length."""
    total_steps: Positive | None = None
    """Length of the schedule; training.steps if unset."""
    decay_ratio: Fraction | None = None
    """Fraction of total_steps over which the rate decays. If unset, or too large: all steps after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine", "rex", "constant"] = "linear"
    """Shape of the decay; with constant there is none."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this fraction of lr."""
