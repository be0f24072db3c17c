"""Exports are what serving systems take: llama.cpp knows every tensor's name, keeps its values, and has our logits.

The names come from its package gguf. LLAMA_CPP=FOLDER names a copy of llama.cpp, whose convert_hf_to_gguf.py converts
the exports. If the package xllamacpp is installed, llama.cpp then runs them. Both are too large for a dependency.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from components.config import Model
from components.state.weights import Folder, _fill, export
from models import MODELS, meta_model, sizes
from tests import limits
from tests.small import SMALL

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.slow
TOKENIZER = SMALL[SMALL.index("--model.hf_assets_path") + 1]
FAMILIES = sorted(name for name, (model, _) in MODELS.items() if model.hf_type and "tiny" in MODELS[name][1])
ARCHITECTURES = {
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
}
"""Family -> llama.cpp's name of its architecture, where that is another."""
FLAVORS = {"deepseek_v3": "tiny_sigmoid"}
"""Family -> its flavor here, where that is not "tiny": llama.cpp takes a model without q_lora_rank for V2-Lite."""
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_every": 4, "n_layers": 5},
    **{family: {"head_size": None} for family in ("olmo2", "olmo3")},
    "gemma3": {"tie_embeddings": True, "full_every": 6, "n_layers": 7, "query_size": 8},
}
"""Family -> sizes that llama.cpp does not read, because all published models have the same."""
PROMPT = [(7 * number * number + 13 * number + 5) % 700 for number in range(40)]
SHORT = {"mistral": 8}
"""Family -> length of its prompt, where llama.cpp has no window."""
LIMITS = {"gpt_oss": 0.01, "gemma3": 0.01}
"""Family -> largest difference of a log-probability, if above 1e-4. llama.cpp rounds the ends of YaRN's ramp, which
gpt-oss does not, and takes GELU from a table of 16 bits."""
CONVERT = """
import runpy, sys
folder = sys.argv.pop(1)
sys.path[:0] = [folder, folder + "/gguf-py"]
from conversion import base
for kind in vars(base).values():  # it knows tokenizers by a hash, and not that of our tests
    if hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
runpy.run_path(folder + "/convert_hf_to_gguf.py", run_name="__main__")
"""
ASK = """
import json, os, sys, urllib.request, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.port = sys.argv[1], 256, 1, 0
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.warmup, parameters.cpuparams.n_threads = False, 1
server = xllamacpp.Server(parameters)
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "n_probs": int(sys.argv[3]), "temperature": 0}
request = urllib.request.Request(server.listening_address + "/completion", json.dumps(asked).encode())
request.add_header("Content-Type", "application/json")
said = json.loads(urllib.request.urlopen(request).read())["completion_probabilities"][0]["top_logprobs"]
print(json.dumps([[each["id"], each["logprob"]] for each in said]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(family, an export of a small model of it, with random weights)."""
    family, flavors = request.param, MODELS[request.param][1]
    flavors["served"] = replace(flavors[FLAVORS.get(family, "tiny")], **AS_PUBLISHED.get(family, {}))
    model, path = meta_model(Model(name=family, flavor="served")), tmp_path_factory.mktemp("serving") / family
    torch.manual_seed(0)
    weights = {name: 0.2 * torch.randn(parameter.shape) for name, parameter in model.named_parameters()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        export(model, weights, path, TOKENIZER, torch.float32)
    finally:
        dist.destroy_process_group()
    yield family, path
    del flavors["served"]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def there(name: str) -> list[str]:
    """Names that llama.cpp's converter makes of one in an export: it stacks experts, and halves what is gate and up."""
    name = re.sub(r"_bias$", ".bias", re.sub(r"\.experts\.\d+\.", ".experts.", name))
    return [name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")] if "gate_up" in name else [name]


def test_llama_cpp_knows_the_name_of_every_tensor(exported: tuple[str, Path]) -> None:
    family, path = exported
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[ARCHITECTURES.get(family, family)], layers)
    names = [each for name in tensors(path) for each in (name, *there(name))]
    suffixes = (".weight", ".bias")
    unknown = {name for name in tensors(path) if not all(known.get_name(each, suffixes) for each in there(name))}
    assert unknown == {name for name in unknown if known.get_name(name, suffixes)}
    assert names


def test_tokens_of_an_export_are_in_its_table(exported: tuple[str, Path]) -> None:
    _, path = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert max(tokenizer.get_vocab().values()) < json.loads((path / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module")
def converted(exported: tuple[str, Path]) -> Path:
    """The export as llama.cpp's converter writes it."""
    if not os.environ.get("LLAMA_CPP"):
        pytest.skip("LLAMA_CPP names no copy of llama.cpp")
    path = exported[1]
    file = path.with_suffix(".gguf")
    words = [os.environ["LLAMA_CPP"], str(path), "--outfile", str(file), "--outtype", "f32"]
    done = limits.run([sys.executable, "-c", CONVERT, *words])
    assert done.returncode == 0, done.stderr
    return file


def test_llama_cpp_keeps_every_value(exported: tuple[str, Path], converted: Path) -> None:
    family, path = exported
    ones = family == "gemma3"  # the converter adds 1 to the weights of its norms
    mine = [(tensor + 1 if ones and "norm" in name else tensor).flatten() for name, tensor in tensors(path).items()]
    read = [torch.tensor(each.data).flatten() for each in gguf.GGUFReader(converted).tensors if "rope" not in each.name]
    assert torch.cat(mine).sort().values.equal(torch.cat(read).sort().values)


@torch.no_grad()
def next_token(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Log-probabilities of the token after these."""
    return model(torch.tensor([tokens]))[0, -1].log_softmax(-1)


def test_llama_cpp_has_our_logits(exported: tuple[str, Path], converted: Path) -> None:
    pytest.importorskip("xllamacpp")
    family, path = exported
    tokens = PROMPT[: SHORT.get(family, len(PROMPT))]
    chosen = sizes(Model(name=family, flavor="served"))
    model = MODELS[family][0](chosen)
    _fill([model], Folder(path))
    right = next_token(model, tokens)
    text = transformers.AutoTokenizer.from_pretrained(path)
    # llama.cpp says nothing about a special token, which may be the end, or about a part of a character.
    while right.argmax() >= chosen.vocab_size - 256 or "\ufffd" in text.decode([int(right.argmax())]):
        tokens = tokens[:-1]
        right = next_token(model, tokens)
    done = limits.run([sys.executable, "-c", ASK, str(converted), json.dumps(tokens), str(chosen.vocab_size)])
    assert done.returncode == 0, done.stderr
    said = dict(json.loads(done.stdout.splitlines()[-1]))
    assert len(said) == chosen.vocab_size
    worst = max(abs(right[token].item() - value) for token, value in said.items())
    print(f"{family}: {worst:.1e}")
    assert worst < LIMITS.get(family, 1e-4)
