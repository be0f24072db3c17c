"""Text from models with windows, sinks, layers without RoPE, or narrow values: the tokens of whole prefixes."""

from itertools import islice

import pytest
import torch
from torch import Tensor

from components.commands import generate as generation
from components.config import Model
from components.state.init import initialize_weights
from models import MODELS, meta_model
from models.visible import Visible
from tests.ranks import group_of_one
from tests.test_generate import logits_of_whole_prefixes

_NAMES = ["gpt_oss", "deepseek_v3", "mistral", "mixtral", "glm4_moe", "phi3", "olmo3", "smollm3", "granite"]


@pytest.mark.parametrize("name", _NAMES)
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


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_computed_in_bfloat16(name: str) -> None:
    model = meta_model(Model(name=name, flavor="debug"))
    source = generation.Source(name, model, "", "", lambda model: initialize_weights(model, model.init_std, seed=0))  # type: ignore[arg-type]
    seen: set[torch.dtype] = set()
    with group_of_one():
        model = generation.build(source, torch.device("cpu"), torch.bfloat16)
        for layer in model.get_submodule("layers").children():
            layer.register_forward_hook(lambda _module, _given, hidden: seen.add(hidden.dtype))
        assert len([*islice(generation.generate(model, [1, 2, 3], lambda logits: int(logits.argmax())), 3)]) == 3
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("sinks", [None, torch.zeros(4, device="meta")])
def test_no_kernel_is_compiled_for_each_number_of_keys(sinks: Tensor | None) -> None:
    """FlexAttention would be, on any device but a CPU."""
    core = generation.CachedCore()
    q, k = (torch.zeros(1, heads, 3, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    for tokens in (3, 1):
        visible = Visible(tokens, tokens, q.device, window=2, sinks=sinks is not None)
        out = core(q[:, :, :tokens], k[:, :, :tokens], k[:, :, :tokens], visible, sinks)
        assert (out.shape, out.dtype) == (q[:, :, :tokens].shape, q.dtype)
