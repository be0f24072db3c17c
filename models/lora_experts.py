"""Adapters of experts: for each matrix of each expert an A and a B, stacked as the matrices are (models/grouped.py).

Beside layers.0.feed_forward.experts.w1 (E, out, in) are w1_lora_A (E, r, in) and w1_lora_B (E, out, r).
"""

from torch import Tensor, nn

from models.moe import Experts
from models.nf4 import is_packed, unpack

MATRICES = ("w1", "w2", "w3")


def adapt_experts(experts: Experts, matrix: str, rank: int, scale: float) -> None:
    """Give one of the MATRICES of all experts of a layer adapters."""
    weight = getattr(experts, matrix)
    count, out_features, in_features = weight.shape
    experts.register_parameter(f"{matrix}_lora_A", nn.Parameter(weight.new_empty(count, rank, in_features)))
    experts.register_parameter(f"{matrix}_lora_B", nn.Parameter(weight.new_empty(count, out_features, rank)))
    experts.scale = scale


def merged_experts(experts: Experts) -> dict[str, Tensor]:
    """Adapted matrices by name: W + scale B A of each expert, summed in float32."""
    own = {
        name: unpack(each) if is_packed(each) else each.detach().float() for name, each in experts.named_parameters()
    }
    adapted = [matrix for matrix in MATRICES if f"{matrix}_lora_A" in own]
    return {
        matrix: own[matrix] + experts.scale * own[f"{matrix}_lora_B"] @ own[f"{matrix}_lora_A"] for matrix in adapted
    }
