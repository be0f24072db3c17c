"""Tables of a job file that describe the update of weights: [optimizer] and [lr_scheduler]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge

from components.config.bounds import Beta, Fraction, Name, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Role:
    """Optimizer settings for the parameters of one role."""

    lr_factor: Annotated[float, Ge(0)] = 1.0
    """Factor by which the learning rate of each step is multiplied."""
    weight_decay: Annotated[float, Ge(0)] | None = None
    """Weight decay of these parameters; optimizer.weight_decay if unset."""


@dataclass(frozen=True, kw_only=True)
class NormRole(Role):
    """Optimizer settings for one role of vectors, which have no weight decay by default."""

    weight_decay: Annotated[float, Ge(0)] | None = 0.0
    """Weight decay of these parameters."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update of weights."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """Adam (arXiv:1412.6980) decays weights through the gradient, AdamW (arXiv:1711.05101) directly. Muon
    (arXiv:2502.16982) orthogonalizes the momentum of matrices of layers, experts and adapters; the other parameters
    use AdamW."""
    lr: PositiveFloat = 8e-4
    """Peak learning rate."""
    mup_base: Name | None = None
    """Flavor of the model's family whose width is the base of muP (arXiv:2203.03466, docs/mup.md): weights at step 0
    and rates follow the width so that the best lr is that of the base. Unset: neither depends on the width."""
    beta1: Beta = 0.9
    """Decay of the first moment."""
    beta2: Beta = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Weight decay of all parameters except norms and biases."""
    momentum: Beta = 0.95
    """Muon: decay of the Nesterov momentum."""
    newton_schulz_steps: Positive = 5
    """Muon: iterations of the orthogonalization, computed in training.mixed_precision_param."""
    embedding: Role = field(default_factory=Role)
    """The table of token embeddings, also if it is tied to the head."""
    matrix: Role = field(default_factory=Role)
    """The matrices of the layers."""
    bias: NormRole = field(default_factory=NormRole)
    """Biases added to matrix products, and attention sinks."""
    norm: NormRole = field(default_factory=NormRole)
    """Weights of the norms."""
    router: Role = field(default_factory=Role)
    """The router matrices, which choose each token's experts."""
    expert: Role = field(default_factory=Role)
    """The matrices of the experts."""
    adapter: Role = field(default_factory=Role)
    """Both matrices of each adapter."""
    head: Role = field(default_factory=Role)
    """The matrix from the last hidden state to the logits."""
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of moments and momentum, with stochastic rounding. Vectors keep float32 states. int8 has one scale per
    block."""
    state_offload: bool = False
    """Keep moments and momentum in host memory; the update copies the states of a few parameters at a time."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Kernel of the update if weights and moments are float32; fused is fastest on CPU and CUDA."""


OPTIMIZER_KEYS: dict[str, tuple[str, ...]] = {
    "AdamW": ("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
    "Adam": ("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
    "Muon": (
        *("beta1", "beta2", "eps", "implementation", "state_offload", "state_dtype"),
        *("momentum", "newton_schulz_steps"),
    ),
}
"""optimizer.name -> the keys of that optimizer. All optimizers also have lr, weight_decay and the roles."""


@dataclass(frozen=True, kw_only=True)
class LRScheduler:
    """Learning rate schedule: warm-up, stable, decay (arXiv:2404.06395)."""

    warmup_steps: NonNegative = 200
    """Steps of linear warm-up from 0; a run may end during warm-up. If unset: 200, or the schedule's length if less."""
    total_steps: Positive | None = None
    """Length of the schedule; training.steps if unset."""
    decay_ratio: Fraction | None = None
    """Fraction of total_steps over which the rate decays; if unset or too large, all steps after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine", "rex", "constant"] = "linear"
    """Shape of the decay; constant disables it."""
    min_lr_factor: Fraction = 0.0
    """Fraction of lr at which the decay ends."""
