"""The convergence command: what it runs, when it says no, and that it notices what loss alone would not."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml

import train
from components.config import ROOT, load_config
from components.data import build_datasets
from components.state.init import initialize_weights
from models import MODELS
from parallelize.mesh import Degrees
from tests.convergence import faults, golden
from tests.convergence.__main__ import main
from tests.convergence.disturbed import disturb
from tests.convergence.report import Comparison, write
from tests.convergence.sides import Curve, checkout, parse
from tests.convergence.verdict import BAND, distances, first_outside, noise_floor, who_moved
from tests.small import RECIPE

SHORT = ("--training.seq_len", "64")


# Sides


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("one rank", Degrees()),
        ("fsdp 4", Degrees(dp_shard=4)),
        ("hsdp 2x3", Degrees(dp_replicate=2, dp_shard=3)),
        ("pp 2 ddp 2 tp 4 cp 8", Degrees(pp=2, dp_replicate=2, tp=4, cp=8)),
        ("own --compile.enable", None),
    ],
)
def test_a_side_says_its_layout(text: str, degrees: Degrees | None) -> None:
    assert parse(text, RECIPE).degrees == degrees


def test_a_side_is_the_recipe_made_shorter() -> None:
    side = parse("ddp 4 resume 5 --compile.enable", RECIPE)
    config = load_config(side.argv(Path("folder"), 20, ("--optimizer.lr", "1e-3")))
    assert (side.resume, side.ranks) == (5, 4)
    # 30 steps of warm-up in 300; the recipe's local batch is 4, but a rank has 2 of 8 sequences.
    assert (config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps) == (2, 20)
    assert (config.training.local_batch_size, config.training.global_batch_size) == (2, 8)
    assert (config.optimizer.lr, config.compile.enable, config.metrics.log_freq) == (1e-3, True, 1)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_sides(recipe: Path) -> None:
    assert not parse("own", recipe).config(10).checkpoint.enable


def test_averages_are_not_compared(tmp_path: Path) -> None:
    recipe = tmp_path / "averaged.toml"
    recipe.write_text(
        (ROOT / "recipes/llama_debug_lora.toml").read_text() + "[averages]\nema_decay = 0.9\nexport = true\n"
    )
    assert not parse("own", recipe).config(10).averages.ema_decay


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_are_moved_to_a_neighbour_after_a_load(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = torch.nn.Linear(64, 64, dtype=getattr(torch, dtype))
    stage.bias.requires_grad_(False)

    def load(run: Any, checkpointer: Any) -> None:
        for parameter in stage.parameters():
            parameter.data.fill_(1.0)

    monkeypatch.setattr(train, "resume", load)
    disturb("ulp", 1)
    for step, moved in ((0, True), (10, False)):
        run: Any = SimpleNamespace(step=step, stages=[stage])
        train.resume(run, None)  # type: ignore[arg-type]
        assert (stage.bias == 1).all()
        assert bool((stage.weight != 1).all()) == moved
        assert (stage.weight - 1).abs().max() <= torch.finfo(stage.weight.dtype).eps


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fdsp 2", 'side "fdsp 2": fdsp: expected a layout'),
        ("tp", 'side "tp": tp: expected a layout'),
        ("nosuch@ tp 2", "nosuch@: git knows no such revision"),
        ("tp 3", 'side "tp 3": '),
        ("resume 20", "resume 20: expected a step before the last, 20"),
        ("tp 2 --training.setps 3", "did you mean training.steps"),
        ("recipes/nosuch.toml", "nosuch.toml"),
        ("one rank --training.global_batch_size -1", "global_batch_size is unset"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "nothing"
    assert main([str(RECIPE), "one rank", text, "--output", str(output)]) == 2
    assert told in capsys.readouterr().err
    assert not output.exists()


def test_another_revision_is_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "a repository"
    (repository / "recipes").mkdir(parents=True)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(repository), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (repository / "recipes" / "one.toml").write_text("[training]\nsteps = 7\n")
    git("add", "-A")
    git("commit", "-qm", "one")
    (repository / "recipes" / "one.toml").write_text("[training]\nsteps = 8\n")
    monkeypatch.setattr("tests.convergence.sides.ROOT", repository)
    side = parse("HEAD@ tp 2", repository / "recipes" / "one.toml")
    assert side.revision == git("rev-parse", "HEAD")
    assert side.recipe.read_text() == "[training]\nsteps = 7\n"
    assert side.tree == checkout(side.revision)
    assert git("status", "--porcelain", "--untracked-files=no") == "M recipes/one.toml"


# Verdict


def curve(name: str, *numbers: float) -> Curve:
    return Curve(name, list(numbers), list(numbers))


ONE = curve("one rank", 8.0, 4.0, 2.0, 1.0)


def moved(name: str, *parts: float) -> Curve:
    return curve(name, *(number * (1 + part) for number, part in zip(ONE.loss, parts, strict=True)))


FLOOR = noise_floor(ONE, [moved("order", 0, 1e-6, 0, 0), moved("ulp", 0, 0, 0, 1e-4)])


def test_the_floor_is_the_largest_difference_so_far_and_no_less_than_one_ulp() -> None:
    assert FLOOR["loss"] == pytest.approx([2**-23, 1e-6, 1e-6, 1e-4], rel=1e-6)


def test_the_first_step_outside_the_band_is_told() -> None:
    inside, outside = (moved("x", 0, BAND * part * 1e-6, 0, BAND * part * 1e-4) for part in (0.9, 1.1))
    assert first_outside(distances(inside, ONE, FLOOR)) is None
    assert first_outside(distances(outside, ONE, FLOOR)) == 2
    late = moved("x", 0, 0, 0, BAND * 1.1e-4)
    assert first_outside(distances(late, ONE, FLOOR)) == 4
    found = distances(late, ONE, FLOOR)["loss"]
    assert (found.worst, found.worst_step) == (pytest.approx(11, rel=1e-3), 4)


def test_gradient_norm_alone_is_enough() -> None:
    other = Curve("x", ONE.loss, moved("", 0, 0, 1e-2, 0).grad_norm)
    found = distances(other, ONE, FLOOR)
    assert (found["loss"].leaves_band, found["grad_norm"].leaves_band) == (None, 3)


@pytest.mark.parametrize("numbers", [(8.0, 4.0), (8.0, 4.0, math.nan, 1.0), (8.0, 4.0, math.inf, 1.0)])
def test_a_curve_that_ends_early_or_is_not_finite_is_another_run(numbers: tuple[float, ...]) -> None:
    assert first_outside(distances(curve("x", *numbers), ONE, FLOOR)) == 3


def test_what_moved_is_what_the_others_contradict() -> None:
    golden_curve, other = moved("golden", 0, 0, 0, 1e-5), moved("tp 2", 0, 0.1, 0, 0)
    assert who_moved(other, ONE, [golden_curve], FLOOR) == "tp 2"
    assert who_moved(golden_curve, other, [ONE], FLOOR) == "tp 2"
    assert who_moved(other, ONE, [], FLOOR).startswith("either")


def test_a_side_that_fails_or_a_golden_curve_of_another_run_is_a_no(tmp_path: Path) -> None:
    about = {"layout": "one rank", "ranks": 1, "versions": {"torch": "2"}, "git": {"revision": "abc", "dirty": True}}
    first = Curve("one rank", ONE.loss, ONE.grad_norm, [1.0] * 4, 1.0, "one rank", about)
    same = Curve("<tp 2>", ONE.loss, ONE.grad_norm, [1.0] * 4, 1.0, "[0 1]", about)
    good = Comparison("a recipe", first, [moved("order 1", 0, 0, 0, 0)], FLOOR, [same], {}, moved("golden", 0, 0, 0, 0))
    assert good.same
    for change in ({"failures": {"cp 2": "exit code 4\nlast words"}}, {"golden_changes": ["optimizer.lr was 1, is 2"]}):
        bad = Comparison(**(vars(good) | change))
        assert not bad.same
        write(bad, tmp_path, "a command")
        page = (tmp_path / "report.html").read_text()
        assert "NOT the same run" in page
        assert "&lt;tp 2&gt;" in page
        assert "❌" in (tmp_path / "summary.md").read_text()
        assert (tmp_path / "report.png").stat().st_size > 10_000
        assert not json.loads((tmp_path / "result.json").read_text())["same"]
        assert not re.search(r"https?://|src=\"(?!data:)|<script|<link", page)


# Golden curves


def test_a_golden_curve_knows_how_it_was_made(tmp_path: Path) -> None:
    path, side = tmp_path / "x" / "llama_debug-4.json", parse("one rank", RECIPE)
    git = {"revision": "abc", "dirty": False}
    made = Curve("one rank", [1 / 3, 2.0], [3.0, 4.0], about={"git": git, "device": "cpu", "versions": {"torch": "2"}})
    golden.write(path, side, 4, SHORT, made, {"loss": [1e-6, 2e-6], "grad_norm": [3e-6, 4e-6]}, "the command")
    kept = golden.read(path, SHORT)
    assert kept
    assert (kept.curve.loss, kept.curve.grad_norm) == (made.loss, made.grad_norm)
    assert kept.floor["grad_norm"] == [3e-6, 4e-6]
    assert kept.curve.about["command"] == "the command"
    run = kept.run
    assert golden.read(path, ()) is None
    assert golden.changes(run, golden.what_decides(side, 4, SHORT)) == []
    # Another layout is the same run; another learning rate is not.
    layout = parse("tp 2 fsdp 2 --training.gc_freq 3", RECIPE)
    assert golden.changes(run, golden.what_decides(layout, 4, SHORT)) == []
    other = golden.what_decides(parse("one rank --optimizer.lr 1.0", RECIPE), 4, SHORT)
    assert golden.changes(run, other) == ["optimizer.lr was 0.002, is 1.0"]


@pytest.mark.parametrize("path", sorted(golden.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_golden_curves_are_small_and_of_the_recipe_as_it_is(path: Path) -> None:
    name, _, steps = path.stem.rpartition("-")
    assert path.stat().st_size < 20_000
    kept = golden.read(path, SHORT)
    assert kept
    assert len(kept.curve.loss) == len(kept.floor["loss"]) == int(steps)
    side = parse("one rank", ROOT / "recipes" / f"{name}.toml")
    assert golden.changes(kept.run, golden.what_decides(side, int(steps), SHORT)) == []


# Workflows

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    """Its files and modules exist, and the command takes its words. GitHub's own keys are not checked."""
    workflow = yaml.safe_load(path.read_text())
    assert True in workflow  # YAML's reading of `on`
    (job,) = workflow["jobs"].values()
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, *words = [word.removeprefix(".venv/bin/") for word in command]
        if program in ("python", "python3") and words[:2] == ["-m", "tests.convergence"]:
            words = [word.replace("$BASE", "HEAD") for word in words[2:] if not word.startswith("${RECIPE")]
            end = words.index("--") if "--" in words else len(words)
            assert main([*words[:end], "tp 3", *words[end:]]) == 2  # all is read; a side that is refused: nothing runs
        elif program != "cat":
            assert (ROOT / (words[0] if program in ("python", "python3") else program)).exists(), command


# The detector


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_noticed(fault: faults.Fault) -> None:
    assert first_outside(faults.measure(fault, fault.layout)) is not None


@pytest.mark.parametrize("layout", dict.fromkeys(fault.layout for fault in faults.FAULTS))
def test_no_fault_is_noticed_where_there_is_none(layout: str) -> None:
    assert first_outside(faults.measure(None, layout)) is None


def test_the_loss_alone_would_miss_some() -> None:
    missed = [
        fault.name for fault in faults.FAULTS if "averaged" in fault.name or "divided by a pipeline" in fault.name
    ]
    assert len(missed) == 3
    for fault in faults.FAULTS:
        if fault.name in missed:
            assert faults.measure(fault, fault.layout)["loss"].leaves_band is None


# Without Meshwright


def plain_loop(steps: int) -> Curve:
    """The recipe by transformers' model and torch's own Adam; its weights at step 0 and its batches."""
    config = load_config(parse("one rank", RECIPE).argv(Path("unused"), steps, SHORT))
    ours = MODELS[config.model.name][0](MODELS[config.model.name][1][config.model.flavor])
    initialize_weights(ours, ours.init_std, config.debug.seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**ours.hf_config()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            model.get_parameter(ours.hf_name(name)).copy_(parameter)
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    sequences, _ = build_datasets(config, ours.config.vocab_size)
    found = Curve("plain", [], [])
    for step in range(1, steps + 1):
        positions = torch.arange((step - 1) * 8, step * 8).numpy()
        tokens = torch.from_numpy(sequences.get(sequences.at(positions, config.debug.seed))[0])
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        # In float32 torch's sum of a million squares is off by 1e-5.
        norm = torch.stack([parameter.grad.double().norm() for parameter in model.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm.float())
        found.grad_norm.append(norm.item())
        warm, decay = 2, round(0.8 * steps)
        done = max(0, step - (steps - decay)) / decay
        factor = step / warm if step <= warm else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * factor
        optimizer.step()
        found.loss.append(loss.item())
    return found


def test_a_loop_written_without_meshwright_is_the_same_run() -> None:
    kept = golden.read(golden.path_of(RECIPE, 20), SHORT)
    assert kept
    found = distances(plain_loop(20), kept.curve, kept.floor)
    print({name: (each.worst, each.worst_step) for name, each in found.items()})
    assert first_outside(found) is None
