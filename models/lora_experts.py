"""Adapters of experts: one A and one B per matrix of each expert, stacked as the matrices are (models/grouped.py).

The adapters of layers.0.feed_forward.experts.w1 (E, out, in) are w1_lora_A (E, r, in) and w1_lora_B (E, out, r).
"""

from torch import Tensor, nn

from models.moe import Experts
from models.nf4 import is_packed, unpack

MATRICES = ("w1", "w2", "w3")


def adapt_experts(experts: Experts, matrix: str, rank: int, scale: float) -> None:
    """Add adapters to one of the MATRICES, for all experts of a layer."""
    weight = getattr(experts, matrix)
    count, out_features, in_features = weight.shape
    experts.register_parameter(f"{matrix}_lora_A", nn.Parameter(weight.new_empty(count, rank, in_features)))
    experts.register_parameter(f"{matrix}_lora_B", nn.Parameter(weight.new_empty(count, out_features, rank)))
    experts.scale = scale


def merged_experts(experts: Experts) -> dict[str, Tensor]:
    """The adapted matrices, by name, with adapters merged: W + scale B A of each expert, summed in float32."""
    weights = {
        name: unpack(parameter) if is_packed(parameter) else parameter.detach().float()
        for name, parameter in experts.named_parameters()
    }
    adapted = [matrix for matrix in MATRICES if f"{matrix}_lora_A" in weights]
    return {
        matrix: weights[matrix] + experts.scale * weights[f"{matrix}_lora_B"] @ weights[f"{matrix}_lora_A"]
        for matrix in adapted
    }
