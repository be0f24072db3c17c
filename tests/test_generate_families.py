"""Text from models with windows, sinks, or values narrower than keys: with the cache, the tokens of whole prefixes."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from components import generate as generation
from components.state.init import initialize_weights
from models import MODELS
from tests.test_generate import logits_of_whole_prefixes


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "mistral"])
def test_with_the_cache_tokens_are_those_of_whole_prefixes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in pieces that is longer than a window."""
    monkeypatch.setattr(generation, "_CHUNK_TOKENS", 20)
    model = MODELS[name][0](MODELS[name][1]["tiny"])
    initialize_weights(model, model.init_std, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # attention that is not close to uniform
                parameter.mul_(5)
    prompt = torch.randint(0, 1024, (45,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens, right = logits_of_whole_prefixes(model, prompt, 10)
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> int:
        seen.append(logits)
        return int(logits.argmax())

    assert list(islice(generation.generate(model, prompt, choose), 10)) == tokens
    for ours, whole in zip(seen, right, strict=True):
        assert (ours - whole).norm() / whole.norm() < 1e-5
