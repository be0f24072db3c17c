"""Sweeps: the grid, what is refused before anything starts, what a difference means, and kills."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.commands import sweep, sweep_report
from components.commands.sweep import main, parse_grid, runs_of
from components.commands.sweep_report import Result, chance, rows_of, sentence
from components.config import ROOT, ConfigError
from components.launch.locks import RUN_LOCK, is_held, locked
from components.observe.report import read_rows
from tests.benchmarks import sweep as small
from tests.limits import finish, wait_until
from tests.small import RECIPE

Losses = dict[str, list[float | None]]


def test_a_grid_is_read() -> None:
    assert parse_grid(["optimizer.lr=1e-3, 2e-3", "model.flavor=debug"]) == {
        "optimizer.lr": ["1e-3", "2e-3"],
        "model.flavor": ["debug"],
    }
    assert parse_grid(['a.b=["x", "y"],[]', 'c={d = 1, e = 2},"f,g"', "a-b.c=[[1,2],[3,4]],'5,6'", "d=-1,true"]) == {
        "a.b": ['["x", "y"]', "[]"],
        "c": ["{d = 1, e = 2}", "f,g"],
        "a_b.c": ["[[1,2],[3,4]]", "5,6"],
        "d": ["-1", "true"],
    }


def test_a_grid_with_mistakes_is_refused_with_all_of_them() -> None:
    words = ["optimizer.lr", "a=", "a.b=1,,2", "a.c=1,1", "debug.seed=1,2", "a.c=3", "job.dump-folder=x"]
    words.append("validation.enable=true,false")
    with pytest.raises(ConfigError) as refused:
        parse_grid(words)
    expected = ["KEY=VALUE"] * 3 + ["occurs twice", "use --seeds", "a grid already", "use --to", "no validation loss"]
    for message, part in zip(refused.value.messages, expected, strict=True):
        assert part in message


def test_runs_are_the_product_with_seeds_and_have_names_of_their_values(tmp_path: Path) -> None:
    grid = {"optimizer.lr": ["1e-3", "2e-3"], "model.name": ["llama"]}
    runs = runs_of(RECIPE, grid, 2, tmp_path, ["--debug.seed", "7", "--training.steps", "5"])
    names = [f"lr={lr},name=llama,seed={seed}" for lr in ("1e-3", "2e-3") for seed in (7, 8)]
    assert [run.name for run in runs] == names
    config = runs[-1].config
    assert (config.optimizer.lr, config.debug.seed, config.training.steps) == (2e-3, 8, 5)
    assert config.job.dump_folder == str(tmp_path / names[-1])
    assert config.checkpoint.enable, "a run that is stopped goes on"
    twice = {"optimizer.matrix.lr_factor": ["1"], "optimizer.norm.lr_factor": ["a/b"]}
    assert runs_of(RECIPE, twice, 1, tmp_path, [])[0].name == (
        "optimizer.matrix.lr_factor=1,optimizer.norm.lr_factor=a_b,seed=0"
    )


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([str(RECIPE), *words]) == 2
    return capsys.readouterr().err.splitlines()


def test_values_that_a_check_refuses_are_refused_together_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--to", str(tmp_path / "sweep")]
    wrong = ["--grid", "optimizer.lr=1e-3,-1", "--grid", "parallelism.tensor_parallel_degree=1,3"]
    of_layout, *_, of_rate = refusal(capsys, *wrong, *to)
    assert of_layout.startswith("lr=1e-3,tensor_parallel_degree=3,seed=0: command line: ")
    assert of_rate.startswith("lr=-1,tensor_parallel_degree=1,seed=0 and 1 more: ")
    assert "optimizer.lr = -1" in of_rate
    assert "did you mean optimizer.name?" in refusal(capsys, "--grid", "optimizer.rate=1,2", *to)[0]
    layout = ["--", "--parallelism.tensor_parallel_degree", "3"]
    assert refusal(capsys, "--grid", "optimizer.lr=1e-3,2e-3", *to, *layout)[0].startswith("all runs: ")
    assert "the same job as lr=1e-3,seed=0" in refusal(capsys, "--grid", "optimizer.lr=1e-3,0.001", *to)[0]
    assert "longer than 255 bytes" in refusal(capsys, "--grid", f"job.description={'x' * 300},y", *to)[0]
    assert "at most 10,000 runs in all" in refusal(capsys, "--seeds", "99999999999", *to)[0]
    for key, value in {"comm.mode": "fake_backend", "checkpoint.last_save_model_only": "true"}.items():
        assert refusal(capsys, *to, "--", f"--{key}", value)[0].startswith(f"seed=0: {key}: ")
    other = f"--job.config_file={RECIPE.parent}/qwen3_debug.toml"
    for own in (["--job.dump_folder", "x"], ["--checkpoint.no_enable"], [other]):
        assert "the sweep sets" in refusal(capsys, *to, "--", *own)[0]
    assert not (tmp_path / "sweep").exists()


def test_a_point_may_need_what_the_recipe_lacks(tmp_path: Path) -> None:
    grid = {"checkpoint.initial_load_path": [str(tmp_path)]}
    settings = ["--checkpoint.initial_load_model_only", "false", "--debug.seed", "7"]
    (run,) = runs_of(RECIPE, grid, 1, tmp_path, settings)
    assert run.seed == 7
    assert run.config.checkpoint.initial_load_path == str(tmp_path)


def planted(folder: Path, losses: Losses) -> list[str]:
    """A sweep that has ended, whose runs had these validation losses by rate; None has diverged. Returns its words."""
    words = ["--grid", f"optimizer.lr={','.join(losses)}", "--seeds", str(max(map(len, losses.values())))]
    words += ["--to", str(folder)]
    for run in runs_of(RECIPE, {"optimizer.lr": [*losses]}, max(map(len, losses.values())), folder, []):
        loss = losses[run.point[0][1]][run.seed]
        run.folder.mkdir(parents=True)
        state = {"job": sweep._job(run.config), "starts": 1, "seconds": 2.0, "code": 3 if loss is None else 0}
        (run.folder / "sweep.json").write_text(json.dumps(state))
        rows: list[dict[str, Any]] = [{"step": step, "loss": 5 - step / 10} for step in range(1, 6)]
        rows += [] if loss is None else [{"step": 5, "validation_loss": loss}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return words


@pytest.mark.slow
def test_the_report_says_which_differences_mean_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = planted(tmp_path, {"1e-3": [4.2, 4.22, 4.18], "2e-3": [4.19, 4.21, 4.2], "4e-3": [4.5, 4.52, 4.51]})
    assert main([str(RECIPE), *words]) == 0, "nothing is left to run"
    lines = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if cells[0] in ("1e-3", "2e-3", "4e-3")}
    assert [*rows] == ["1e-3", "2e-3", "4e-3"]
    assert [cells[-1] for cells in rows.values()] == ["best", "within the noise", "worse"]
    assert rows["4e-3"][:3] == ["4.5100", "0.0100", "3"]
    assert float(rows["4e-3"][-2]) == pytest.approx(0.31 / math.sqrt((0.02**2 + 0.01**2) / 2), abs=0.1)
    page = (tmp_path / "report.html").read_text()
    assert "1 of the other 2 points cannot be told from it" in page
    assert 'alt="loss over optimizer.lr"' in page
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def results(losses: Losses) -> list[Result]:
    pairs = [(lr, seed, loss) for lr, own in losses.items() for seed, loss in enumerate(own)]
    return [Result(f"{lr}{seed}", (("lr", lr),), seed, Path(), loss, "loss") for lr, seed, loss in pairs]


def test_without_seeds_the_noise_is_unknown() -> None:
    found = results({"1": [4.2], "2": [4.1]})
    assert [row.verdict for row in rows_of(found)] == ["best", "noise unknown"]
    assert [row.in_noise for row in rows_of(found)] == [None, None]
    assert "The noise is unknown" in sentence(found)


def test_a_point_that_diverges_is_said() -> None:
    found = results({"1": [4.2, 4.3, 4.25], "2": [None, None, None], "3": [4.2, None, 4.3]})
    verdicts = {dict(row.point)["lr"]: row.verdict for row in rows_of(found)}
    assert verdicts == {"1": "best", "2": "diverged", "3": "within the noise, 1 of 3 diverged"}
    assert sentence(results({"1": [4.0, None, 4.1], "2": [5.0, 5.2]})).startswith("Lowest: lr = 1, 1 of 3 diverged; ")
    assert sentence(results({"1": [None]})) == "All runs have diverged."


def test_equal_losses_do_not_make_any_difference_large() -> None:
    """Losses are told from each other no finer than by a unit of float32."""
    rows = rows_of(results({"1": [4.0, 4.0], "2": [4.0 + 1e-7, 4.0 + 1e-7]}))
    assert [row.verdict for row in rows] == ["best", "within the noise"]
    assert [row.verdict for row in rows_of(results({"1": [0.0, 0.0], "2": [0.0, 0.0]}))] == ["best", "within the noise"]


@pytest.mark.parametrize(("points", "seeds"), [(2, 3), (4, 3), (20, 10)])
def test_sweeps_without_a_difference_rarely_call_a_point_worse(points: int, seeds: int) -> None:
    draw, wrong = random.Random(0), 0
    for _ in range(200):
        rows = rows_of(results({str(point): [draw.gauss(4, 0.02) for _ in range(seeds)] for point in range(points)}))
        wrong += any(row.verdict == "worse" for row in rows)
    assert wrong / 200 < sweep_report.LEVEL + 0.04  # 2.6 standard deviations of 200 draws


def test_a_noisy_point_does_not_hide_the_differences_of_others() -> None:
    rows = rows_of(results({"1": [4.20, 4.22, 4.18], "2": [4.50, 4.52, 4.51], "3": [5.0, 7.0, 9.0]}))
    assert [row.verdict for row in rows] == ["best", "worse", "within the noise"]


def test_a_point_with_one_run_has_the_noise_of_the_others() -> None:
    rows = rows_of(results({"1": [4.20, 4.22, 4.18], "2": [4.9], "3": [4.21]}))
    assert [row.verdict for row in rows] == ["best", "within the noise", "worse"]


def rows_in(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_loss_of_a_run(tmp_path: Path) -> None:
    def loss(*rows: dict[str, Any], code: int = 0) -> float | None:
        return sweep_report.result_of("", (), 0, rows_in(tmp_path, *rows), code, 10).loss

    training = [{"step": step, "loss": step / 10} for step in range(10, 101, 10)]
    assert loss(*training) == 10.0, "the last tenth of 100 steps"
    assert loss(*training[:-1], {"step": 96, "loss": 3.0}, training[-1]) == 10.0, "resumed after step 95"
    assert loss({"step": 7, "loss": 6.0, "unregularized_loss": 4.0}) == 4.0
    assert loss({"step": 7, "loss": 6.0, "unregularized_loss": 4.0, "label_loss": 3.0}) == 3.0, "beside a teacher"
    assert loss(*training, {"step": 50, "validation_loss": 4.0}, {"step": 100, "validation_loss": 3.0}) == 3.0
    assert loss(*training, {"step": 50, "validation_loss": 4.0}, {"step": 100, "validation_loss": None}) is None
    assert loss(*training[:-1], {"step": 100, "loss": None}) is None
    assert loss(*training, code=3) is None
    assert loss() is None


def test_chances_are_those_of_a_table_of_student() -> None:
    for t, freedom in ((12.706, 1), (2.776, 4), (2.042, 30)):
        assert chance(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert chance(0, 3) == pytest.approx(1)


def test_a_run_of_another_job_is_not_taken_for_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = planted(tmp_path, {"1e-3": [4.2], "2e-3": [4.1]})
    messages = refusal(capsys, *words, "--", "--training.steps", "7")
    assert [message.partition(":")[0] for message in messages] == ["lr=1e-3,seed=0", "lr=2e-3,seed=0"]
    assert "training.steps was 300 and is 7" in messages[0]
    assert "use another --to, or remove the folder" in messages[0]
    for option in (["--report"], ["--only", "0"]):
        assert "training.steps was 300 and is 7" in refusal(capsys, *words, *option, "--", "--training.steps", "7")[0]
    assert main([os.path.relpath(RECIPE), *words]) == 0, "the same recipe by another path"


def test_a_recipe_that_changes_during_a_sweep_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE.read_text())
    one, other = runs_of(recipe, {"optimizer.lr": ["1e-3", "2e-3"]}, 1, tmp_path, [])
    sweep.check_runs([one, other])
    recipe.write_text(RECIPE.read_text().replace("steps = 300", "steps = 3"))
    with pytest.raises(ConfigError, match=r"lr=1e-3,seed=0: the recipe has changed .* training.steps was 300 and is 3"):
        sweep.start(one)
    assert not one.folder.exists()


@pytest.mark.parametrize(("code", "begun"), [(143, 1), (6, 1), (1, 2), (137, 2)])
def test_only_a_stop_of_a_run_stops_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, begun: int
) -> None:
    """6: a second Ctrl-C. 137: killed for its memory."""
    calls = list[Any]()

    def ended(*given: Any) -> int:
        calls.append(given)
        return code

    monkeypatch.setattr(sweep, "run_alone", ended)
    found = sweep.run_all(runs_of(RECIPE, {"optimizer.lr": ["1e-3", "2e-3"]}, 1, tmp_path, []))
    assert (len(calls), found) == (begun, code if begun == 1 else 1)
    said = capsys.readouterr()
    if begun == 2:
        assert f"1/2  lr=1e-3,seed=0  failed with exit code {code}" in said.out
        assert f"exit code {code}; {tmp_path}/lr=1e-3,seed=0/console.log says why" in said.err


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = planted(tmp_path, {"1e-3": [4.2], "2e-3": [4.1]})
    holds = "import sys, time; from components.launch.locks import keep_lock; from pathlib import Path\n"
    holds += "keep_lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", holds, str(tmp_path / sweep.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}) as other:
        try:
            assert other.stdout
            assert other.stdout.readline() == b"held\n"
            assert "another sweep is running there: process" in refusal(capsys, *words)[0]
        finally:
            other.kill()
    with locked(tmp_path / sweep.LOCK, None) as own:
        assert own


def test_the_run_of_a_killed_sweep_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs_of(RECIPE, {}, 1, tmp_path, [])
    run.folder.mkdir()
    holds = "import sys, time; from components.launch.locks import keep_lock; from pathlib import Path\n"
    holds += "keep_lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(2)"
    command = [sys.executable, "-c", holds, str(run.folder / RUN_LOCK)]
    begun = list[bool]()

    def ended(*_: Any) -> int:
        begun.append(is_held(run.folder / RUN_LOCK))
        return 0

    monkeypatch.setattr(sweep, "run_alone", ended)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        assert sweep.start(run) == 0
    assert begun == [False]


def test_a_run_that_takes_its_lock_late_is_waited_for_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of a killed sweep was still tokenizing: the new one ends with 2, and is started once more."""
    (run,) = runs_of(RECIPE, {}, 1, tmp_path, [])
    codes, held = [2, 0], [False, True, True, False]
    monkeypatch.setattr(sweep, "run_alone", lambda *_: codes.pop(0))
    monkeypatch.setattr(sweep, "is_held", lambda _: held.pop(0))
    assert sweep.start(run) == 0
    assert not held


def test_a_job_array_of_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With stand-ins for the sweep and for scontrol: a task that was stopped after it saved is queued again."""
    folder = tmp_path / "with spaces"
    words = ["--grid", "optimizer.lr=1e-3,2e-3", "--seeds", "3", "--to", str(folder)]
    assert main([str(RECIPE), *words, "--slurm=-p debug --comment='a b'", "--", "--training.steps", "9"]) == 0
    script = folder / "sweep.sbatch"
    assert capsys.readouterr().out == f"sbatch '{script}'\n"
    lines = script.read_text().splitlines()
    log = f"#SBATCH --output='{folder}/slurm-%a.log'"
    assert {"#SBATCH --array=0-5", "#SBATCH -p debug --comment='a b'", log} <= {*lines}
    (report,) = [line for line in lines if "--report" in line]
    assert report.endswith("--report -- --training.steps 9")
    stand_in = tmp_path / "stand_in"
    stand_in.write_text('#!/bin/sh\necho "$(basename "$0")" "$@" >> "$RECORD"\nexit 143\n')
    stand_in.chmod(0o755)
    (tmp_path / "scontrol").symlink_to(stand_in)
    replaced = script.read_text().replace(sys.executable, str(stand_in))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    environment |= {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_JOB_ID": "77"}
    assert subprocess.run(["bash", "-c", replaced], env=environment).returncode == 143
    task, queued = (tmp_path / "record").read_text().splitlines()
    assert task.startswith("stand_in -m components.sweep ")
    assert task.endswith("--only 4 -- --training.steps 9")
    assert queued == "scontrol requeue 77_4"


def test_tasks_of_an_array_are_not_checked_by_this_machines_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--grid", "optimizer.lr=1e-3,2e-3", "--to", str(tmp_path)]
    float8 = ["--", "--model.converters", '["quantize.linear.float8"]', "--training.mixed_precision_param", "bfloat16"]
    assert "float8 needs CUDA" in refusal(capsys, *words, *float8)[0]
    assert main([str(RECIPE), *words, "--slurm", *float8]) == 0


@pytest.mark.slow
def test_a_sweep_of_six_that_is_killed_three_times_runs_none_twice(tmp_path: Path) -> None:
    """Killed with its ranks, killed alone, and stopped by Ctrl-C: each time the run that it was in goes on."""
    command = [sys.executable, "-m", "components.sweep", *small.words(tmp_path)]
    environment = {**os.environ, "NGPU": "1", "OMP_NUM_THREADS": "1"}
    runs = small.runs(tmp_path)

    def begin() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def steps(number: int) -> list[int]:
        return [row["step"] for row in read_rows(runs[number].folder / "metrics.jsonl") if "loss" in row]

    for number, number_of_signal, whole in (
        (1, signal.SIGKILL, True),
        (2, signal.SIGKILL, False),
        (4, signal.SIGINT, True),
    ):
        process = begin()
        wait_until(lambda number=number: len(steps(number)) > 30)  # type: ignore[misc]
        (os.killpg if whole else os.kill)(process.pid, number_of_signal)
        finish(process)
        assert process.returncode == (-9 if number_of_signal == signal.SIGKILL else 130)
        assert [run.ended for run in runs] == [True] * number + [False] * (6 - number)
    process = begin()
    out, err = finish(process)
    assert process.returncode == 0, err
    assert [run.state["starts"] for run in runs] == [1, 2, 2, 1, 2, 1]
    for number, run in enumerate(runs):
        assert steps(number) == [*range(1, small.STEPS + 1)], "each step once"
        said = (run.folder / "console.log").read_text()
        assert len(re.findall(r"continuing after step \d+", said)) == run.state["starts"] - 1
    (table,) = [part for part in out.split("\n\n") if "verdict" in part]
    assert len(table.strip().splitlines()) == 1 + 6
    assert "noise unknown" in table
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_tasks_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["--grid", "optimizer.lr=1e-3,2e-3", "--to", str(tmp_path), "--ray"]
    settings = [
        word for key, value in (small.SETTINGS | {"training.steps": 5}).items() for word in (f"--{key}", str(value))
    ]
    assert main([str(RECIPE), *words, "--", *settings]) == 0
    assert all(run.ended for run in runs_of(RECIPE, parse_grid([words[1]]), 1, tmp_path, settings))
