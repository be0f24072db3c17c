"""Averages of weights: alike at every layout, kept by checkpoints, validated and exported; and means of checkpoints."""

import contextlib
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from components.commands.dry_run import held, rehearse
from components.commands.generate import open_source
from components.commands.observed import whole_tensors, whole_weights
from components.config import ConfigError, load_config, to_dict
from components.config.files import read_json, write_json
from components.launch.exit_codes import ExitCode
from components.launch.signals import StopSignal
from components.optim.averages import WeightAverages, average_bytes
from components.state import init, merging
from components.state.__main__ import main
from components.state.checkpoint import Checkpointer
from components.state.init import initialize_weights
from components.state.weights import Folder
from models import meta_model
from models.random_bits import key_of
from parallelize.sharding import local_part
from tests.checkpoints import value_of
from tests.harness import observe, rewrite
from tests.small import RECIPE, SMALL
from tests.test_replicas import flip_and_compare
from tests.test_rounding import LAYOUTS, LOCAL, SHARD, TP, differing

EMA = ("--averages.ema_decay", "0.9", "--checkpoint.enable", "true")
FSDP, SPLIT = (SHARD, "2", LOCAL, "18"), (TP, "2")
KINDS: dict[str, tuple[str, ...]] = {"float32": (), "bfloat16": ("--training.dtype", "bfloat16")}


def whole_averages(run: train.Run) -> dict[str, Tensor]:
    return whole_tensors(run, dict(run.averages.named()))


def give_weights(run: train.Run, turn: int) -> None:
    """Weights that are a function of turn, names and indices: the same at every layout."""
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                init._fill(parameter.detach(), 1e-2, key_of(f"turn {turn}", name), torch.device("cpu"))


def average_of_given_weights(run: train.Run) -> dict[str, Tensor]:
    """The averages after four steps, the third of which is not accepted."""
    for step in range(1, 5):
        give_weights(run, step)
        run.averages.update(step, torch.tensor(step != 3))
    return whole_averages(run)


@functools.cache
def of_one_process(kind: str) -> dict[str, Tensor]:
    return observe(*EMA, *KINDS[kind], steps=0, at_end=average_of_given_weights).extra


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_layout_has_the_same_bits_of_averages_from_equal_weights(kind: str, layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    other = observe(*EMA, *KINDS[kind], *words, ranks=ranks, steps=0, at_end=average_of_given_weights).extra
    assert not differing(other, of_one_process(kind))


def given(run: train.Run) -> list[dict[str, Tensor]]:
    found = []
    for step in range(1, 5):
        give_weights(run, step)
        found.append({name: weight.clone() for name, weight in whole_weights(run).items()})
    return found


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_average_is_that_of_the_formula(kind: str) -> None:
    weights = observe(*KINDS[kind], steps=0, at_end=given).extra
    found = of_one_process(kind)
    assert found.keys() == weights[0].keys()
    for name, average in found.items():
        assert average.dtype == torch.float32
        expected = weights[0][name].double()
        for step in (2, 4):
            decay = min(0.9, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * weights[step - 1][name].double()
        assert torch.allclose(average.double(), expected, rtol=1e-5, atol=1e-9), name


# --------------------------------------------------------------------------------------- checkpoints


def test_a_run_goes_on_at_another_layout_with_the_same_bits(tmp_path: Path) -> None:
    """Two steps at fsdp 2, then tp 2, then one process, each from the checkpoint of the one before."""
    unbroken = observe(*EMA, steps=5, at_end=whole_averages).extra
    folder = str(tmp_path)
    saved = observe(*EMA, *FSDP, ranks=2, steps=2, folder=folder, at_end=whole_averages).extra
    loaded = observe(*EMA, *SPLIT, ranks=2, steps=0, folder=folder, at_end=whole_averages).extra
    assert saved
    assert not differing(loaded, saved)
    saved = observe(*EMA, *SPLIT, ranks=2, steps=3, folder=folder, at_end=whole_averages).extra
    assert len(differing(saved, loaded)) == len(saved)
    assert not differing(observe(*EMA, steps=0, folder=folder, at_end=whole_averages).extra, saved)
    for name, average in unbroken.items():
        assert (average - saved[name]).abs().max() < 1e-5 * average.abs().max(), name


KEPT = ("--checkpoint.keep_latest_k", "0")


def small_run(folder: Path, steps: list[int], *words: str) -> Any:
    """A run's dump_folder. Returns, for each step that is saved: (averages by name, weights by name)."""
    value_of(_small_run, folder, steps, *words)
    return torch.load(folder / "expected.pt")


def _small_run(folder: Path, steps: list[int], *words: str) -> None:
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *words, *KEPT, "--job.dump_folder", str(folder)])
    model: Any = meta_model(config.model).to_empty(device="cpu")
    model.tie_weights()
    saver, optimizer = None, torch.optim.SGD(model.parameters())
    kept = WeightAverages(config.averages.ema_decay, [model])
    saver, found = Checkpointer(folder / "checkpoint", config.checkpoint, [model], optimizer, kept), {}
    for step in steps:
        initialize_weights(model, model.init_std, step)
        kept.update(step, torch.tensor(True))
        saver.save(step, {})
        found[step] = [dict(each) for each in (kept.named(), model.named_parameters())]
        found[step] = [{name: each.detach().clone() for name, each in named.items()} for named in found[step]]
    write_json(folder / "run.json", {"config": to_dict(config)})
    torch.save(found, folder / "expected.pt")


def resumed(folder: Path, *words: str) -> tuple[str, bool]:
    """What a resuming run says, and whether it has averages."""
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *words])
    model: Any = meta_model(config.model).to_empty(device="cpu")
    kept, said = WeightAverages(config.averages.ema_decay, [model]), io.StringIO()
    optimizer = torch.optim.SGD(model.parameters())
    with contextlib.redirect_stdout(said):
        Checkpointer(folder / "checkpoint", config.checkpoint, [model], optimizer, kept).load()
    return said.getvalue(), kept.started


WITHOUT = ("--checkpoint.exclude_from_loading", '["averages"]')


def test_a_run_that_finds_or_wants_no_average_says_so(tmp_path: Path) -> None:
    on, off = (tmp_path / name for name in ("on", "off"))
    small_run(on, [1, 2], *EMA)
    small_run(off, [1, 2])
    anew = "the average of the weights starts anew, from the weights after the next step\n"
    assert value_of(resumed, off, *EMA) == (f"{off}/checkpoint/step-2 has no average: {anew}", False)
    said, started = value_of(resumed, on, *EMA, *WITHOUT)
    assert said.endswith(f"checkpoint.exclude_from_loading has averages: {anew}")
    assert not started
    ignored = f"averages.ema_decay = 0: the average of the weights in {on}/checkpoint/step-2 is not loaded\n"
    assert value_of(resumed, on) == (ignored, False)
    assert value_of(resumed, on, *EMA) == ("", True)
    assert value_of(resumed, off) == ("", False)


# ---------------------------------------------------------------------------------------- validation

VALIDATED = ("--validation.enable", "true", "--validation.held_out_fraction", "0.006")


def validated_twice(run: train.Run) -> tuple[Any, Any, float, list[str]]:
    """(logged losses of weights and average, both after weights are the averages, names that validation changed)."""
    before = {name: tensor.clone() for name, tensor in (whole_weights(run) | prefixed(run)).items()}
    loss, _, more = run.averages.validated(lambda: train.validate(run, StopSignal()))
    changed = differing(before, whole_weights(run) | prefixed(run))
    for parameter, average in run.averages.kept.items():
        local_part(parameter.detach())[1].copy_(local_part(average)[1])
    return loss, more["loss_ema"], train.validate(run)[0], changed


def prefixed(run: train.Run) -> dict[str, Tensor]:
    return {f"average {name}": average for name, average in whole_averages(run).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["fsdp 2", "fsdp 2 never", "tp 2", "ddp 2, accumulating", "pp 2 x fsdp 2"])
def test_the_average_is_validated_and_the_weights_keep_their_bits(layout: str, kind: str) -> None:
    ranks, words = LAYOUTS[layout.removesuffix(" never")]
    words += ("--parallelism.fsdp_reshard_after_forward", "never") if layout.endswith("never") else ()
    given = (*EMA, *VALIDATED, "--validation.freq", "3", *KINDS[kind], *words)
    loss, of_average, expected, changed = observe(*given, ranks=ranks, steps=3, at_end=validated_twice).extra
    assert changed == []
    assert of_average == expected
    assert of_average != loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_gives_the_weights_back(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = meta_model(load_config(["--job.config_file", str(RECIPE), *SMALL]).model).to_empty(device="cpu")
    model.to(dtype)
    initialize_weights(model, model.init_std, 0)
    kept = WeightAverages(0.9, [model])
    kept.start()
    for average in kept.kept.values():
        average.add_(1)
    tensors = [*model.parameters(), *kept.kept.values()]
    before = [tensor.detach().clone() for tensor in tensors]

    def untouched() -> bool:
        return all(map(torch.equal, tensors, before))

    def interrupt() -> None:
        with kept.swapped():
            assert not untouched()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert untouched()
    owner, name = (torch, "empty") if dtype == torch.float32 else (Tensor, "clone")
    allocate, count = getattr(owner, name), iter(range(5 if owner is Tensor else 0))

    def no_memory(*arguments: Any, **options: Any) -> Tensor:
        if next(count, None) is None:
            raise torch.OutOfMemoryError
        return allocate(*arguments, **options)

    monkeypatch.setattr(owner, name, no_memory)
    with pytest.raises(torch.OutOfMemoryError), kept.swapped():
        pass
    monkeypatch.undo()
    assert untouched()


# ---------------------------------------------------------------------------------------- guards, memory


def test_replicas_of_averages_are_compared() -> None:
    ranks, words = LAYOUTS["ddp 2, accumulating"]
    label = "tok_embeddings.weight (average)"
    at_end = functools.partial(flip_and_compare, label)
    said, (code, *_) = observe(*EMA, *words, ranks=ranks, steps=2, at_end=at_end).extra
    assert code == ExitCode.CORRUPT
    assert label in said


def test_a_step_that_a_guard_skips_leaves_the_average() -> None:
    poison = "divisor * (1 if run.step < 3 else float('nan')), last)"
    fault = functools.partial(rewrite, "train", "train_step", "divisor, last)", poison)
    two = observe(*EMA, *FSDP, ranks=2, steps=2, at_end=whole_averages).extra
    assert not differing(two, observe(*EMA, *FSDP, ranks=2, steps=4, mutate=fault, at_end=whole_averages).extra)


ADAPTERS = ("--model.lora.rank", "2")


def names_and_bytes(run: train.Run) -> tuple[list[str], int, int, list[str]]:
    kept = sum(local_part(average)[1].nbytes for average in run.averages.kept.values())
    trained = [name for stage in run.stages for name, each in stage.named_parameters() if each.requires_grad]
    return [name for name, _ in run.averages.named()], kept, average_bytes(run.stages, 0.9), trained


@pytest.mark.parametrize("words", [(), ADAPTERS, ("--model.name", "deepseek_v3")], ids=["all", "adapters", "experts"])
def test_what_is_trained_has_an_average_of_the_bytes_that_are_said(words: tuple[str, ...]) -> None:
    names, kept, said, trained = observe(*EMA, *FSDP, *words, ranks=2, steps=1, at_end=names_and_bytes).extra
    assert names == trained
    assert kept == said
    assert ("lora" in names[0]) == (words == ADAPTERS)
    assert not any("router.bias" in name for name in names)


def test_without_a_decay_nothing_is_kept() -> None:
    names, kept, *_ = observe(steps=1, at_end=names_and_bytes).extra
    assert (names, kept) == ([], 0)


def _dry(*words: str) -> dict[str, int]:
    config = load_config(["--job.config_file", str(RECIPE), *words])
    return held(*rehearse(config))


def test_a_dry_run_counts_the_average() -> None:
    off, on = value_of(_alone, _dry), value_of(_alone, _dry, *EMA)
    added = on.pop("average of the weights")
    assert added == on["weights"]
    assert on == off | {"in all, at the highest point": off["in all, at the highest point"] + added}


def _alone(function: Callable[..., Any], *words: str) -> Any:
    torch.distributed.destroy_process_group()
    found = function(*words)
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    return found


# ------------------------------------------------------------------------------------------- folders


def _main(words: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(words)
    except ConfigError as error:
        return ExitCode.CONFIG, str(error)
    return code, printed.getvalue()


def command(*words: object) -> tuple[int, str]:
    return value_of(_main, [str(word) for word in words])


def read(folder: Path) -> dict[str, Tensor]:
    """Tensors of an exported folder, by this project's names."""
    config = load_config(["--job.config_file", str(RECIPE), *SMALL])
    model: Any = meta_model(config.model)
    files = Folder(folder)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = files.read(model.hf_name(name), tuple(map(slice, parameter.shape)))
    return found


def test_the_average_is_exported_and_so_is_the_mean_of_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = small_run(run, [3, 4, 5], *EMA)
    code, printed = command("export", run, tmp_path / "ema", "--averages", "--step", 4)
    assert (code, printed) == (0, f"{run}/checkpoint/step-4 -> {tmp_path}/ema\n")
    assert not differing(read(tmp_path / "ema"), found[4][0])
    assert "| weights | moving average over steps, decay 0.9 |" in (tmp_path / "ema/README.md").read_text()
    command("export", run, tmp_path / "plain", "--step", 4)
    assert not differing(read(tmp_path / "plain"), found[4][1])
    assert "| weights |" not in (tmp_path / "plain/README.md").read_text()
    code, printed = command("average", run, "--steps", "3,5,4", "--to", tmp_path / "mean")
    assert code == 0, printed
    assert "| weights | mean after steps 3, 5, 4 |" in (tmp_path / "mean/README.md").read_text()
    for name, mean in read(tmp_path / "mean").items():
        total = found[3][1][name].double() + found[5][1][name].double() + found[4][1][name].double()
        assert torch.equal(mean, (total / 3).float()), name


def test_a_merge_keeps_the_precision_of_routers_biases(tmp_path: Path) -> None:
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    for folder, bias in ((tmp_path / "a", 1.0), (tmp_path / "b", 1.0 + 2**-20)):
        folder.mkdir()
        write_json(folder / "config.json", {"model_type": "deepseek_v3"})
        tensors = {name: torch.full((4,), bias), "model.norm.weight": torch.ones(4)}
        save_file(tensors, folder / "model.safetensors")
    merging.merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "merged", torch.bfloat16)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert torch.equal(merged[name], torch.full((4,), 1.0 + 2**-21))
    assert merged["model.norm.weight"].dtype == torch.bfloat16


def test_checkpoints_of_two_models_have_no_mean(tmp_path: Path) -> None:
    small_run(tmp_path / "run", [3])
    small_run(tmp_path / "wider", [4], "--model.sizes.ffn_dim", "64")
    (tmp_path / "wider/checkpoint/step-4").rename(tmp_path / "run/checkpoint/step-4")
    code, said = command("average", tmp_path / "run", "--steps", "3,4", "--to", tmp_path / "out")
    assert (code, "is of another model than" in said) == (ExitCode.CONFIG, True), said


def _context_length(run: Path, step: int) -> int:
    return int(open_source(run, step).model.config.context_length)


def test_a_checkpoint_has_the_contexts_that_it_was_saved_with(tmp_path: Path) -> None:
    run, stretched = tmp_path / "run", "--model.rope_scaling."
    small_run(run, [3])
    small_run(run, [4], f"{stretched}rope_type", "linear", f"{stretched}factor", "2")
    small_run(run, [5], f"{stretched}rope_type", "linear", f"{stretched}factor", "4")
    lengths = {}
    for step in (3, 4, 5):
        assert command("export", run, tmp_path / str(step), "--step", step)[0] == 0
        config = read_json(tmp_path / str(step) / "config.json")
        lengths[step] = config["max_position_embeddings"], (config["rope_scaling"] or {}).get("factor")
    assert lengths == {3: (2048, None), 4: (4096, 2.0), 5: (8192, 4.0)}
    code, said = command("average", run, "--steps", "4,5", "--to", tmp_path / "out")
    assert (code, "trained with other contexts or RoPE scaling" in said) == (ExitCode.CONFIG, True), said
    assert value_of(_context_length, run, 4) == 4096
    later = read_json(run / "run.json")
    later["config"]["model"]["sizes"] = {"rope_theta": 7.0}  # as a start without checkpoints writes it
    (run / "run.json").write_text(json.dumps(later))
    code, said = command("export", run, tmp_path / "out", "--step", "3")
    assert (code, "another model than" in said) == (ExitCode.CONFIG, True), said
    assert "rope_theta = 500000.0 there and 7.0 here" in said


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    plain, adapted = tmp_path / "plain", tmp_path / "adapted"
    small_run(plain, [3, 4])
    small_run(adapted, [3, 4], *ADAPTERS)
    to = ("--to", tmp_path / "out")
    cases: dict[str, tuple[object, ...]] = {
        "no average of the weights in it": ("export", plain, tmp_path / "out", "--averages"),
        "give two or more different steps": ("average", plain, "--steps", "3,3", *to),
        "no good checkpoint of step 9. Steps there: 3, 4": ("average", plain, "--steps", "3,9", *to),
        "has adapters": ("average", adapted, "--steps", "3,4", *to),
        "trained without adapters; use export": ("merge", plain, *to),
        "--weights: belongs to several folders": ("merge", plain, "--weights", "1", *to),
        "--step: belongs to one run": ("merge", plain, adapted, "--step", "0", *to),
        "no .safetensors file in it": ("merge", plain, adapted, *to),
    }
    for reason, words in cases.items():
        code, said = command(*words)
        assert code == ExitCode.CONFIG, said
        assert reason in said
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "said"), [("--steps", "expected steps"), ("--weights", "expected numbers")])
def test_numbers_of_a_command_are_numbers(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["average" if option == "--steps" else "merge", "x", option, "4,x", "--to", "y"])
    assert f"argument {option}: 4,x: {said}" in capsys.readouterr().err


def test_folders_are_merged_by_weights_and_along_the_arc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    found = small_run(run, [3, 4, 5])
    folders = [tmp_path / f"of {step}" for step in (3, 4, 5)]
    for folder in folders:
        command("export", run, folder, "--step", folder.name[-1])
    monkeypatch.setattr(merging, "FILE_BYTES", 20_000)
    code, said = command("merge", *folders, "--to", tmp_path / "linear", "--weights", "0.5,0.2,0.3")
    assert code == 0, said
    assert {file.name for file in folders[0].iterdir()} - {"README.md"} <= {
        file.name for file in (tmp_path / "linear").iterdir()
    } | {"loss.png", "model.safetensors"}
    for name, merged in read(tmp_path / "linear").items():
        three, four, five = (found[step][1][name].double() for step in (3, 4, 5))
        assert torch.allclose(merged.double(), 0.5 * three + 0.2 * four + 0.3 * five, rtol=1e-6, atol=1e-9), name
    code, said = command("merge", *folders[:2], "--to", tmp_path / "arc", "--method", "slerp", "--weights", "0.25,0.75")
    assert code == 0, said
    for name, merged in read(tmp_path / "arc").items():
        left, right = (found[step][1][name].double().flatten() for step in (3, 4))
        angle = torch.arccos((left @ right / (left.norm() * right.norm())).clamp(-1, 1))
        expected = ((0.25 * angle).sin() * left + (0.75 * angle).sin() * right) / angle.sin()
        if angle < 0.03:  # norms, which are all ones
            expected = 0.25 * left + 0.75 * right
        assert torch.allclose(merged.double().flatten(), expected, rtol=1e-5, atol=1e-8), name
    code, said = command("merge", *folders, "--to", tmp_path / "no", "--method", "slerp")
    assert (code, "it interpolates between 2" in said) == (ExitCode.CONFIG, True)
    for weights, reason in {"0.5,0.5": "2 numbers for 3 folders", "1,1,1": "the sum is 3"}.items():
        code, said = command("merge", *folders, "--to", tmp_path / "no", "--weights", weights)
        assert (code, reason in said) == (ExitCode.CONFIG, True)
    code, said = command("merge", *folders[:2], "--to", tmp_path / "no", "--weights", "nan,1")
    assert (code, "the sum is nan" in said) == (ExitCode.CONFIG, True)
    config = json.loads((folders[1] / "config.json").read_text())
    write_json(folders[1] / "config.json", config | {"eos_token_id": [7, 8]})
    code, said = command("merge", *folders[:2], "--to", tmp_path / "of a base and its chats")
    assert code == 0, said
    write_json(folders[1] / "config.json", config | {"rope_theta": 7.0})
    code, said = command("merge", *folders, "--to", tmp_path / "no")
    assert (code, "rope_theta = 7.0 there" in said) == (ExitCode.CONFIG, True)
    assert not (tmp_path / "no").exists()
