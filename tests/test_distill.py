"""Distillation: the loss and gradients of a formula of whole logits, at every layout; a teacher's rows."""

import functools
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from components.commands.teach import job_of_teacher, teach_on
from components.config import ROOT, ConfigError, JobConfig, load_config
from components.config.tables import Distill
from components.data.datasets import build_datasets, open_datasets
from components.data.loader import batch_of
from components.data.teacher import fill, made_up
from components.data.teacher_rows import Taught, TeacherRows
from components.state.weights import export
from models.divergence import divergence
from models.layers import Head
from models.objective import objective_of
from parallelize.mesh import Degrees
from parallelize.rules import check_layout
from parallelize.tensor import _columns_of, _total, gathered_softmax, vocabulary_parallel_softmax
from tests.harness import observe, rewrite

VOCABULARY, K = 18, 4


def formula(logits: Tensor, labels: Tensor, teacher: Tensor, alpha: float, temperature: float, k: int = K) -> Tensor:
    """(1 - alpha) cross-entropy + alpha T^2 KL, of whole distributions that are merged into k + 1 classes."""
    ids = teacher.topk(k).indices
    student, taught = ((each / temperature).log_softmax(1).exp() for each in (logits, teacher))
    known = [torch.zeros_like(each).bool().scatter(1, ids, True) for each in (student, taught)]
    merged = [
        torch.cat([each.gather(1, ids), each.masked_fill(here, 0).sum(1, keepdim=True)], 1)
        for each, here in zip((student, taught), known, strict=True)
    ]
    own, other = (each[:, : k + (k < logits.shape[1])] for each in merged)
    kl = (other * (other.log() - own.log())).sum(1)[labels != -100].sum()
    return (1 - alpha) * F.cross_entropy(logits, labels, reduction="sum") + alpha * temperature**2 * kl


def rows_of(teacher: Tensor, temperature: float, k: int = K) -> dict[str, Tensor]:
    found = (teacher / temperature).log_softmax(1).topk(k)
    return {"teacher_ids": found.indices[None].int(), "teacher_log_probabilities": found.values[None].float()}


def compared(run: train.Run, alpha: float, temperature: float, k: int) -> list[float]:
    """Relative errors of the loss, and of its gradients in hidden states and weights."""
    mesh, generator = run.mesh["tp"], torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 16, generator=generator, requires_grad=True)
    weights = torch.randn(VOCABULARY, 16, generator=generator, requires_grad=True)
    teacher = 3 * torch.randn(24, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (24,), generator=generator)
    labels[::5] = -100
    exact = hidden.double() @ weights.double().T
    expected_loss = formula(exact, labels, teacher, alpha, temperature, k)
    expected = [expected_loss, *torch.autograd.grad(expected_loss, (hidden, weights))]
    shares = F.pad(weights.detach(), (0, 0, 0, -VOCABULARY % mesh.size())).chunk(mesh.size())
    rows = shares[mesh.get_local_rank()].clone().requires_grad_()
    head = Head(16, VOCABULARY)
    head.objective = objective_of("next_token", alpha=alpha, temperature=temperature)
    if mesh.size() > 1:
        split = vocabulary_parallel_softmax if run.config.parallelism.loss_parallel else gathered_softmax
        head.softmax = functools.partial(split, mesh=mesh, vocabulary=VOCABULARY)
        places = functools.partial(_columns_of, mesh=mesh)
        head.divergence = functools.partial(divergence, columns_of=places, total=functools.partial(_total, mesh=mesh))
    columns = rows_of(teacher, temperature, k)
    loss = head.loss(hidden[None], rows, labels[None], columns)
    of_hidden, of_rows = torch.autograd.grad(loss, (hidden, rows))
    dist.all_reduce(of_hidden, group=mesh.get_group())
    all_rows = [torch.empty_like(of_rows) for _ in range(mesh.size())]
    dist.all_gather(all_rows, of_rows, group=mesh.get_group())
    head.logged = None
    with torch.no_grad():
        validated = head.loss(hidden[None], rows, labels[None], columns)
    whole = F.cross_entropy(exact, labels, reduction="sum")
    torch.testing.assert_close(validated.double(), whole, rtol=1e-6, atol=0)
    assert head.logged is not None
    of_labels, of_teacher = head.logged.tolist()
    assert of_labels == pytest.approx(validated.item())
    assert (1 - alpha) * of_labels + alpha * temperature**2 * of_teacher == pytest.approx(loss.item(), rel=1e-6)
    found = [loss, of_hidden, torch.cat(all_rows)[:VOCABULARY]]
    return [((got - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("ranks", "split"), [(1, "true"), (2, "true"), (4, "true"), (4, "false")])
@pytest.mark.parametrize(
    ("alpha", "temperature", "k"), [(0.5, 1.0, K), (0.7, 2.0, K), (1.0, 0.5, 1), (1.0, 3.0, VOCABULARY)]
)
def test_loss_and_gradients_are_those_of_whole_logits(
    ranks: int, split: str, alpha: float, temperature: float, k: int
) -> None:
    words = ("--parallelism.tensor_parallel_degree", str(ranks), "--parallelism.loss_parallel", split)
    at_end = functools.partial(compared, alpha=alpha, temperature=temperature, k=k)
    assert max(observe(*words, "--model.flavor", "many_heads", ranks=ranks, steps=0, at_end=at_end).extra) < 1e-6


WORDS = (
    *("--model.flavor", "many_heads_odd_vocabulary"),
    *("--validation.enable", "true", "--validation.held_out_fraction", "0.02"),
)
TOP, TEMPERATURE = 8, 2.0
LAYOUTS = {
    "fsdp 2": ("--training.local_batch_size", "18"),
    "tp 2": ("--parallelism.tensor_parallel_degree", "2"),
    "cp 2": ("--parallelism.context_parallel_degree", "2"),
    "pp 2": (
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "6"),
        *("--parallelism.pipeline_parallel_schedule", "1F1B"),
    ),
}


def job_of(run: train.Run, cache: Path) -> JobConfig:
    """The run's job with a teacher, few data, and its own cache."""
    config = run.config
    few = ROOT / "assets" / "kjv" / "08-ruth.txt"
    training = replace(config.training, dataset_path=str(few), dataset_cache=str(cache))
    return replace(config, training=training, distill=Distill(alpha=0.5, top=TOP, temperature=TEMPERATURE))


def export_it(run: train.Run, folder: Path) -> None:
    (model,) = run.stages
    export(model, dict(model.named_parameters()), folder, run.config.model.hf_assets_path, torch.float32)  # type: ignore[arg-type]


def rows_and_expected(run: train.Run, folder: Path, cache: Path) -> list[tuple[Tensor, ...]]:
    """Ids and log-probabilities of each dataset as written, and the teacher's log-probabilities of all tokens."""
    (model,) = run.stages
    config, found = job_of(run, cache), list[tuple[Tensor, ...]]()
    teach_on(run.device, config, folder)
    for part in build_datasets(config, 1024):
        assert part is not None
        numbers = np.arange(len(part))
        batch = batch_of(part, numbers, document_mask=False)
        ids, logs = batch.pop("teacher_ids"), batch.pop("teacher_log_probabilities")
        with torch.no_grad():
            logits = model(batch["tokens"], positions=batch["positions"]).double()
        found.append((ids, logs, (logits / TEMPERATURE).log_softmax(-1)))
    return found


def rows(run: train.Run, folder: Path, cache: Path) -> list[dict[str, bytes]]:
    """The files of all rows."""
    return [
        {file.name: file.read_bytes() for file in sorted(each.iterdir())}
        for each in teach_on(run.device, job_of(run, cache), folder)
    ]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder of random weights; its rows by one process, with all of its log-probabilities."""
    folder, cache = tmp_path_factory.mktemp("teacher") / "model", tmp_path_factory.mktemp("cache")
    observe(*WORDS, steps=0, at_end=functools.partial(export_it, folder=folder))
    at_end = functools.partial(rows_and_expected, folder=folder, cache=cache)
    return folder, observe(*WORDS, steps=0, at_end=at_end).extra


def test_rows_are_the_teachers_likeliest_tokens(teacher: tuple[Path, list[Any]]) -> None:
    for ids, logs, expected in teacher[1]:
        best = expected[..., :1024].topk(TOP)  # the model has three rows more than there are tokens
        torch.testing.assert_close(logs.double(), best.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(expected.gather(2, ids.long()), best.values, rtol=0, atol=1e-5)
    assert len(teacher[1]) == 2, "training and held-out data"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_the_same_rows(layout: str, teacher: tuple[Path, list[Any]], tmp_path: Path) -> None:
    at_end = functools.partial(rows, folder=teacher[0], cache=tmp_path)
    written = observe(*WORDS, *LAYOUTS[layout], ranks=2, steps=0, at_end=at_end).extra
    for files, (ids, logs, expected) in zip(written, teacher[1], strict=True):
        own_ids = torch.from_numpy(np.frombuffer(files["ids.bin"], np.uint16).astype(np.int64)).view(ids.shape)
        own_logs = torch.from_numpy(np.frombuffer(files["log_probabilities.bin"], np.float32).copy()).view(ids.shape)
        torch.testing.assert_close(own_logs, logs, rtol=0, atol=1e-5)
        torch.testing.assert_close(expected.gather(2, own_ids), logs.double(), rtol=0, atol=1e-5)
        assert (own_ids == ids).float().mean() > 0.999, "only tokens of equal probability change places"


def test_the_teacher_keeps_nothing_of_the_students_optimizer(teacher: tuple[Path, list[Any]]) -> None:
    config = load_config(["--model.name", "qwen3", "--model.flavor", "0.6B", "--optimizer.mup_base", "0.6B"])
    check_layout(job_of_teacher(config, teacher[0]), Degrees())


class Killed(Exception):
    """What ends a writer."""


def test_a_killed_writer_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ["--training.dataset_path", str(ROOT / "assets" / "kjv" / "08-ruth.txt"), "--distill.top", "4"]
    words += ["--distill.alpha", "0.5", "--training.dataset_cache", str(tmp_path), "--training.seq_len", "32"]
    config = load_config(words)
    without = replace(config, distill=Distill())
    (sequences, _) = open_datasets(without, 4096)
    score, asked = made_up(4, 1024, sequences), list[int]()

    def until(last: int) -> Callable[[np.ndarray], Taught]:
        def scored(numbers: np.ndarray) -> Taught:
            asked.append(int(numbers[0]))
            if asked[-1] >= last:
                raise Killed
            return score(numbers)

        return scored

    with pytest.raises(ConfigError, match=r"no teacher's rows for the training data.*data teach RECIPE --teacher"):
        open_datasets(config, 4096)
    with pytest.raises(Killed):
        fill(config, sequences, "a", 1024, until(20), 5)
    with pytest.raises(ConfigError, match="no teacher's rows"):
        open_datasets(config, 4096)
    (staging,) = tmp_path.glob("teachers/*/.staging-a")
    with (staging / "ids.bin").open("ab") as ids:
        ids.write(b"what was not recorded")
    folder = fill(config, sequences, "a", 1024, until(10**9), 5)
    assert asked[:6] == [0, 5, 10, 15, 20, 20]
    (taught, _) = open_datasets(config, 4096)
    for got, want in zip(taught.taught(np.arange(len(taught))) or (), score(np.arange(len(taught))), strict=True):
        np.testing.assert_array_equal(got, want)
    with (folder / "ids.bin").open("r+b") as damaged:
        damaged.seek(7 * 32 * 4 * 2)
        damaged.write(b"\xff\xff")
    (taught, _) = open_datasets(config, 4096)
    taught.taught(np.asarray([6]))
    with pytest.raises(ConfigError, match="rows of sequence 7 are damaged"):
        taught.taught(np.asarray([6, 7]))
    fill(config, sequences, "b", 1024, score, 4096)
    with pytest.raises(ConfigError, match=r"distill.teacher_path is unset, but 2 teachers have rows"):
        open_datasets(config, 4096)


def test_rows_on_a_full_disk_are_told_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--training.dataset_path", str(ROOT / "assets" / "kjv" / "08-ruth.txt"), "--distill.top", "4"]
    words += ["--distill.alpha", "0.5", "--training.dataset_cache", str(tmp_path), "--training.seq_len", "32"]
    config = load_config(words)
    (sequences, _) = open_datasets(replace(config, distill=Distill()), 4096)
    score, most = made_up(4, 1024, sequences), resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ConfigError, match=r"distill\.top = 4: the rows take 0\.0 GiB more .* are free"):
            fill(config, sequences, "a", 1024, score, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most[1]))
    try:
        with pytest.raises(ConfigError, match=r"rows cannot be written: File too large; the same command goes on"):
            fill(config, sequences, "a", 1024, score, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    folder = fill(config, sequences, "a", 1024, score, 5)
    rows = TeacherRows(folder).get(np.arange(len(sequences)))
    for got, want in zip(rows, score(np.arange(len(sequences))), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_token_that_the_student_lacks_is_refused(tmp_path: Path) -> None:
    words = ["--training.dataset_path", str(ROOT / "assets" / "kjv" / "08-ruth.txt"), "--distill.top", "4"]
    config = load_config([*words, "--distill.alpha", "0.5", "--training.dataset_cache", str(tmp_path)])
    (sequences, _) = open_datasets(replace(config, distill=Distill()), 4096)
    fill(config, sequences, "a", 9000, made_up(4, 9000, sequences), 4096)
    with pytest.raises(ConfigError, match=r"a has token 89\d\d, but .*vocab_size = \d+ grows it"):
        open_datasets(config, 4096)


STUDENT = ["teach", str(ROOT / "recipes" / "llama_debug.toml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.dataset_streaming", "--validation.no_enable"], "a stream has none"),
        (["--training.dataset_format", "preference"], "preference.loss is what pairs minimise"),
        (["--model.sizes.mtp_layers", "1"], "rows are of the next token alone"),
        ([], r"--teacher nowhere: no such folder$"),
        (["--teacher", "assets"], "has no config.json"),
    ],
)
def test_rows_that_no_run_could_read_are_not_written(words: list[str], said: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "components.data",
            *STUDENT,
            "--teacher",
            "nowhere",
            "--training.dataset_path",
            "x",
            *words,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.search(said, done.stderr.strip())
    assert "Traceback" not in done.stderr


FAULTS = {
    "a teacher's row shifted by one": (
        "models.loss",
        "_LinearLoss.forward",
        "parts = {name: column[rows] for name, column in columns.items()}",
        "parts = {name: column.roll(1, 0)[rows] for name, column in columns.items()}",
    ),
    "a divergence divided by the micro-batches": (
        "models.loss",
        "chunk_loss",
        "by_logits.mul_(found_terms.by_divergence * valid)",
        "by_logits.mul_(found_terms.by_divergence * valid / 6)",
    ),
}
DISTILLED = (*WORDS, "--distill.alpha", "0.5", "--distill.top", "4")


@functools.cache
def one_process() -> Observation:
    return observe(*DISTILLED, steps=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    plant = functools.partial(rewrite, *FAULTS[fault])
    broken = observe(*DISTILLED, *LAYOUTS["pp 2"], ranks=2, steps=2, mutate=plant)
    assert "gradient" in broken_bars(broken, one_process())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_is_one_run_at_every_layout(layout: str) -> None:
    assert not broken_bars(observe(*DISTILLED, *LAYOUTS[layout], ranks=2, steps=2), one_process())


def commands() -> list[str]:
    """The commands of docs/distill.md that train and teach in one process."""
    lines = (ROOT / "docs" / "distill.md").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith(("    ./run_train.sh", "    python -m components.data"))]


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    for name in ("recipes", "assets", "run_train.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    tiny = ["--training.seq_len", "32", "--training.dataset_path", "assets/kjv/08-ruth.txt", "--training.steps", "2"]
    tiny += ["--lr_scheduler.warmup_steps", "1", "--training.dataset_cache", str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "NGPU": "1"}
    for line in commands():
        words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        done = subprocess.run([*words, *tiny], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    distilled, plain = (
        [json.loads(row) for row in (tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("llama_debug_distill", "plain")
    )
    step = next(row for row in distilled if "loss" in row)
    assert step["loss"] == pytest.approx(0.3 * step["label_loss"] + 0.7 * step["teacher_divergence"], rel=1e-5)
    assert step["label_loss"] == pytest.approx(next(row["loss"] for row in plain if "loss" in row), rel=1e-6)
    validated = next(row for row in distilled if "validation_loss" in row)
    assert validated["validation_label_loss"] == pytest.approx(validated["validation_loss"])
    assert validated["validation_teacher_divergence"] > 0
