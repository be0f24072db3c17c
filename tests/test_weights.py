"""Weights from Hugging Face and back: the same bytes at every layout, and no rank reads or holds more than its own."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from components.commands.start import check_initial_weights
from components.config import ConfigError, Model, load_config, to_dict
from components.state import checkpoint, weights
from components.state.folder import chosen_model
from models import MODELS, meta_model, sizes
from models.moe import MixtureConfig
from parallelize.groups import gather
from parallelize.sharding import own_slice
from tests.harness import observe, rewrite
from tests.hub_uploads import taking_uploads
from tests.small import RECIPE, SMALL

transformers = pytest.importorskip("transformers")

PP = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "4")
TP = ("--parallelism.tensor_parallel_degree", "2")
BATCH = ("--training.local_batch_size", "8", "--training.global_batch_size", "48")
FAMILIES = ["llama long", "llama tiny_tied", "qwen3 tiny_tied", "qwen3_moe tiny", "gpt_oss tiny", "qwen2 tiny"]
FAMILIES += ["olmo2 tiny", "olmo3 tiny", "smollm3 tiny_tied", "granite tiny_tied"]
FAMILIES += ["deepseek_v3 tiny", "deepseek_v3 tiny_sigmoid", "mistral tiny", "gemma3 tiny_tied"]
FAMILIES += ["mixtral tiny", "glm4_moe tiny_sigmoid", "phi3 tiny"]
LAYOUTS = {"one": (1, ()), "fsdp 3": (3, ()), "fsdp 2, tp 2, pp 2": (8, (*TP, *PP))}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in bfloat16, as transformers saves them, in several files; named after the model.

    transformers makes routers of DeepSeek-V3 in float32, which the published files have in bfloat16.
    """
    name, flavor = request.param.split()
    path = tmp_path_factory.mktemp("hub") / f"{name} {flavor}"
    given = meta_model(Model(name=name, flavor=flavor)).hf_config() | {"pad_token_id": None}  # within the table
    config = transformers.AutoConfig.for_model(**given)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # in float32, as in the published files
            module.e_score_correction_bias = torch.linspace(-0.1, 0.1, module.num_experts)
    model.save_pretrained(path, max_shard_size="100KB")
    assert len([*path.glob("*.safetensors")]) > 2
    return path


def start_from(folder: Path, *more: str) -> tuple[str, ...]:
    name, flavor = folder.name.split()
    if isinstance(MODELS[name][1][flavor], MixtureConfig) and TP[0] in more:
        more = (*more, "--parallelism.expert_parallel_degree", "2")
    return (
        *("--model.name", name, "--model.flavor", flavor, "--checkpoint.enable", "true", *BATCH, *more),
        *("--checkpoint.initial_load_path", str(folder), "--checkpoint.initial_load_in_hf", "true"),
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def export(run: train.Run, checkpoint: Path, target: Path) -> list[str]:
    weights.FILE_BYTES = 100_000
    model = meta_model(run.config.model)
    try:
        weights.export(model, checkpoint, target, "assets/tokenizer", torch.bfloat16)
    except OSError as error:
        return gather(str(error))
    return []


def test_every_family_of_hugging_face_is_here() -> None:
    named = {name for name, (model_class, _) in MODELS.items() if model_class.hf_type}
    assert {family.split()[0] for family in FAMILIES} == named


@pytest.mark.parametrize("layout", LAYOUTS)
def test_import_and_export_keep_every_byte(folder: Path, layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    target = tmp_path / "exported"
    observe(
        *start_from(folder, *words),
        ranks=ranks,
        steps=0,
        folder=str(tmp_path / "run"),
        at_end=partial(export, checkpoint=tmp_path / "run" / "step-0", target=target),
    )
    assert {stat.S_IMODE(file.stat().st_mode) for file in target.glob("*.safetensors")} == {0o644}
    before, after = tensors(folder), tensors(target)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8)), name
    assert len([*target.glob("*.safetensors")]) > 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    assert all(tensor.equal(before[name]) for name, tensor in theirs.state_dict().items() if name in before)


def test_a_run_from_weights_is_the_same_at_every_layout(folder: Path, tmp_path: Path) -> None:
    def run(name: str, ranks: int, *words: str) -> Observation:
        return observe(*start_from(folder, *words), ranks=ranks, steps=3, folder=str(tmp_path / name))

    one = run("one", 1)
    assert max(abs(loss - 6.93) for loss in one.losses) < 0.2
    assert broken_bars(run("fsdp 2, tp 2", 4, *TP), one) == {}
    name, flavor = folder.name.split()
    fresh = observe("--model.name", name, "--model.flavor", flavor, steps=1)
    assert not fresh.first_weights["norm.weight"].equal(one.first_weights["layers.0.attention.wo.weight"])
    assert any(not fresh.first_weights[name].equal(tensor) for name, tensor in one.first_weights.items())


@pytest.mark.parametrize(
    ("flavor", "layout", "new_rows"),
    [("tiny", "fsdp 3", "step_0"), ("tiny", "fsdp 2, tp 2, pp 2", "mean"), ("tiny_tied", "fsdp 3", "step_0")],
)
def test_a_table_that_grows_has_the_rows_of_the_weights_and_new_ones(
    flavor: str, layout: str, new_rows: str, tmp_path: Path
) -> None:
    """As one process has. The new rows are those of a run without weights, or the mean of the others; exports too."""
    model = meta_model(Model(name="llama", flavor=flavor))
    config = transformers.AutoConfig.for_model(**model.hf_config())
    torch.manual_seed(0)
    path, exported = tmp_path / f"llama {flavor}", tmp_path / "exported"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    before, rows = load_file(path / "model.safetensors"), config.vocab_size
    grown = ("--model.sizes.vocab_size", str(rows + 5))
    assert sizes(chosen_model(to_dict(load_config(list(grown))))).vocab_size == rows + 5, "of run.json"
    wanted = (*grown, "--checkpoint.initial_load_new_rows", new_rows)
    job = ["--job.config_file", str(RECIPE), *SMALL, *start_from(path, *wanted)]
    check_initial_weights(load_config(job))
    no_row = [*job, "--model.sizes.vocab_size", str(rows)]
    with pytest.raises(ConfigError, match=r"initial_load_new_rows = .*: the folder has all rows of"):
        check_initial_weights(load_config(no_row))
    with pytest.raises(ConfigError, match=rf"model.embed_tokens.weight is \({rows}, 64\) there and \({rows + 5}, 64\)"):
        check_initial_weights(load_config([*job, "--lora.rank", "4"]))
    with pytest.raises(ConfigError, match=r"model.sizes.vocab_size = \d+: adapters would never train new rows"):
        check_initial_weights(load_config([*job, "--lora.rank", "4"]))
    ranks, words = LAYOUTS[layout]
    saves = partial(export, checkpoint=tmp_path / "run" / "step-0", target=exported)
    observe(*start_from(path, *words, *wanted), ranks=ranks, steps=0, folder=str(tmp_path / "run"), at_end=saves)
    after = tensors(exported)
    fresh = observe("--model.flavor", flavor, *grown, steps=1).first_weights
    for name in {"tok_embeddings.weight", "output.weight"} & fresh.keys():
        there = model.hf_name(name)
        assert after[there][:rows].equal(before[there].bfloat16())
        mean = before[there].double().mean(dim=0, keepdim=True).float().expand(5, -1)
        new = mean if new_rows == "mean" else fresh[name][rows:]
        assert after[there][rows:].equal(new.bfloat16())
    assert json.loads((exported / "config.json").read_text())["vocab_size"] == rows + 5
    assert not weights.check_weights(meta_model(Model(flavor=flavor, sizes={"vocab_size": rows + 5})), exported)


def test_each_rank_reads_what_it_keeps_and_holds_one_tensor_more(tmp_path: Path) -> None:
    """Rows and columns are both split here, by tensor parallel, shards and stages."""
    model = meta_model(Model(name="llama", flavor="wide"))
    torch.manual_seed(0)
    path = tmp_path / "llama wide"
    path.mkdir()
    shapes = {model.hf_name(name): parameter.shape for name, parameter in model.named_parameters()}
    save_file(
        {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path / "one.safetensors"
    )
    observed = observe(
        *start_from(path, *TP, *PP),
        ranks=8,
        steps=0,
        folder=str(tmp_path / "run"),
        mutate=_count_reads,
        at_end=_reads_of_all_ranks,
    )
    largest = max(shape.numel() for shape in shapes.values())
    total = sum(shape.numel() for shape in shapes.values())
    kept = 0
    for read, held, grown in observed.extra:
        kept += held
        assert read <= 1.1 * held
        assert grown <= 4 * largest, f"{grown / 2**20:.1f} MiB beside the shards"
    assert kept >= total


READS: dict[str, float] = {"elements": 0, "grown": 0.0}


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _count_reads() -> None:
    read, load = weights.Folder.read, checkpoint.load_weights

    def counted(self: weights.Folder, *arguments: Any) -> Tensor:
        tensor = read(self, *arguments)
        READS["elements"] += tensor.numel()
        return tensor

    def watched(*arguments: Any) -> None:
        before, done = _anonymous_bytes(), threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                READS["grown"] = max(READS["grown"], _anonymous_bytes() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        load(*arguments)
        READS["grown"] = max(READS["grown"], _anonymous_bytes() - before)
        done.set()
        thread.join()

    vars(checkpoint)["load_weights"] = watched
    weights.Folder.read = counted  # type: ignore[method-assign, assignment]


def _reads_of_all_ranks(run: train.Run) -> list[tuple[float, int, float]]:
    held = sum(own_slice(parameter)[0].numel() for parameter in run.parameters)
    return gather((READS["elements"], held, READS["grown"]))


def check(folder: Path, *more: str) -> list[str]:
    try:
        check_initial_weights(load_config(["--job.config_file", str(RECIPE), *SMALL, *start_from(folder, *more)]))
    except ConfigError as error:
        return list(error.messages)
    return []


def test_a_head_beside_the_embedding_it_is_tied_to_is_taken_if_it_is_equal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files of models with tied weights hold the table twice."""
    monkeypatch.setattr(weights, "_AT_ONCE", 1000)
    copy = tmp_path / folder.name
    copy.mkdir()
    every = tensors(folder)
    head = every["model.embed_tokens.weight"].clone()
    save_file({"lm_head.weight": head} | every, copy / "model.safetensors")
    assert check(copy) == []
    if not folder.name.endswith("_tied"):
        return
    head[-1, -1] += 1
    save_file(every | {"lm_head.weight": head}, copy / "model.safetensors")
    (said,) = check(copy)
    assert "lm_head.weight differs from model.embed_tokens.weight, to which this model ties it: " in said
    assert "tie_word_embeddings to false" in said
    save_file(every | {"lm_head.weight": head[:-1].clone()}, copy / "model.safetensors")
    assert "lm_head.weight differs" in check(copy)[0]


@pytest.mark.parametrize("tied", [True, False])
def test_names_of_a_compiled_and_of_a_base_model_are_read(tied: bool, tmp_path: Path) -> None:
    model = meta_model(Model(name="llama", flavor="tiny_tied" if tied else "tiny"))
    shapes = {model.hf_name(name): parameter.shape for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    right = {name: torch.randn(shape) for name, shape in shapes.items()}

    def save(rename: Callable[[str], str], **more: Tensor) -> None:
        save_file({rename(name): tensor for name, tensor in right.items()} | more, tmp_path / "model.safetensors")

    compiled: Callable[[str], str] = "_orig_mod.{}".format
    for rename in (
        compiled,
        partial(re.sub, r"(layers\.\d+\.)", r"\1_orig_mod."),
        lambda name: name.removeprefix("model."),
    ):
        save(rename)
        weights.check_weights(model, tmp_path)
        folder = weights.Folder(tmp_path)
        assert all(folder.read(name, tuple(map(slice, each.shape))).equal(each) for name, each in right.items())
    save(compiled, **{"model.norm.weight": torch.ones(64)})
    with pytest.raises(ConfigError, match=r"model.norm.weight is there with and without _orig_mod"):
        weights.Folder(tmp_path)
    lost = right.pop("model.embed_tokens.weight" if tied else "lm_head.weight")
    save(lambda name: name)
    assert misfits(model, tmp_path) == [f"{'model.embed_tokens' if tied else 'lm_head'}.weight is missing"]
    save("module.{}".format, a=lost)
    assert misfits(model, tmp_path) == [
        "holds no tensor of this model by its name: model.embed_tokens.weight is a name here, a one there"
    ]


def misfits(model: Any, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        weights.check_weights(model, folder)
    return [message.removeprefix(f"{folder}: ") for message in caught.value.messages]


def test_only_a_table_of_tokens_may_have_fewer_rows(tmp_path: Path) -> None:
    """Also where nothing has compared the shapes before."""
    model = meta_model(Model(name="llama", flavor="tiny")).to_empty(device="cpu")
    for lost in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        shapes[lost][0] -= 1
        tensors_of_it = {model.hf_name(name): torch.ones(shape) for name, shape in shapes.items()}
        save_file(tensors_of_it, tmp_path / "model.safetensors")
        if lost in weights.TABLES:
            weights._fill([model], weights.Folder(tmp_path))
        else:
            with pytest.raises(RuntimeError, match="must match the size"):
                weights._fill([model], weights.Folder(tmp_path))


def test_many_misfits_of_one_kind_are_counted(tmp_path: Path) -> None:
    small, other = (meta_model(Model(name="llama", flavor=flavor)) for flavor in ("tiny", "tiny_wide"))
    shapes = {other.hf_name(name): parameter.shape for name, parameter in other.named_parameters()}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    said = misfits(small, tmp_path)
    assert len(said) == 8
    assert said[-1] == f"and {len(shapes) - 7} more like this"


def test_all_that_is_not_read_is_said(tmp_path: Path) -> None:
    """Also that two files may be meant."""
    model = meta_model(Model(name="deepseek_v3", flavor="tiny_sigmoid"))
    parts = [part for name, each in model.named_parameters() for part in weights._pieces(model, name, each)]
    every = {part.name: torch.ones(piece.shape) for part, piece in parts}
    save_file(every, tmp_path / "model.safetensors")
    assert weights.left_out(model, tmp_path) == ""
    behind = f"model.layers.{model.config.n_layers}.eh_proj.weight"
    every |= {behind: torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    (tmp_path / "model.safetensors").unlink()
    save_file(every, tmp_path / "one.safetensors")
    save_file({"more": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(every, "one.safetensors")}))
    weights.check_weights(model, tmp_path)
    assert weights.left_out(model, tmp_path) == (
        "; not read: 2 tensors that the model does without, such as model.layers.0.self_attn.rotary_emb.inv_freq; "
        "consolidated.safetensors, which the index does not name"
    )
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model.safetensors and {index.name}, which does not name it: remove one"):
        weights.Folder(tmp_path)


def test_all_that_does_not_fit_is_named_at_once(folder: Path, tmp_path: Path) -> None:
    assert check(folder) == []
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    every = tensors(folder)
    every["model.norm.weight"] = torch.ones(3)
    every["model.new.weight"] = every.pop("model.layers.0.self_attn.o_proj.weight")
    every["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    for file in copy.glob("model*"):
        file.unlink()
    save_file(every, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    config |= {"rms_norm_eps": 0.5, "model_type": "new", "max_position_embeddings": 7}
    (copy / "config.json").write_text(json.dumps(config))
    found = check(copy)
    assert all(line.startswith(f"checkpoint.initial_load_path: {copy}: ") for line in found)
    name, flavor = folder.name.split()
    ours = meta_model(Model(name=name, flavor=flavor))
    assert [line.removeprefix(f"checkpoint.initial_load_path: {copy}: ") for line in found] == [
        "model.layers.0.self_attn.o_proj.weight is missing",
        f"model.norm.weight is (3,) there and ({ours.config.dim},) here",
        "model.new.weight is not in this model",
        # The amplitude of longrope follows from this length.
        *(["config.json: max_position_embeddings is 7 there and 2048 here"] if name == "phi3" else []),
        f"config.json: rms_norm_eps is 0.5 there and {ours.config.norm_eps} here",
        f"config.json: model_type is new there and {ours.hf_type} here",
    ]


def broken_folders(folder: Path) -> Iterator[tuple[str, str]]:
    yield "nothing", "No such file"
    (folder / "empty").mkdir()
    yield "empty", "no .safetensors file"
    shutil.copytree(folder / "good", folder / "torn")
    file = next((folder / "torn").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    yield "torn", "torn"
    shutil.copytree(folder / "good", folder / "lost")
    next((folder / "lost").glob("*.safetensors")).unlink()
    yield "lost", "No such file"


def test_a_folder_that_cannot_be_read_is_one_mistake(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "good")
    for name, reason in broken_folders(tmp_path):
        with pytest.raises(ConfigError, match=reason):
            weights.Folder(tmp_path / name)


def test_a_file_in_the_way_of_an_export_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write = partial(export, checkpoint=tmp_path, target=tmp_path / "file" / "x")
    said = observe(*BATCH, ranks=2, steps=1, at_end=write).extra
    assert len(said) == 2
    assert all("x could not be written: rank 0: " in line for line in said)


@pytest.mark.quick
def test_the_last_save_and_the_command_line_write_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through train.py and its own files, which reach the hub; transformers then has our logits."""
    words = (
        *(
            "--job.config_file",
            str(RECIPE),
            *SMALL,
            "--training.steps",
            "2",
            "--job.dump_folder",
            str(tmp_path / "run"),
        ),
        *("--checkpoint.enable", "true", "--checkpoint.last_save_in_hf", "true", "--model.flavor", "debug"),
        *("--checkpoint.hf_repo", "org/model"),
    )
    with taking_uploads(tmp_path / "hub") as (address, _):
        own = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}
        subprocess.run([sys.executable, "train.py", *words], check=True, capture_output=True, env={**os.environ, **own})
    command = [
        sys.executable,
        "-m",
        "components.state",
        "export",
        str(tmp_path / "run"),
        str(tmp_path / "again"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    first, again = tmp_path / "run" / "hugging_face", tmp_path / "again"
    assert {"README.md", "loss.png"} < {path.name for path in first.iterdir()}
    for path in first.iterdir():
        for other in (again, tmp_path / "hub/models/org/model"):
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name
    refused = subprocess.run([*command], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.strip()) == (2, f"{again}: is there already")
    refused = subprocess.run([*command[:-1], str(tmp_path / "new"), "--step", "7"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "no good checkpoint of step 7. Steps there: 2" in refused.stderr

    ours = MODELS["llama"][0](MODELS["llama"][1]["debug"])
    weights._fill([ours], weights.Folder(first))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(first)
    text = "In the beginning God created the heaven and the earth."
    ids = transformers.AutoTokenizer.from_pretrained(first)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        right, logits = theirs(ids).logits, ours(ids)
    assert ((logits - right).norm() / right.norm()).item() < 1e-5
    with safe_open(first / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.slow
def test_a_wrong_slice_is_found(folder: Path, tmp_path: Path) -> None:
    """Each rank reading the beginning of every tensor: the bytes are no longer those of the folder."""
    plant = partial(rewrite, "components.state.weights", "_fill_one", "slice(first, first + size)", "slice(0, size)")
    observed = observe(
        *start_from(folder, *TP), ranks=2, steps=0, folder=str(tmp_path / "run"), mutate=plant
    ).first_weights
    name, flavor = folder.name.split()
    model, given = meta_model(Model(name=name, flavor=flavor)), tensors(folder)
    there = {name: given[theirs] for name in observed if (theirs := model.hf_name(name)) in given}
    wrong = [name for name, tensor in there.items() if not tensor.float().equal(observed[name])]
    assert len(wrong) > 5
