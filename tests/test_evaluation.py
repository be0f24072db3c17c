"""Scores on lm-eval's tasks while a model trains: those of lm-eval on its export, at every layout."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from components.commands.observed import whole_weights
from components.config import ConfigError, load_config
from components.observe.evaluation import Evaluation, check_evaluation
from components.observe.report import evaluation_panels
from components.state.weights import export
from models import meta_model
from tests.harness import observe, rewrite
from tests.layouts import layout
from tests.test_samples import NeverStop, scorer_of

TASKS = [f"tests/lm_eval_task/{name}.yaml" for name in ("genesis", "cloze", "rolling")]
ROOM = 24
"""Tokens of a sequence: fewer than some requests have."""
GIVEN = ("--evaluation.tasks", json.dumps(TASKS), "--training.seq_len", str(ROOM))
LAYOUTS: list[dict[str, str]] = [{"dp": "fsdp 2"}, {"tp": "2", "vocabulary": "1027"}, {"pp": "2"}, {"cp": "2"}]
Found = tuple[dict[str, dict[str, Any]], dict[Any, tuple[float, bool]]]
"""Numbers of each task, and the log-likelihood of each request with whether all its tokens were likeliest."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")


def evaluated(run: train.Run, folder: Path | None = None) -> Found:
    """What rank 0 finds, after the second evaluation; with a folder the model is exported too."""
    stop: Any = NeverStop()
    evaluation = Evaluation(run.config, scorer_of(run))
    first, again = (evaluation.see(step, stop) for step in (1, 2))
    assert first == again
    if folder:
        config = run.config
        export(meta_model(config.model), whole_weights(run), folder, config.model.hf_assets_path, torch.float32)
    assert again is not None
    return again, evaluation._tasks._model.known if evaluation._tasks else {}


def of_one(each: dict[str, str], **options: Any) -> Found:
    return observe(*layout(**each).run(), *GIVEN, steps=2, at_end=functools.partial(evaluated, **options)).extra


def of_ranks(each: dict[str, str], mutate: Any = None) -> Found:
    return observe(*layout(**each).overrides(), *GIVEN, ranks=2, steps=2, at_end=evaluated, mutate=mutate).extra


def of_lm_eval(folder: Path) -> Found:
    """The same of lm-eval's own `hf` model on an export."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder), dtype="float32", add_bos_token=True, max_length=ROOM, device="cpu")
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model=model, tasks=TASKS, bootstrap_iters=0, task_manager=manager)
    numbers = {
        task: {key.removesuffix(",none"): value for key, value in row.items() if isinstance(value, float)}
        for task, row in found["results"].items()
    }
    known: dict[Any, tuple[float, bool]] = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            for arguments, (answer,) in zip(sample["arguments"], sample["resps"], strict=True):
                kind = "loglikelihood_rolling" if task == "rolling" else "loglikelihood"
                known[kind, tuple(arguments)] = answer if task != "rolling" else (answer, False)
    return numbers, known


def difference(found: Found, other: Found) -> float:
    """The largest relative difference of a likelihood or a metric; infinite if other tokens were likeliest."""
    (numbers, known), (their_numbers, theirs) = found, other
    assert known.keys() == theirs.keys()
    pairs = [(known[key][0], theirs[key][0]) for key in known]
    if any(known[key][1] != theirs[key][1] for key in known if key[0] == "loglikelihood"):
        return float("inf")
    pairs += [(numbers[task][key], value) for task, row in their_numbers.items() for key, value in row.items()]
    return max(abs(one - two) / max(1e-9, abs(two)) if two else abs(one) for one, two in pairs)


@pytest.mark.slow
def test_numbers_are_those_of_lm_eval_on_the_export_at_every_layout(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    one = of_one({}, folder=tmp_path / "export")
    theirs = of_lm_eval(tmp_path / "export")
    assert len(one[1]) == 12 + 4 + 4
    assert [row["documents"] for row in one[0].values()] == [4, 4, 4]
    assert {"acc", "perplexity", "word_perplexity"} <= {key for row in one[0].values() for key in row}
    figures = {"one": difference(one, theirs)}
    for each in LAYOUTS:
        figures[str(each)] = difference(of_ranks(each), of_one(each))
    print(figures)
    assert max(figures.values()) <= 1e-5
    fault = functools.partial(
        rewrite, "components.observe.evaluation", "Evaluation.likelihoods", "label[-count:]", "label[-count - 1 : -1]"
    )
    shifted = observe(*layout().run(), *GIVEN, steps=2, at_end=evaluated, mutate=fault).extra
    assert difference(shifted, theirs) > 1e-3, "a continuation that is shifted by one token"
    order = functools.partial(
        rewrite, "parallelize.scores", "Scorer.of_batch", 'load_balancer == "headtail"', 'load_balancer == ""'
    )
    assert difference(of_ranks({"cp": "2"}, order), one) > 1e-3, "parts of a sequence in another order"


def failing(run: train.Run) -> list[Any]:
    stop: Any = NeverStop()
    evaluation = Evaluation(run.config, scorer_of(run))
    return [evaluation.see(step, stop) for step in (1, 2)]


@pytest.mark.slow
def test_a_task_that_fails_ends_no_training() -> None:
    fault = functools.partial(
        rewrite, "components.observe.tasks", "Tasks.numbers", "left = iter(found)", "left = 1 / 0"
    )
    given = ("--evaluation.tasks", json.dumps(TASKS[:1]))
    words = (*layout(dp="ddp 2").overrides(), *given)
    assert observe(*words, ranks=2, steps=1, at_end=failing, mutate=fault).extra == [None, None]


@pytest.mark.slow
def test_tasks_are_checked_before_the_start(tmp_path: Path) -> None:
    generates = tmp_path / "generates.yaml"
    text = Path(TASKS[1]).read_text().replace("task: cloze", "task: generates")
    generates.write_text(text.replace("output_type: loglikelihood", "output_type: generate_until"))
    missing = tmp_path / "missing.yaml"
    missing.write_text(Path(TASKS[1]).read_text().replace("genesis.jsonl", "nowhere.jsonl"))
    tasks = [*TASKS[:1], str(generates), str(missing), "hellaswagg"]
    with pytest.raises(ConfigError) as caught:
        check_evaluation(load_config(["--evaluation.tasks", json.dumps(tasks)]))
    generated, lost, named = caught.value.messages
    assert "generates has the type generate_until, which needs generated text: evaluate it on an export" in generated
    assert "nowhere.jsonl" in lost
    assert named == 'evaluation.tasks: "hellaswagg": neither a file nor a task of lm-eval; did you mean hellaswag?'
    with pytest.raises(ConfigError, match=r"an answer has 10 tokens; training.seq_len = 8 takes from 1 to 8"):
        check_evaluation(load_config(["--evaluation.tasks", json.dumps(TASKS[:1]), "--training.seq_len", "8"]))


def test_without_lm_eval_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_evaluation(load_config([]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"evaluation.tasks = \['a'\]: needs lm-eval: pip install .lm-eval"):
        check_evaluation(load_config(["--evaluation.tasks", '["a"]']))


def test_a_report_has_a_panel_for_each_metric() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 5, "evaluation": {"a/acc": 0.5, "b/acc": 0.25, "b/perplexity": 9.0}},
        {"step": 6, "loss": 1.0},
    ]
    panels = evaluation_panels(rows)
    assert [(panel.title, dict(panel.lines)) for panel in panels] == [
        ("acc", {"a": ([5], [0.5]), "b": ([5], [0.25])}),
        ("perplexity", {"b": ([5], [9.0])}),
    ]
    assert evaluation_panels(rows[1:]) == []
