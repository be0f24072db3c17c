"""Files of runs with adapters: checkpoints without the base, and what becomes of another base."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from components.commands.figures import broken_bars
from components.commands.generate import build, open_source
from components.commands.observed import whole_weights
from components.commands.start import check_initial_weights
from components.config import ConfigError, Model, load_config, to_dict
from components.config.files import read_json, write_json
from components.state.__main__ import main
from components.state.adapters import check_adapters, export_adapters, merge
from components.state.base import hash_of_base, load_run, precisions
from components.state.checkpoint import Checkpointer
from components.state.weights import export
from models import meta_model
from models.parameters import is_adapter
from parallelize.groups import gather
from tests.harness import observe
from tests.small import RECIPE, SMALL

ADAPTED = ("--lora.rank", "4", "--checkpoint.enable", "true")
EP = ("--parallelism.expert_parallel_degree", "2")
TP = ("--parallelism.tensor_parallel_degree", "2")
PP = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "9")
FSDP = ("--training.local_batch_size", "18")


def saved_names(run: train.Run) -> set[str]:
    """The weights in a checkpoint of all ranks."""
    tensors = Checkpointer(Path(), run.config.checkpoint, run.stages, run.optimizer)._tensors(with_optimizer=False)
    return {name for names in gather([*tensors]) for name in names}


def base_of(run: train.Run) -> str:
    return hash_of_base(run.stages, run.mesh["pp"].get_group())


def test_a_checkpoint_has_adapters_and_not_the_base(tmp_path: Path) -> None:
    observed = observe(*ADAPTED, folder=str(tmp_path), at_end=saved_names)
    assert observed.extra == {f"model.{name}" for name in observed.gradients}
    size = sum(file.stat().st_size for file in (tmp_path / "step-3").glob("*.distcp"))
    assert size < sum(weight.nbytes for weight in observed.weights.values()) / 2


MOE = ("--model.name", "qwen3_moe")
BASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp": ((), TP),
    "pp": ((), PP),
    "fsdp": ((), FSDP),
    "tp, fsdp": ((), (*TP, *FSDP)),
    "experts, tp": (MOE, TP),
    "experts, tp, fsdp, ep": (MOE, (*TP, *FSDP, *EP)),
}


@pytest.mark.parametrize(("model", "layout"), BASES.values(), ids=BASES)
def test_the_hash_of_the_base_is_the_same_at_every_layout(model: tuple[str, ...], layout: tuple[str, ...]) -> None:
    ranks = 4 if layout[: len(TP) + len(FSDP)] == (*TP, *FSDP) else 2
    one = observe(*ADAPTED, *model, steps=1, at_end=base_of).extra
    assert observe(*ADAPTED, *model, *layout, ranks=ranks, steps=1, at_end=base_of).extra == one
    assert observe(*ADAPTED, *model, "--debug.seed", "1", steps=1, at_end=base_of).extra != one


@pytest.mark.parametrize(("model", "layout"), [((), ()), ((), TP), (MOE, (*TP, *EP))], ids=["one", "tp", "experts"])
def test_a_resumed_run_is_the_whole_one(model: tuple[str, ...], layout: tuple[str, ...], tmp_path: Path) -> None:
    words = (*ADAPTED, *model)
    whole = observe(*words, steps=4)
    first = observe(*words, *layout, ranks=1 + bool(layout), steps=2, folder=str(tmp_path))
    rest = observe(*words, steps=2, folder=str(tmp_path))
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert first.losses == pytest.approx(whole.losses[:2], rel=1e-6)


def test_a_resume_with_another_base_is_refused(tmp_path: Path) -> None:
    observe(*ADAPTED, steps=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match="adapters were trained on another base"):
        observe(*ADAPTED, "--debug.seed", "1", steps=1, folder=str(tmp_path))


def test_a_resume_of_a_whole_model_with_adapters_is_refused(tmp_path: Path) -> None:
    observe("--checkpoint.enable", "true", steps=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"all weights were trained, and lora.rank trains adapters: use another"):
        observe(*ADAPTED, steps=2, folder=str(tmp_path))


def test_a_resume_with_another_scale_is_refused(tmp_path: Path) -> None:
    """Export, merge and generation take it from the newest start: of all checkpoints there."""
    observe(*ADAPTED, steps=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"count 4 times, and 2 times in this run: look at lora.alpha"):
        observe(*ADAPTED, "--lora.use_rslora", "false", "--lora.alpha", "8", steps=1, folder=str(tmp_path))


def test_a_base_is_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    base = observe("--checkpoint.enable", "true", steps=2, folder=str(tmp_path / "base"))
    start = (*ADAPTED, "--checkpoint.initial_load_path", str(tmp_path / "base"))
    one = observe(*start, steps=2, folder=str(tmp_path / "one"))
    for name, weight in base.weights.items():
        assert torch.equal(one.weights[name], weight), name
    two = observe(*start, *TP, ranks=2, steps=2, folder=str(tmp_path / "two"))
    assert broken_bars(two, one) == {}
    again = observe(*start, steps=1, folder=str(tmp_path / "one"))
    assert torch.equal(again.weights["layers.0.attention.wq.weight"], base.weights["layers.0.attention.wq.weight"])


def loaded(run: train.Run, config: dict[str, Any], checkpoint: Path) -> float:
    """The largest difference of a run's weights from those that load_run gives."""
    model = meta_model(run.config.model, run.config.training.dtype).to_empty(device="cpu")
    load_run(model, config, checkpoint, precisions(model))
    weights = dict(run.stages[0].named_parameters())
    return max((each - weights[name]).abs().max().item() for name, each in model.named_parameters())


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
def test_generation_has_base_and_adapters(base: str, tmp_path: Path) -> None:
    flavor = ("--model.flavor", "tiny_wide")
    observe(*flavor, "--checkpoint.enable", "true", steps=2, folder=str(tmp_path / "base"))
    words = (*ADAPTED, *flavor, "--lora.base", base, "--checkpoint.initial_load_path", str(tmp_path / "base"))
    config = to_dict(load_config(["--job.config_file", str(RECIPE), *SMALL, *words]))
    check = partial(loaded, config=config, checkpoint=tmp_path / "run" / "step-2")
    assert observe(*words, steps=2, folder=str(tmp_path / "run"), at_end=check).extra == 0


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).float()


def exported(run: train.Run, folder: Path, base: Path) -> torch.Tensor:
    """Write run.json, and the base without adapters; then export and merge by the command, and return our logits."""
    write_json(folder / "run.json", {"config": to_dict(run.config)})
    weights = dict(whole_weights(run))
    model = meta_model(run.config.model).to_empty(device="cpu")
    model.load_state_dict(weights)
    plain = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    chosen = Model(name=run.config.model.name, flavor=run.config.model.flavor)
    export(meta_model(chosen), plain, base, run.config.model.hf_assets_path, torch.float32)
    with pytest.raises(ConfigError, match="adapters are written without a tokenizer"):
        main(["export", str(folder), str(folder / "peft"), "--tokenizer", "assets/tokenizer"])
    for words in (
        ["export", str(folder), str(folder / "peft")],
        ["merge", str(folder), "--to", str(folder / "merged")],
    ):
        assert main(words) == 0
    return logits(model, TOKENS)


TOKENS = torch.arange(3, 51).view(2, 24)
FILES = {
    "llama, fsdp 2 x tp 2, compiled": (
        4,
        ("--model.name", "llama", *TP, *FSDP, "--compile.enable", "true", "--compile.backend", "aot_eager"),
    ),
    "llama, nf4, fsdp 2": (
        2,
        ("--model.name", "llama", "--model.flavor", "tiny_wide", "--lora.base", "nf4", *FSDP),
    ),
    "qwen3, q and v": (1, ("--model.name", "qwen3", "--lora.target_modules", '["q_proj", "wv"]')),
    "qwen2, rslora, dropout": (1, ("--model.name", "qwen2", "--lora.use_rslora", "true", "--lora.dropout", "0.25")),
    "qwen3_moe, fsdp 2 x tp 2, ep 2": (4, ("--model.name", "qwen3_moe", *TP, *FSDP, *EP)),
    "deepseek_v3, tp 2, ep 2": (2, ("--model.name", "deepseek_v3", "--model.flavor", "tiny_sigmoid", *TP, *EP)),
    "deepseek_v2, rslora, without attention": (
        1,
        (*("--model.name", "deepseek_v3", "--lora.use_rslora", "true", "--lora.target_modules"), '["w1", "w2", "wo"]'),
    ),
    "qwen3_moe, experts alone": (1, ("--model.name", "qwen3_moe", "--lora.target_modules", '["w1", "w2", "w3"]')),
    "mixtral, tp 2, ep 2": (2, ("--model.name", "mixtral", *TP, *EP)),
    "glm4_moe, tp 2, ep 2": (2, ("--model.name", "glm4_moe", *TP, *EP)),
    "phi3, fsdp 2 x tp 2": (4, ("--model.name", "phi3", *TP, *FSDP)),
    "phi3, rslora, parts of tensors": (
        1,
        (
            *("--model.name", "phi3", "--lora.use_rslora", "true"),
            "--lora.target_modules",
            '["wq", "wv", "w3", "o_proj"]',
        ),
    ),
    "gpt_oss, fsdp 2, ep 2": (2, ("--model.name", "gpt_oss", *FSDP, *EP)),
    "gpt_oss, rslora, gate and up": (
        1,
        (*("--model.name", "gpt_oss", "--lora.use_rslora", "true", "--lora.target_modules"), '["gate_up_proj", "wk"]'),
    ),
}


@pytest.mark.parametrize(("ranks", "words"), FILES.values(), ids=FILES)
def test_peft_and_transformers_have_our_logits(
    ranks: int, words: tuple[str, ...], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    checkpoints = tmp_path / "checkpoint"
    options: dict[str, Any] = {"ranks": ranks, "steps": 2, "folder": str(checkpoints)}
    settings = (*ADAPTED, "--lora.alpha", "24", *words, "--job.dump_folder", str(tmp_path))
    observed = observe(*settings, **options, at_end=partial(exported, folder=tmp_path, base=tmp_path / "base"))
    ours = observed.extra
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    recwarn.clear()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    said = [str(each.message) for each in recwarn if not issubclass(each.category, FutureWarning)]
    # Of patterns that match a parameter alone PEFT says that it ignores them; it does not.
    assert [line for line in said if "pattern keys did not match any targeted module" not in line] == []
    assert len(said) == 2 * ('["w1", "w2", "w3"]' in words)
    found = theirs(TOKENS).logits
    assert (found - ours).norm() <= 1e-5 * ours.norm()
    assert theirs.peft_config["default"].lora_dropout == (0.25 if "--lora.dropout" in words else 0)
    with theirs.disable_adapter():
        assert (theirs(TOKENS).logits - ours).norm() > 1e-3 * ours.norm()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (whole(TOKENS).logits - ours).norm() <= 1e-5 * ours.norm()
    theirs.save_pretrained(tmp_path / "saved")
    start = (*settings, "--lora.initial_load_path", str(tmp_path / "saved"))
    check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start]))
    began = observe(*start, ranks=ranks, steps=0, folder=str(tmp_path / "began")).first_weights
    for name in observed.gradients:
        assert torch.equal(began[name], observed.weights[name]), name
    with pytest.raises(ConfigError, match=r"rank = 4 there and 8 here"):
        check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start, "--lora.rank", "8"]))


def as_peft(run: train.Run, folder: Path) -> None:
    export_adapters(to_dict(run.config), folder / "step-1", folder / "peft", torch.float32)


def test_adapters_of_experts_that_are_others_there_are_refused(tmp_path: Path) -> None:
    """Gate and up that share a rank; and another alpha of both."""
    words = (*ADAPTED, *MOE)
    observe(*words, steps=1, folder=str(tmp_path), at_end=partial(as_peft, folder=tmp_path))
    path, config = tmp_path / "peft", load_config(["--job.config_file", str(RECIPE), *SMALL, *words])
    check = partial(check_adapters, meta_model(config.model), config.model.lora, path)
    check()
    described = read_json(path / "adapter_config.json")
    for patterns in ({".*gate_up_proj": 16.0}, {}):
        write_json(path / "adapter_config.json", described | {"alpha_pattern": patterns})
        with pytest.raises(ConfigError, match=rf"gate_up_proj is {patterns.get('.*gate_up_proj', 16.0)} there and 32"):
            check()
    write_json(path / "adapter_config.json", described | {"alpha_pattern": {r".*\.gate_up_proj": 32}})
    check()
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"][0, -1] = 1.0
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(
        ConfigError, match=r"layers.1.mlp.experts.base_layer.lora_B.weight has ranks that its matrices share"
    ):
        check()


def test_adapters_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    """Each of these PEFT loads without a word; what it computes then is not W + scale B A of the same W."""
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *ADAPTED])
    observe(*ADAPTED, steps=1, folder=str(tmp_path), at_end=partial(as_peft, folder=tmp_path))
    path, model = tmp_path / "peft", meta_model(config.model)
    described = read_json(path / "adapter_config.json")
    write_json(path / "adapter_config.json", described | {"init_lora_weights": "orthogonal"})
    check_adapters(model, config.model.lora, path)
    for key, value, said in (
        ("init_lora_weights", "pissa_niter_4", "= pissa_niter_4: the base is another too: save with PEFT's path_init"),
        ("init_lora_weights", "olora", "= olora: the base is another too"),
        ("alora_invocation_tokens", [3], "is not available"),
    ):
        write_json(path / "adapter_config.json", described | {key: value})
        with pytest.raises(ConfigError, match=f"{key} ?{said}"):
            check_adapters(model, config.model.lora, path)


def used_with_another(run: train.Run, folder: Path) -> None:
    """Merge adapters onto another base than their own, then generate with it."""
    config = to_dict(run.config)
    other = config | {"debug": config["debug"] | {"seed": 1}}
    with pytest.raises(ConfigError, match="trained on another base"):
        merge(other, folder / "step-1", folder / "merged", torch.float32)
    (folder / "checkpoint").mkdir()
    (folder / "step-1").rename(folder / "checkpoint" / "step-1")
    write_json(folder / "run.json", {"config": other})
    with pytest.raises(ConfigError, match="trained on another base"):
        build(open_source(folder, None), run.device, torch.float32)


def test_adapters_are_not_used_with_another_base(tmp_path: Path) -> None:
    observe(*ADAPTED, steps=1, folder=str(tmp_path), at_end=partial(used_with_another, folder=tmp_path))


def as_folder(run: train.Run, path: Path) -> None:
    export(meta_model(run.config.model), whole_weights(run), path, run.config.model.hf_assets_path, torch.float32)


def test_weights_of_before_and_of_after_a_stretching_are_accepted(tmp_path: Path) -> None:
    stretched = ("--model.rope_scaling.rope_type", "yarn", "--model.rope_scaling.factor", "4")
    for name, words in (("before", ()), ("after", stretched)):
        observe(*words, steps=0, at_end=partial(as_folder, path=tmp_path / name))
        start = ("--checkpoint.initial_load_path", str(tmp_path / name), "--checkpoint.initial_load_in_hf", *stretched)
        config = load_config(["--job.config_file", str(RECIPE), *SMALL, *start])
        check_initial_weights(config)
    with pytest.raises(ConfigError, match=r"rope_scaling is {.*'factor': 4.0.*} there and {.*'factor': 8.0"):
        check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start[:-1], "8"]))


def test_a_base_is_a_folder_of_hugging_face(tmp_path: Path) -> None:
    base = observe(steps=1, at_end=partial(as_folder, path=tmp_path / "base"))
    words = (*ADAPTED, "--checkpoint.initial_load_path", str(tmp_path / "base"), "--checkpoint.initial_load_in_hf")
    check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *words]))
    one = observe(*words, steps=2, folder=str(tmp_path / "one"))
    for name, weight in base.weights.items():
        assert torch.equal(one.weights[name], weight), name
    assert all(one.first_weights[name].any() for name in one.gradients)
    assert broken_bars(observe(*words, *TP, ranks=2, steps=2, folder=str(tmp_path / "two")), one) == {}
