"""Text from a checkpoint: what the cache changes (nothing), what transformers says, and what chance may choose."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import train
from components.commands import generate as generation
from components.commands.generate import build, check_ranks, continue_text, generate, open_source, sample
from components.config import ROOT, Checkpoint, ConfigError, JobConfig, Model, to_dict
from components.data.tokenizer import Tokenizer, load_tokenizer
from components.state import __main__ as state
from components.state.adapters import export_run
from components.state.checkpoint import Checkpointer, write_json
from components.state.init import initialize_weights
from components.state.weights import export
from models import MODELS, meta_model
from parallelize.groups import gather
from tests.harness import observe
from tests.ranks import group_of_one

transformers = pytest.importorskip("transformers")

PROMPT = "In the beginning God created the heaven and the earth."
CPU = torch.device("cpu")
one_family = pytest.mark.parametrize("saved", ["qwen3"], indirect=True)


@pytest.fixture(scope="module", autouse=True)
def _a_group_of_one() -> Iterator[None]:
    with group_of_one():
        yield


@dataclass
class Saved:
    """One model three times: in memory, as a run's dump_folder, and exported."""

    model: nn.Module
    run: Path
    exported: Path


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Grouped queries; qwen3's and gemma3's are tied, the latter has windows. Weights are large: tokens differ."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    model_class, flavors = MODELS[name]
    model = model_class(flavors["debug"])
    initialize_weights(model, model.init_std, seed=0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "layers" in parameter_name and "norm" not in parameter_name:
                parameter.mul_(5)
            elif "post_norm" in parameter_name:
                parameter.add_(4)
    run, config = folder / "run", JobConfig(model=Model(name=name))
    optimizer = torch.optim.SGD(model.parameters())
    Checkpointer(run / "checkpoint", Checkpoint(), [model], optimizer).save(7, {}, model_only=True)
    write_json(run / "run.json", {"config": to_dict(config)})
    whole = meta_model(Model(name=name, flavor="debug"))
    export(whole, run / "checkpoint" / "step-7", folder / "exported", "assets/tokenizer", torch.float32)
    return Saved(model, run, folder / "exported")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tokenizer]:
    source = open_source(folder, None)
    return build(source, CPU, dtype), load_tokenizer(source.tokenizer)


def text(folder: Path, prompt: str = PROMPT, count: int = 30, **sampling: Any) -> str:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 1} | sampling
    return "".join(continue_text(*load(folder), prompt, count, **sampling))


@torch.no_grad()
def logits_of_whole_prefixes(model: nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[Tensor]]:
    """Greedy, with all tokens passed through the model for each."""
    tokens, seen = [*prompt], []
    for _ in range(count):
        seen.append(model(torch.tensor([tokens]))[0, -1])
        tokens.append(int(seen[-1].argmax()))
    return tokens[len(prompt) :], seen


@pytest.mark.parametrize("source", ["run", "exported"])
def test_with_the_cache_tokens_are_those_of_whole_prefixes(
    saved: Saved, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a prompt in pieces, and over the length at which attention takes another kernel."""
    monkeypatch.setattr(generation, "_CHUNK_TOKENS", 100)
    prompt = torch.randint(0, 4096, (245,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens, right = logits_of_whole_prefixes(saved.model, prompt, 20)
    model, _ = load(getattr(saved, source))
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> int:
        seen.append(logits)
        return int(logits.argmax())

    assert [*islice(generate(model, prompt, choose), 20)] == tokens
    assert len(set(tokens)) > 10
    for ours, theirs in zip(seen, right, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5
    assert [*islice(generate(model, prompt, choose), 20)] == tokens, "a second prompt begins with an empty cache"


def test_tokens_are_those_of_transformers(saved: Saved) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved.exported, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(saved.exported)(PROMPT, return_tensors="pt")["input_ids"]
    right = theirs.generate(ids, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(ids))
    model, tokenizer = load(saved.exported)
    assert ids[0].tolist() == [tokenizer.bos_id, *tokenizer.encode(PROMPT)]
    greedy = generate(model, ids[0].tolist(), lambda logits: int(logits.argmax()))
    assert [*islice(greedy, 40)] == right[0, ids.shape[1] :].tolist()


def test_a_config_json_that_transformers_has_written_is_the_same_model(saved: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved.exported, tmp_path / "newer")
    transformers.AutoConfig.from_pretrained(saved.exported).save_pretrained(tmp_path / "newer")
    assert "rope_theta" not in json.loads((tmp_path / "newer" / "config.json").read_text())
    assert open_source(tmp_path / "newer", None).model.config == open_source(saved.exported, None).model.config


def _texts_of_ranks(run: train.Run, folder: Path) -> list[tuple[str, str, int]]:
    model, tokenizer = load(folder)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    texts = ["".join(continue_text(model, tokenizer, PROMPT, 30, heat, 0.9, 1)) for heat in (0.0, 0.8)]
    return gather((*texts, held))


def test_two_ranks_say_what_one_does(saved: Saved) -> None:
    layout = ("--parallelism.tensor_parallel_degree", "2")
    said = observe(*layout, ranks=2, steps=0, at_end=partial(_texts_of_ranks, folder=saved.run)).extra
    whole = sum(parameter.numel() for parameter in saved.model.parameters())
    for greedy, drawn, held in said:
        assert greedy == text(saved.run, temperature=0.0)
        assert drawn == text(saved.run)
        assert held < 0.51 * whole


@pytest.mark.quick
@one_family
def test_the_command_line_on_one_rank_and_on_two(saved: Saved) -> None:
    words = [
        "-m",
        "components.generate",
        str(saved.exported),
        PROMPT,
        "And",
        "--tokens",
        "20",
        "--top-p",
        "0.9",
    ]
    words += ["--seed", "3"]
    right = [f"{prompt}{text(saved.exported, prompt, 20, seed=3)}" for prompt in (PROMPT, "And")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher in ([], torchrun):
        done = subprocess.run([sys.executable, *launcher, *words], cwd=ROOT, capture_output=True, check=True)
        assert done.stdout.decode() == "\n\n".join(right) + "\n"


@one_family
def test_a_seed_decides_the_text(saved: Saved) -> None:
    assert text(saved.run) == text(saved.run)
    assert text(saved.run) != text(saved.run, seed=2)
    assert text(saved.run) != text(saved.run, temperature=0.5)
    assert text(saved.run, top_p=1e-6, temperature=5.0) == text(saved.run, temperature=0.0)
    assert text(saved.run, top_p=1.0, temperature=5.0) != text(saved.run, temperature=0.0)


@one_family
def test_bfloat16_is_nearly_the_same_model(saved: Saved) -> None:
    model, tokenizer = load(saved.run, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    seen: list[Tensor] = []
    prompt = tokenizer.encode(PROMPT)
    next(generate(model, prompt, lambda logits: seen.append(logits) or 0))  # type: ignore[func-returns-value]
    _, (right,) = logits_of_whole_prefixes(saved.model, prompt, 1)
    assert 1e-4 < ((seen[0] - right).norm() / right.norm()).item() < 0.1


@pytest.mark.parametrize(("temperature", "top_p", "kept"), [(1.0, 1.0, 6), (0.5, 1.0, 6), (1.5, 0.6, 3), (0.5, 0.9, 3)])
def test_tokens_are_drawn_as_often_as_is_likely(temperature: float, top_p: float, kept: int) -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0])
    right = torch.softmax(logits / temperature, dim=0)
    least = right.sort(descending=True).values[kept - 1]
    assert right[right > least].sum() < top_p <= right[right >= least].sum() + 1e-6, "the case is not what it says"
    right = right.where(right >= least, 0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample(logits, temperature, top_p, generator) for _ in range(10_000)])
    found = drawn.bincount(minlength=6) / 10_000
    # Four standard deviations of the most uncertain.
    assert (found - right / right.sum()).abs().max().item() < 0.02
    assert found[right == 0].eq(0).all()


@one_family
def test_rows_without_a_token_are_not_drawn(saved: Saved) -> None:
    model, tokenizer = load(saved.run)
    tokenizer.vocab_size = 40
    pieces = [*continue_text(model, tokenizer, PROMPT, 30, 10.0, 1.0, 0)]
    assert set("".join(pieces)) <= set(tokenizer.decode([*range(40)]))


@one_family
def test_the_last_token_ends_the_text(saved: Saved) -> None:
    model, tokenizer = load(saved.run)
    prompt = [tokenizer.bos_id or 0, *tokenizer.encode(PROMPT)]
    tokens = [*islice(generate(model, prompt, lambda logits: int(logits.argmax())), 30)]
    tokenizer.eos_id = tokens[12]
    end = tokens.index(tokenizer.eos_id)
    said = "".join(continue_text(model, tokenizer, PROMPT, 30, 0.0, 1.0, 0))
    assert said == tokenizer.decode(tokens[:end]) != tokenizer.decode(tokens)


@one_family
def test_a_run_ends_texts_with_its_separator(saved: Saved, tmp_path: Path) -> None:
    for separator, ids in (("<|eot_id|>", (4096 - 256, 4096 - 247)), ("none", (None, None)), (None, (3840, 3841))):
        written = json.loads((saved.run / "run.json").read_text())
        table = written["config"]["training"]
        assert table.pop("dataset_separator") == "auto"
        table |= {} if separator is None else {"dataset_separator": separator}  # older runs have none
        write_json(tmp_path / "run.json", written)
        with suppress(FileExistsError):
            (tmp_path / "checkpoint").symlink_to(saved.run / "checkpoint")
        source = open_source(tmp_path, None)
        tokenizer = load_tokenizer(source.tokenizer, source.separator)
        assert (tokenizer.bos_id, tokenizer.eos_id) == ids
        export_run(written["config"], saved.run / "checkpoint" / "step-7", tmp_path / "exported", torch.float32)
        config = json.loads((tmp_path / "exported" / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == ids


@one_family
def test_an_empty_prompt_needs_a_first_token(saved: Saved) -> None:
    assert text(saved.run, "")
    model, tokenizer = load(saved.run)
    tokenizer.bos_id = None
    with pytest.raises(ConfigError, match="an empty prompt"):
        next(continue_text(model, tokenizer, "", 3, 0.0, 1.0, 0))


def broken_sources(saved: Saved, folder: Path) -> Iterator[tuple[str, int | None, str]]:
    """Folder, step, and what is said of it."""
    yield "nothing", None, "nothing: no run.json and no config.json"
    shutil.copytree(saved.run, folder / "run")
    yield "run", 8, "no good checkpoint of step 8. Steps there: 7"
    torn = next((folder / "run" / "checkpoint" / "step-7").glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[:-1])
    yield "run", None, "no good checkpoint of any step. Steps there: 7"
    shutil.copytree(saved.run, folder / "other")
    written = json.loads((folder / "other" / "run.json").read_text())
    written["config"]["model"]["flavor"] = "debugg"
    write_json(folder / "other" / "run.json", written)
    yield "other", None, "did you mean debug?"
    (folder / "other" / "run.json").write_text("{}")
    yield "other", None, "not the dump_folder of a run"
    (folder / "hub").mkdir()
    config = json.loads((saved.exported / "config.json").read_text())
    for change, reason in (
        ({"model_type": "mamba"}, "model_type = mamba: not one of .*llama, .*qwen3"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type = dynamic: not available"),
        ({"hidden_size": "wide"}, "hidden_size = wide: not available"),
    ):
        given = {name: value for name, value in (config | change).items() if value is not None}
        write_json(folder / "hub" / "config.json", given)
        yield "hub", None, reason
    write_json(folder / "hub" / "config.json", config)
    yield "hub", None, "no .safetensors file"
    tensors = load_file(saved.exported / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, folder / "hub" / "model.safetensors")
    yield "hub", None, r"up_proj.weight is missing\n.*norm.weight is \(3,\) there and \(256,\) here"
    yield "hub", 7, "--step 7: .* has no steps"
    (folder / "hub" / "config.json").write_text("not JSON")
    yield "hub", None, "config.json: not JSON"


@one_family
def test_what_cannot_be_used_is_said(saved: Saved, tmp_path: Path) -> None:
    for name, step, reason in broken_sources(saved, tmp_path):
        with pytest.raises(ConfigError, match=reason):
            open_source(tmp_path / name, step)


@one_family
def test_a_tokenizer_of_more_tokens_than_the_model_has_rows_is_refused(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks would take zeros for the embedding of a token that no rank has."""
    shutil.copytree(saved.exported, tmp_path / "hub")
    words = tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "hub" / "tokenizer.json"))
    (tmp_path / "hub" / "tokenizer_config.json").unlink()
    monkeypatch.setattr(generation, "init_distributed", lambda _: torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"70001 tokens, but \w+ has a table of 4096"):
        generation.main([str(tmp_path / "hub"), "a"])


@one_family
def test_weights_of_another_size_are_refused(saved: Saved) -> None:
    source, (model_class, flavors) = open_source(saved.run, None), MODELS["llama"]
    with torch.device("meta"):
        source.model = model_class(flavors["wide"])
    source.name = "llama"
    with pytest.raises(ConfigError, match=r"model.norm.weight is \(256,\) there and \(512,\) here"):
        build(source, CPU, torch.float32)


@pytest.mark.parametrize(("ranks", "reason"), [(3, "8 attention heads, which 3 ranks"), (8, "4 key")])
def test_ranks_that_cannot_share_are_refused(ranks: int, reason: str) -> None:
    sizes = MODELS["llama"][1]["debug"]
    check_ranks(sizes, 4)
    with pytest.raises(ConfigError, match=reason):
        check_ranks(sizes, ranks)


def test_a_mistake_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "components.generate", "nowhere", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = "nowhere: no run.json and no config.json: not a dump_folder, and no Hugging Face folder\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    wrong = {
        "--top-p": ("0", "1.1"),
        "--temperature": ("nan", "1e-320"),
        "--tokens": ("0", "9" * 20),
        "--seed": ("9" * 20,),
    }
    for words in ([option, value] for option, values in wrong.items() for value in values):
        with pytest.raises(SystemExit) as ended:
            generation.main(["nowhere", "x", *words])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"error: {words[0]} " in said
        assert ": use " in said


@one_family
def test_an_export_that_cannot_end_writes_no_weights(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is moved, and its tokenizer is gone: --tokenizer names another one, for generate too."""
    shutil.copytree(saved.run, tmp_path / "run")
    written = json.loads((tmp_path / "run/run.json").read_text())
    written["config"]["model"]["hf_assets_path"] = "gone"
    write_json(tmp_path / "run/run.json", written)
    command, there = ["export", str(tmp_path / "run"), str(tmp_path / "exported")], [tmp_path / "run"]
    with pytest.raises(ConfigError, match=r"no tokenizer at gone: .*; --tokenizer takes another path"):
        state.main(command)
    whole, checkpoint = meta_model(Model(name="qwen3", flavor="debug")), tmp_path / "run/checkpoint/step-7"
    with mock.patch.object(safetensors.torch, "save_file", side_effect=OSError(28, "No space left")) as save:
        with pytest.raises(ConfigError, match="no tokenizer at gone"):  # as at the end of a run
            export(whole, checkpoint, tmp_path / "exported", "gone", torch.float32)
        assert not save.called
        with pytest.raises(ConfigError, match="No space left"):
            state.main([*command, "--tokenizer", "assets/tokenizer"])
    assert [*tmp_path.iterdir()] == there
    assert state.main([*command, "--tokenizer", "assets/tokenizer"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]
    prompted = ["In the beginning", "--tokens", "3", "--temperature", "0", "--tokenizer", "assets/tokenizer"]
    monkeypatch.setattr(generation, "init_distributed", lambda seconds: CPU)
    said = []
    for folder in ("run", "exported"):
        assert generation.main([str(tmp_path / folder), *prompted]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0] == said[1]


def lm_eval_says(folder: Path, output: Path) -> tuple[float, list[dict[str, Any]]]:
    """Accuracy on tests/lm_eval_task, and what it wrote of each question: the command of docs/generate.md, offline."""
    words = ["--model", "hf", "--model_args", f"pretrained={folder},dtype=float32,add_bos_token=True"]
    words += ["--tasks", "genesis", "--include_path", "tests/lm_eval_task", "--device", "cpu", "--batch_size", "4"]
    words += ["--log_samples", "--output_path", str(output)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "lm_eval", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,), (samples,) = output.rglob("results_*.json"), output.rglob("samples_*.jsonl")
    accuracy = json.loads(results.read_text())["results"]["genesis"]["acc,none"]
    return accuracy, [json.loads(line) for line in samples.read_text().splitlines()]


@one_family
def test_lm_eval_gives_an_export_our_likelihoods(saved: Saved, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # without which its hf model does not start
    accuracy, samples = lm_eval_says(saved.exported, tmp_path)
    _, tokenizer = load(saved.run)
    right = []
    for question in samples:
        document, begin = question["doc"], [tokenizer.bos_id or 0, *tokenizer.encode(question["doc"]["verse"])]
        ours = []
        for ending, (theirs, _) in zip(document["endings"], question["filtered_resps"], strict=True):
            tokens = torch.tensor([[*begin, *tokenizer.encode(f" {ending}")]])
            labels = tokens.roll(-1)
            labels[:, : len(begin) - 1] = labels[:, -1] = -100
            ours.append(-saved.model(tokens, labels=labels).item())
            assert abs(float(theirs) - ours[-1]) < 1e-4 * abs(ours[-1])
        right.append(ours.index(max(ours)) == document["right"])
    assert len(right) == 4
    assert accuracy == sum(right) / len(right)
