"""--prove: every recipe shrinks to a job that the rules accept; planted faults are found and named."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from components.commands.figures import Observation
from components.commands.observed import Proof
from components.commands.prove import check, degrees_of, diagnose, main
from components.commands.routing import watch
from components.commands.shrink import MOST_RANKS, alone, only, shrink
from components.config import ROOT, ConfigError, load_config
from models import MODELS, sizes
from models.moe import MixtureConfig, Router
from parallelize.mesh import Degrees
from tests.benchmarks.prove import RECORD
from tests.test_add_a_model import files_of_the_page
from tests.test_extend import copy_repository

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_shrinks_to_a_job_that_the_rules_accept(recipe: Path, tmp_path: Path) -> None:
    config = load_config(["--job.config_file", str(recipe)])
    real = degrees_of(config, {})
    free = (
        config.parallelism.data_parallel_shard_degree == -1 or config.parallelism.data_parallel_replicate_degree == -1
    )
    small, degrees, notes = shrink(config, real, free, tmp_path)
    check(small, degrees)
    check(alone(small), Degrees())
    assert [axis for axis, size in asdict(real).items() if size > 1 and getattr(degrees, axis) == 1] == []
    assert degrees.world_size <= 2 * MOST_RANKS
    assert ("float8" in notes) == bool(config.model.converters)
    for table in ("experts", "activation_checkpoint"):
        assert getattr(small, table) == getattr(config, table)
    kept = ("dataset_format", "document_mask", "objective")
    assert all(getattr(small.training, key) == getattr(config.training, key) for key in kept)
    assert small.model.lora.base == config.model.lora.base
    for axis, size in asdict(degrees).items():
        if size > 1:
            check(*only(small, degrees, axis))


LONG = ("--training.local_batch_size", "16", "--training.global_batch_size", "64")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--parallelism.pipeline_parallel_degree", "4"), Degrees(pp=3, dp_shard=2)),
        (("--parallelism.context_parallel_degree", "8"), Degrees(dp_shard=2, cp=3)),
        (("--parallelism.tensor_parallel_degree", "8", "--model.sizes.n_kv_heads", "2"), Degrees(dp_shard=2, tp=4)),
        (("--parallelism.tensor_parallel_degree", "8", "--model.sizes.n_kv_heads", "1"), Degrees(dp_shard=2, tp=2)),
    ],
)
def test_a_degree_stays_above_2_where_2_would_be_another_path(
    words: tuple[str, ...], wanted: Degrees, tmp_path: Path
) -> None:
    sizes = ("--model.sizes.n_heads", "8", "--model.sizes.n_layers", "8", "--model.sizes.ffn_dim", "768")
    dp = ("--parallelism.data_parallel_replicate_degree", "1", "--parallelism.data_parallel_shard_degree", "2")
    config = load_config(["--job.config_file", str(ROOT / "recipes" / "llama_debug.toml"), *LONG, *sizes, *dp, *words])
    small, degrees, _ = shrink(config, degrees_of(config, {}), False, tmp_path)
    check(small, degrees)
    assert degrees == wanted


def test_changed_sizes_of_the_job_stay(tmp_path: Path) -> None:
    words = ("--model.sizes.norm_eps", "1e-3", "--model.sizes.dim", "512")
    config = load_config(["--job.config_file", str(ROOT / "recipes" / "llama_debug.toml"), *words])
    small, _, _ = shrink(config, degrees_of(config, {}), True, tmp_path)
    assert small.model.sizes["norm_eps"] == 1e-3
    assert small.model.sizes["dim"] == 64


def test_sizes_of_a_flavor_that_stay_are_not_written(tmp_path: Path) -> None:
    """A rule refuses a written n_shared of Mixtral, which Hugging Face's has not."""
    words = ["--model.name", "mixtral", "--model.flavor", "debug", "--model.sizes.dim", "512"]
    config = load_config(["--job.config_file", str(ROOT / "recipes" / "mixtral_debug.toml"), *words])
    small, _, _ = shrink(config, degrees_of(config, {}), True, tmp_path)
    whole = sizes(config.model)
    assert all(getattr(whole, name) != value for name, value in small.model.sizes.items())


UNEVEN = ("--parallelism.tensor_parallel_degree", "4", "--parallelism.context_parallel_degree", "8")


@pytest.mark.parametrize(
    ("recipe", "words", "ranks", "said"),
    [
        ("llama_debug", ("--validation.no_enable", "--averages.ema_decay", "0.9"), 2, "the average of the weights"),
        ("granite_8b", (*UNEVEN, "--training.local_batch_size", "1"), 64, "a vocabulary that tp divides unevenly"),
    ],
)
def test_a_small_job_is_accepted_and_says_what_it_lacks(
    recipe: str, words: tuple[str, ...], ranks: int, said: str, tmp_path: Path
) -> None:
    """Averages that only checkpoints use, and an odd vocabulary that the small ranks cannot share."""
    words = (*words, "--training.global_batch_size", "16")
    config = load_config(["--job.config_file", str(ROOT / "recipes" / f"{recipe}.toml"), *words])
    small, degrees, notes = shrink(config, degrees_of(config, {"NGPU": str(ranks)}), False, tmp_path)
    check(small, degrees)
    assert said in notes


def test_a_number_of_ranks_that_is_none_is_refused() -> None:
    config = load_config(["--job.config_file", str(ROOT / "recipes" / "llama_debug.toml")])
    with pytest.raises(ConfigError, match='NGPU = "x": expected an integer'):
        degrees_of(config, {"NGPU": "x"})


@pytest.mark.parametrize(("environment", "ranks"), [({"NGPU": "2"}, 2), ({"NGPU": "2", "NNODES": "2"}, 4), ({}, 1)])
def test_a_proof_is_of_the_ranks_that_a_start_would_have(environment: dict[str, str], ranks: int) -> None:
    recipe = str(ROOT / "recipes" / "llama_debug.toml")
    config = load_config(["--job.config_file", recipe, "--training.local_batch_size", "1"])
    assert degrees_of(config, environment).world_size == ranks


def test_a_job_that_a_rule_refuses_is_refused_with_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--job.config_file", str(ROOT / "recipes" / "llama_debug.toml"), "--parallelism.tensor_parallel_degree"]
    assert main([*given, "3"]) == 2
    assert "parallelism.tensor_parallel_degree = 3" in capsys.readouterr().err


def proof(
    gradients: dict[str, Tensor], apart: list[str], outputs: dict[str, tuple[float, float]], loss: float
) -> Proof:
    weights = {name: torch.ones_like(each) for name, each in gradients.items()}
    seen = Observation(weights, gradients, weights, [loss], [[1.0]], {"1": ["a"]}, 0.0)
    return Proof(seen, outputs, apart)


GRADIENTS = {
    "layers.0.attention.wo.weight": torch.tensor([1.0, 2.0, -3.0]),
    "layers.1.attention.wo.weight": torch.tensor([0.5, 1.0, 4.0]),
    "norm.weight": torch.tensor([2.0, -1.0, 1.0]),
}
OUTPUTS = {"layers.0.attention.wo": (10.0, 4.0), "norm": (8.0, 2.0)}


@pytest.mark.parametrize(
    ("name", "factor", "apart", "said"),
    [
        ("norm.weight", 0.5, False, "an average over tp where a sum belongs"),
        ("norm.weight", 2.0, False, "tp ranks add up what is complete"),
        ("norm.weight", 0.7, False, "another divisor"),
        ("norm.weight", 0.0, False, "nothing reaches the gradient"),
        ("layers.1.attention.wo.weight", 0.4, True, "an all-reduce over tp is missing"),
    ],
)
def test_a_wrong_gradient_has_its_likely_cause(name: str, factor: float, apart: bool, said: str) -> None:
    one = proof(GRADIENTS, [], OUTPUTS, 2.0)
    many = proof(GRADIENTS | {name: GRADIENTS[name] * factor}, [name] * apart, OUTPUTS, 2.0)
    lines = "\n".join(diagnose(many, one, 2, "tp"))
    assert said in lines
    assert name in lines
    assert f"off by {abs(factor - 1):.1e} on tp" in lines


def test_the_first_wrong_output_is_named_if_the_loss_is_wrong() -> None:
    one = proof(GRADIENTS, [], OUTPUTS, 2.0)
    wrong = {name: each * 1.5 for name, each in GRADIENTS.items()}
    # Both ranks hold the norm's output, and each a partial sum of the other module's.
    many = proof(wrong, [], {"layers.0.attention.wo": (14.0, 4.4), "norm": (19.0, 11.0)}, 2.1)
    lines = "\n".join(diagnose(many, one, 2, "tp"))
    assert "wrong          layers.*.attention.wo.weight" in lines
    assert "a partial sum over tp is not added up" in lines


def test_other_tokens_weights_and_updates_are_told_apart() -> None:
    one = proof(GRADIENTS, [], OUTPUTS, 2.0)
    read = replace(one, observation=replace(one.observation, sequences={"1": ["b"]}))
    assert "the tokens" in diagnose(read, one, 2, "tp")[0]
    started = {**one.observation.first_weights, "norm.weight": torch.zeros(3)}
    begun = replace(one, observation=replace(one.observation, first_weights=started))
    assert "norm.weight at step 0" in diagnose(begun, one, 2, "tp")[0]
    updated = replace(one, observation=replace(one.observation, weights=started))
    assert "norm.weight: weights off by 1.0e+00; the update" in diagnose(updated, one, 2, "tp")[0]


def test_a_replayed_token_is_found_among_tokens_of_nearly_the_same_scores() -> None:
    scores = 0.5 + torch.arange(64)[:, None] * 1e-5 + torch.zeros(64, 8)
    routers = [Router(cast(MixtureConfig, MODELS["mixtral"][1]["debug"])) for _ in range(2)]
    one, other = (SimpleNamespace(stages=[nn.ModuleDict({"router": router})], step=1) for router in routers)
    chosen = [torch.rand(64, 8).topk(2).indices.sort(-1).values for _ in routers]
    for router, each in zip(routers, chosen, strict=True):
        vars(router)["choose"] = lambda scores, each=each: each[: len(scores)]
    known = watch(one, None)
    routers[0].choose(scores)
    seen = watch(other, known)
    assert routers[1].choose(scores + 1e-6).equal(chosen[0])
    assert seen.flips == (chosen[0] != chosen[1]).any(1).sum()
    assert routers[1].choose(scores[:0]).shape == (0, 2)


@dataclass(frozen=True)
class Plant:
    """A fault in a file, the parameter that it makes wrong, and the axes that are wrong alone."""

    recipe: str
    file: str
    old: str
    new: str
    named: str
    cause: str
    words: tuple[str, ...] = ()
    axis: str = "tp"


WHOLE = ("--parallelism.sequence_parallel", "false")
LOSE_SUM = "RowwiseParallel(output_layouts=__import__('torch').distributed.tensor.Partial())"
TWICE = """\
    class Twice(type(plan["layers.*.attention.wo"])):
        def _apply(self, module, device_mesh):
            super()._apply(module, device_mesh)
            module.register_forward_hook(lambda module, _, output: output + module.bias.to_local())
            return module

    plan["layers.*.attention.wo"] = Twice(output_layouts=plan["layers.*.attention.wo"].output_layouts[0])
    return plan
"""
LLAMA, TENSOR, PALM = "parallelize/llama.py", "parallelize/tensor.py", "parallelize/palm.py"
MISSING, NOT_ADDED = "an all-reduce over tp is missing", "a partial sum over tp is not added up"
WO = '        "layers.*.attention.wo": RowwiseParallel(output_layouts=hidden),\n'
PLANTS = {
    "left out": Plant("llama_debug", LLAMA, WO, "", "layers.0.attention.wo.weight", "the tensor parallel plan has no"),
    "rowwise sum": Plant(
        "llama_debug",
        LLAMA,
        'w2": RowwiseParallel(output_layouts=hidden)',
        f'w2": {LOSE_SUM}',
        "layers.*.feed_forward.w2.weight",
        NOT_ADDED,
        WHOLE,
    ),
    "norm": Plant("llama_debug", LLAMA, '.ffn_norm": norm', '.ffn_norm": Replicated()', "ffn_norm.weight", MISSING),
    "last norm": Plant("llama_debug", LLAMA, '"norm": norm', '"norm": Replicated()', " norm.weight", MISSING),
    "one key head": Plant(
        "llama_debug",
        TENSOR,
        "name: partial_sum(getattr(module, name))",
        "name: getattr(module, name).to_local()",
        "attention.w",
        MISSING,
        ("--model.sizes.n_kv_heads", "1"),
    ),
    "norm of heads": Plant(
        "qwen3_debug",
        "parallelize/qwen3.py",
        '"layers.*.attention.[qk]_norm": per_head',
        '"layers.*.attention.[qk]_norm": __import__("parallelize.tensor").tensor.Replicated()',
        "_norm.weight",
        MISSING,
    ),
    "norm over heads": Plant(
        "olmo2_debug",
        TENSOR,
        "partial_sum(part.redistribute(placements=[Replicate()]))",
        "squares",
        "layers.*.attention.q_norm.weight",
        "over tp",
    ),
    "sinks": Plant(
        "gpt_oss_debug",
        TENSOR,
        "partial_sum(module.weight).chunk",
        "module.weight.to_local().chunk",
        "sinks.weight",
        MISSING,
    ),
    "latents": Plant(
        "deepseek_v3_debug",
        TENSOR,
        "partial_sum(x_BSD), partial_sum(module.weight)",
        "partial_sum(x_BSD), module.weight.to_local()",
        "attention.",
        MISSING,
    ),
    "own family: norm": Plant(
        "palm_debug",
        PALM,
        "    return plan\n",
        '    plan["layers.*.attention_norm"] = __import__("parallelize.tensor").tensor.Replicated()\n    return plan\n',
        "layers.*.attention_norm.weight",
        MISSING,
    ),
    "own family: sum": Plant(
        "palm_debug",
        PALM,
        "    return plan\n",
        "    from torch.distributed.tensor.parallel import RowwiseParallel\n"
        f'    plan["layers.*.attention.wo"] = {LOSE_SUM}\n    return plan\n',
        "layers.*.attention.wo.weight",
        NOT_ADDED,
        WHOLE,
    ),
    "own family: bias": Plant(
        "palm_debug",
        PALM,
        "    return plan\n",
        TWICE,
        "layers.*.attention.wo.bias",
        "each tp rank adds the whole bias",
        ("--model.sizes.output_bias", "true"),
    ),
    "average": Plant(
        "llama_debug",
        "parallelize/data.py",
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0)",
        "output.weight",
        "an average over dp_shard where a sum belongs",
        axis="dp_shard",
    ),
    "micro-batches": Plant(
        "llama_debug",
        "parallelize/pipeline.py",
        '"scale_grads": False',
        '"scale_grads": True',
        "output.weight",
        "every gradient is about x",
        axis="pp",
    ),
    "tied table": Plant(
        "qwen3_debug",
        "parallelize/pipeline.py",
        "        if last:\n            self._add_up_tables()",
        "",
        "tok_embeddings.weight",
        "no sum over pp",
        ("--model.sizes.tie_embeddings", "true"),
        axis="pp",
    ),
    "ring": Plant(
        "llama_debug",
        "models/steps.py",
        "share = (logsumexp - together).exp()[..., None]",
        "share = 1.0",
        "layers.*.attention.wo.weight",
        "without their shares of the softmax",
        axis="cp",
    ),
    "positions": Plant(
        "llama_debug",
        "parallelize/context.py",
        "rank_order(tensor, 1, ranks, balanced).chunk",
        '(tensor if name == "positions" else rank_order(tensor, 1, ranks, balanced)).chunk',
        "the output of layers.*.attention.core",
        "positions, masks, keys or values of another part",
        axis="cp",
    ),
    "gradients of keys": Plant(
        "llama_debug",
        "parallelize/context.py",
        "to_local(grad_placements=[Partial()])",
        "to_local()",
        "layers.*.attention.wv.weight",
        "a part of the sum over cp is missing",
        ("--parallelism.context_parallel_method", "allgather_kv"),
        axis="cp",
    ),
    "tokens of experts": Plant(
        "deepseek_v3_debug",
        "parallelize/expert.py",
        'if mesh["holders"].size() > 1:\n        dist',
        "if False:\n        dist",
        "layers.*.feed_forward.router.bias",
        "tokens of experts are not counted over all ranks",
        axis="dp_shard tp",
    ),
    "adapter": Plant(
        "llama_debug_lora",
        TENSOR,
        "return partial_sum(tensor) if tensor.placements[0].is_replicate() else",
        "return tensor.to_local() if tensor.placements[0].is_replicate() else",
        "lora_B",
        MISSING,
    ),
}
_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


def two_axes(axis: str) -> list[str]:
    """Degrees of 2 for this axis and for another one."""
    other = "tp" if axis == "dp_shard" else "dp_shard"
    degrees = {name: 2 if name in (axis, other) else 1 for name in _DEGREES}
    words = [[f"--parallelism.{_DEGREES[name]}", str(degree)] for name, degree in degrees.items()]
    return ["--parallelism.data_parallel_replicate_degree", "1", *itertools.chain(*words)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "repository"
    copy_repository(copy)
    for path, content in files_of_the_page().items():
        (copy / path).write_text(content)
    return copy


@pytest.fixture
def planted(repository: Path, request: pytest.FixtureRequest) -> Iterator[Plant]:
    plant: Plant = request.param
    file = repository / plant.file
    before = file.read_text()
    assert before.count(plant.old) == 1
    file.write_text(before.replace(plant.old, plant.new))
    yield plant
    file.write_text(before)


def prove(repository: Path, recipe: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "components.commands.start", "--prove"]
    command += ["--job.config_file", f"recipes/{recipe}.toml", *words]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("planted", PLANTS.values(), ids=PLANTS.keys(), indirect=True)
def test_a_planted_fault_is_found_and_named(repository: Path, planted: Plant) -> None:
    code, said = prove(repository, planted.recipe, *two_axes(planted.axis.split()[0]), *planted.words)
    assert code == 1, said
    assert planted.named in said
    assert planted.cause in said
    axes = set(re.findall(r"axis +(\w+) alone", said))
    assert axes == {*planted.axis.split()}


def test_an_own_family_is_proven(repository: Path) -> None:
    code, said = prove(repository, "palm_debug", *two_axes("tp"))
    assert code == 0, said
    assert "the same run" in said


DIES = """

import os

_embed = Transformer.embed


def _dies(self, tokens):
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), 9)
    return _embed(self, tokens)


Transformer.embed = _dies
"""


@pytest.mark.slow
def test_a_killed_rank_is_no_verdict(repository: Path) -> None:
    file = repository / "models/llama.py"
    before = file.read_text()
    file.write_text(before + DIES)
    try:
        code, said = prove(repository, "llama_debug")
    finally:
        file.write_text(before)
    assert code == 5, said
    assert "no proof       rank 1 was killed by SIGKILL" in said


EACH = """\
import sys
from components.commands.prove import main

if __name__ == "__main__":
    for recipe in sys.argv[1:]:
        print(recipe, "ends with", main(["--job.config_file", recipe]), flush=True)
"""
PROVEN = ("qwen3_235b_a22b", "qwen3_8b_qlora")


def test_recipes_of_all_axes_are_proven(tmp_path: Path) -> None:
    """In one process, which imports torch once."""
    (tmp_path / "each.py").write_text(EACH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    recipes = [str(ROOT / "recipes" / f"{name}.toml") for name in PROVEN]
    command = [sys.executable, "-P", str(tmp_path / "each.py"), *recipes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert re.findall(r"^(\S+) ends with 0$", said, re.M) == recipes, said


def test_the_record_has_a_proof_of_every_recipe() -> None:
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert [row["recipe"] for row in rows] == [recipe.stem for recipe in RECIPES]
    assert {row["verdict"] for row in rows} == {"the same run"}
    assert max(row["seconds"] for row in rows) <= 120
