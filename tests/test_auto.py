"""parallelism.auto: the layout of a job is filled in at launch, kept by a resume, and refused where nothing fits."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import train
from components.commands import dry_run, prove, start
from components.commands.start import check
from components.config import ROOT, ConfigError, JobConfig, absolute_tables, load_config, to_json
from parallelize.groups import gather
from parallelize.mesh import resolve_degrees
from parallelize.plan import auto
from parallelize.plan.auto import filled
from parallelize.plan.devices import name_of_gpu
from parallelize.plan.search import with_settings
from parallelize.rules import checked
from parallelize.together import check_filled
from tests.harness import observe

SHARD = "parallelism.data_parallel_shard_degree"
OTHER: dict[str, Any] = {SHARD: 1, "parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 3}
OTHER |= {"activation_checkpoint.mode": "full", "activation_checkpoint.selective_ac_option": "2"}
"""A layout that is not the fastest, because it computes all layers twice."""


def job(folder: Path, *words: str) -> JobConfig:
    """A job of 6 sequences a step, which is no multiple of the default of training.local_batch_size."""
    given = ["--job.dump_folder", str(folder), "--model.name", "llama", "--model.flavor", "debug"]
    given += ["--training.seq_len", "64", "--training.global_batch_size", "6", "--checkpoint.enable"]
    return load_config([*given, "--parallelism.auto", *words])


def fill(config: JobConfig, ranks: int = 2, nodes: int = 1) -> JobConfig:
    return filled(config, ranks, nodes, on_gpu=False)


def leave(folder: Path, config: JobConfig, ranks: int = 2) -> None:
    """The files of a run that can be resumed."""
    (folder / "checkpoint" / "step-3").mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"ranks": ranks, "config": absolute_tables(config)}))


def test_the_layout_is_filled_in_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fill(job(tmp_path))
    assert resolve_degrees(found, 2).world_size == 2
    assert 6 % found.training.local_batch_size == 0
    assert absolute_tables(found)["parallelism"]["auto"], "run.json says that the layout was filled in"
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("parallelism.auto, 2 x cpu: ")
    assert " of 15.5 GiB, " in said
    assert "tokens/s a device" in said
    manual = replace(found, parallelism=replace(found.parallelism, auto=False))
    assert fill(manual) is manual


def test_keys_that_are_set_are_kept(tmp_path: Path) -> None:
    found = fill(job(tmp_path, "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "3"))
    assert (found.parallelism.tensor_parallel_degree, found.training.local_batch_size) == (2, 3)


def test_a_resume_keeps_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layout that is kept is not the one of a new plan."""
    before = with_settings(job(tmp_path), OTHER)
    leave(tmp_path, before)
    again = fill(job(tmp_path))
    assert (again.parallelism, again.training) == (before.parallelism, before.training)
    assert "kept from run.json, but today's plan is " in capsys.readouterr().out
    leave(tmp_path, fill(job(tmp_path / "new")))
    capsys.readouterr()
    fill(job(tmp_path))
    assert capsys.readouterr().out.endswith("; kept from run.json\n")


def test_a_resume_keeps_its_layout_though_none_fits_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = with_settings(job(tmp_path), OTHER)
    leave(tmp_path, before)
    text = (ROOT / "parallelize/plan/devices.toml").read_text(encoding="utf-8").partition("[cpu]")[2]
    (tmp_path / "tiny.toml").write_text("[tiny]" + text.replace("memory_gib = 16.0", "memory_gib = 0.51"))
    again = fill(job(tmp_path, "--parallelism.auto_device", str(tmp_path / "tiny.toml")))
    assert again.parallelism.data_parallel_replicate_degree == 2
    assert "kept from run.json, but no layout fits today" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["ranks", "key", "refused", "torn", "list", "manual", "no checkpoint", "word"])
def test_a_layout_that_does_not_suit_is_not_kept(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = with_settings(job(tmp_path), OTHER | ({SHARD: "1"} if change == "word" else {}))
    if change == "manual":
        before = replace(before, parallelism=replace(before.parallelism, auto=False))
    leave(tmp_path, before, 4 if change == "ranks" else 2)
    if change in ("torn", "list"):
        (tmp_path / "run.json").write_text('{"ranks": 2, "con' if change == "torn" else '{"ranks": 2, "config": []}')
    if change == "no checkpoint":
        (tmp_path / "checkpoint" / "step-3").rmdir()
    words = {"key": (f"--{SHARD}", "2"), "refused": ("--training.global_batch_size", "4")}.get(change, ())
    capsys.readouterr()
    assert fill(job(tmp_path, *words)).activation_checkpoint.mode == "none"
    said = capsys.readouterr().out
    assert "kept" not in said
    assert ("a new layout, because" in said) == (change not in ("manual", "no checkpoint"))
    assert change != "ranks" or "one of 4 ranks" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--parallelism.auto_device", "h101"), 'auto_device = "h101": not one of h100-80g'),
        (("--parallelism.auto_device", "no such.toml"), "No such file"),
        (("--training.global_batch_size", "5"), "no layout of 2 x cpu fits or is accepted"),
        (("--parallelism.pipeline_parallel_degree", "3"), "no layout of 2 x cpu fits or is accepted"),
        (("--model.flavor", "9B"), "not one of debug, 1B"),
        (("--model.flavor", "8B", "--training.global_batch_size", "8"), "the nearest is .* of 15.5 GiB"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    words = ("--parallelism.data_parallel_shard_degree", "2", *words) if words[1] == "5" else words
    with pytest.raises(ConfigError, match=reason):
        fill(job(tmp_path, *words))


def test_devices_are_found_by_the_names_of_their_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [name_of_gpu(name) for name in ("", "NVIDIA H100 80GB HBM3")] == ["cpu", "h100-80g"]
    with pytest.raises(ConfigError, match=r"GeForce: no device .* name one of them"):
        name_of_gpu("GeForce")
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert auto._gpu() == "NVIDIA H200"
    command.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert auto._gpu() == ""


def test_the_launcher_the_dry_run_and_the_proof_fill_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's job is what ranks get; plain torchrun is refused, because each rank would plan by itself."""
    words = ["--job.config_file", str(_file(tmp_path)), "--comm.mode", "fake_backend"]
    config, _ = check(words, {"NGPU": "2"})
    assert resolve_degrees(config, 2).world_size == 2
    with pytest.raises(ConfigError, match=r"parallelism.auto = true: only ./run_train.sh fills in a layout"):
        checked(load_config(words))
    filled_by = []

    def ends(config: JobConfig, *rest: object) -> None:
        filled_by.append(config.parallelism)
        raise InterruptedError

    monkeypatch.setattr(prove, "shrink", ends)
    with pytest.raises(InterruptedError):
        prove.main(words)
    assert filled_by == [config.parallelism]
    monkeypatch.setattr(dry_run, "dry_run", ends)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for argv in (words, [to_json(config)]):
        with pytest.raises(InterruptedError):
            dry_run.main(argv)
    assert filled_by == [config.parallelism] * 3


def test_a_proof_plans_for_the_devices_that_the_launch_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher hides GPUs from the proof, and says how many there are; they are as many ranks."""
    words, asked = ["--job.config_file", str(_file(tmp_path))], list[tuple[Any, ...]]()

    def ends(*given: Any) -> None:
        asked.append(given[1:])
        raise InterruptedError

    monkeypatch.setattr(prove, "filled", ends)
    for count, environment in ((0, {}), (8, {}), (8, {"NGPU": "4"}), (10, {"NNODES": "2"})):
        monkeypatch.setattr(start, "gpus", lambda count=count: count)
        monkeypatch.setattr(start, "run_alone", lambda module, argv, variables: variables)
        given: Any = start.main(["--prove", *words])
        for name, value in (given | environment).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InterruptedError):
            prove.main(words)
        for name in ("NGPU", "NNODES"):
            monkeypatch.delenv(name, raising=False)
    assert asked == [(2, 1, False), (8, 1, True), (4, 1, True), (20, 2, True)]
    monkeypatch.setenv("NGPU", "two")
    assert prove.main(words) == 2


def _file(folder: Path) -> Path:
    """A job file whose path has a space."""
    path = folder / "my job.toml"
    text = '[job]\ndump_folder = "out"\n[model]\nname = "llama"\nflavor = "debug"\n[parallelism]\nauto = true\n'
    path.write_text(text + "[training]\nseq_len = 64\nglobal_batch_size = 8\n")
    return path


def _apart(run: train.Run) -> list[str]:
    """What ranks say to jobs that are filled in alike, and to jobs that are not."""
    own = replace(run.config, parallelism=replace(run.config.parallelism, auto=True))
    check_filled(own)
    try:
        check_filled(replace(own, training=replace(own.training, local_batch_size=1 + dist.get_rank())))
    except ConfigError as error:
        return gather(str(error))
    return gather("")


def test_nodes_that_fill_in_different_layouts_are_refused() -> None:
    words = ("--training.local_batch_size", "18")
    for said in observe(*words, ranks=2, steps=0, at_end=_apart).extra:
        assert "nodes have filled in different layouts" in said


def test_jobs_without_it_import_no_planner() -> None:
    code = "import sys, components.commands.start as s; print([m for m in sys.modules if 'plan.' in m or m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['parallelize.plan.auto']"
