"""What a model says while it trains: the same words at every layout, at the right steps, and in every file."""

import functools
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from components.config import ConfigError, load_config
from components.observe.looks import Looks
from components.observe.metrics import Metrics
from components.observe.samples import Samples, choose, read_prompts
from components.observe.trackers import trackers
from parallelize.scores import Scorer
from tests.harness import observe, rewrite
from tests.layouts import layout
from tests.runs import Whole, content, steps_saved
from tests.small import CHATS, SMALL

T = TypeVar("T")
PROMPTS = ("--samples.prompts", '["In the beginning", "And", "thou"]', "--samples.tokens", "8")
DRAWN = ("--samples.temperature", "1.5", "--samples.top_k", "20")
LAYOUTS: list[dict[str, str]] = [
    {"dp": "fsdp 2"},
    {"tp": "2", "vocabulary": "1027"},
    {"pp": "2"},
    {"cp": "2"},
    {"dp": "ddp 2", "data": "chats"},
]


class NeverStop:
    """Stands for a StopSignal that no signal reaches."""

    code = 0

    def agreed(self) -> int:
        return self.code

    def until_agreed(self, batches: Iterable[T]) -> Iterator[T]:
        yield from batches


class StopsAt(NeverStop):
    """Stands for a StopSignal on which the ranks agree after some batches."""

    def __init__(self, batches: int) -> None:
        self.batches, self.seen = batches, 0

    def until_agreed(self, batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            if self.seen == self.batches:
                self.code = 143
                return
            self.seen += 1
            yield batch


def scorer_of(run: train.Run) -> Scorer:
    return Scorer(run.stages, run.runner, run.mesh, run.config)


def said(run: train.Run) -> list[dict[str, Any]]:
    stop: Any = NeverStop()
    return Samples(run.config, scorer_of(run)).see(run.step, stop)


def observed(each: dict[str, str], ranks: int, *more: str, mutate: Any = None) -> list[dict[str, Any]]:
    chosen = layout(**each)
    words = chosen.overrides() if ranks > 1 else chosen.run()
    return observe(*words, *PROMPTS, *more, ranks=ranks, steps=3, at_end=said, mutate=mutate).extra


@pytest.mark.parametrize("more", [(), DRAWN], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("each", LAYOUTS, ids=lambda each: " · ".join(f"{key} {each[key]}" for key in each))
def test_a_layout_says_the_words_of_one_process(each: dict[str, str], more: tuple[str, ...]) -> None:
    found = observed(each, 2, *more)
    assert found == observed(each, 1, *more)
    assert [sample["prompt"] for sample in found] == ["In the beginning", "And", "thou"]
    if more or "data" not in each:  # the likeliest answer of a model that has seen few chats is empty
        assert any(sample["tokens"] for sample in found)


@pytest.mark.parametrize(
    ("each", "fault"),
    [
        ({"cp": "2"}, ("parallelize.scores", "Scorer.of_batch", 'load_balancer == "headtail"', 'load_balancer == ""')),
        (
            {"tp": "2", "vocabulary": "1027"},
            ("parallelize.tensor", "vocabulary_parallel_likeliest", "ids +=", "ids + "),
        ),
        ({"dp": "fsdp 2"}, ("parallelize.scores", "Scorer._of_rows", "* size", "* 0")),
    ],
)
def test_a_planted_fault_changes_the_words(each: dict[str, str], fault: tuple[str, str, str, str]) -> None:
    assert observed(each, 2, mutate=functools.partial(rewrite, *fault)) != observed(each, 1)


def logits_of(run: train.Run) -> list[list[int]]:
    """The continuations, token by token from whole forwards of one text."""
    (model,) = run.stages
    prompts, found = read_prompts(run.config), []
    for ids in prompts.ids:
        text = [*ids]
        for _ in range(run.config.samples.tokens):
            with torch.no_grad():
                token = int(model(torch.tensor([text]))[0, -1, : prompts.tokenizer.vocab_size].argmax())
            if token in prompts.ends:
                break
            text.append(token)
        found.append(text[len(ids) :])
    return found


def test_the_words_are_those_of_the_logits() -> None:
    expected = observe(*layout().run(), *PROMPTS, steps=3, at_end=logits_of).extra
    assert [sample["tokens"] for sample in observed({}, 1)] == expected


def ended(run: train.Run) -> tuple[list[int], list[int]]:
    """The longest text, and the text after its second token is made an end."""
    samples, stop = Samples(run.config, scorer_of(run)), StopsAt(1000)
    whole: Any = samples.see(3, stop)  # type: ignore[arg-type]
    longest = max(range(len(whole)), key=lambda number: len(whole[number]["tokens"]))
    samples._prompts.ends.add(whole[longest]["tokens"][1])
    again: Any = samples.see(3, stop)  # type: ignore[arg-type]
    return whole[longest]["tokens"], again[longest]["tokens"]


def test_a_text_ends_before_an_end_token() -> None:
    whole, cut = observe(*layout().run(), *PROMPTS, *DRAWN, steps=3, at_end=ended).extra
    assert cut == whole[: whole.index(whole[1])]


def test_draws_depend_on_the_key_and_the_position_alone() -> None:
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ids = torch.tensor([7, 8, 9])
    drawn = [choose(shares.log(), ids, 1.0, 5, position) for position in range(3000)]
    assert drawn == [choose(shares.log() - 3, ids, 1.0, 5, position) for position in range(3000)]
    for token, share in zip((7, 8, 9), shares.tolist(), strict=True):
        assert abs(drawn.count(token) / 3000 - share) < 0.03
    assert drawn != [choose(shares.log(), ids, 1.0, 6, position) for position in range(3000)]
    assert {choose(shares.log(), ids, 0.0, 5, position) for position in range(9)} == {7}


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    words = [*SMALL, "--samples.prompts", json.dumps(["And " * 30]), "--samples.tokens", "10"]
    with pytest.raises(
        ConfigError, match=r"samples\.prompts = .*: one has \d+ tokens; .* use prompts of 23 tokens or fewer"
    ):
        read_prompts(load_config(words))
    with pytest.raises(ConfigError, match=r"use fewer samples\.tokens"):
        read_prompts(load_config([*SMALL, "--samples.prompts", '["a"]', "--samples.tokens", "33"]))
    with pytest.raises(ConfigError, match="spells the special token"):
        read_prompts(load_config([*SMALL, *CHATS, "--samples.prompts", '["<|eot_id|>"]']))


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_run_on_chats_answers_with_its_template(kind: str) -> None:
    words = [*SMALL, *CHATS, "--training.seq_len", "64", "--samples.prompts", '["Hi"]', "--samples.tokens", "1"]
    words += ["--training.dataset_format", kind]
    prompts = read_prompts(load_config(words))
    (ids,) = prompts.ids
    assert prompts.tokenizer.decode(ids).endswith("Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert prompts.ends == {prompts.tokenizer.special["<|eot_id|>"]}


def of_looks(run: train.Run) -> list[tuple[int, Any]]:
    """Steps at which something was logged, where each look is stubbed but one; and when the clock was restarted."""
    seen: list[tuple[int, Any]] = []
    metrics: Any = SimpleNamespace(
        log_samples=lambda step, found: seen.append((step, len(found))),
        log_validation=lambda step, loss: seen.append((step, loss)),
        restart_clock=lambda step, tokens: seen.append((step, "clock")),
    )
    looks, stop = Looks(run.config, metrics, lambda stop: [0.5], scorer_of(run)), NeverStop()
    for step in range(8):
        looks.if_due(step, 0, stop)  # type: ignore[arg-type]
    late = StopsAt(0)
    assert looks.if_due(7, 0, late) == 143  # type: ignore[arg-type]
    return seen


def test_looks_are_due_at_their_steps_and_the_last_and_a_stop_ends_them() -> None:
    given = ("--samples.freq", "3", "--validation.enable", "true", "--validation.freq", "4", "--training.steps", "7")
    seen = observe(*PROMPTS, *given, steps=0, at_end=of_looks).extra
    at_start = observe(*PROMPTS, *given, "--validation.at_start", steps=0, at_end=of_looks).extra
    assert at_start == [(0, 0.5), (0, "clock"), *seen]
    last = [(7, 0.5), (7, 3), (7, "clock"), (7, 0.5), (7, "clock")]
    assert seen == [(3, 3), (3, "clock"), (4, 0.5), (4, "clock"), (6, 3), (6, "clock"), *last]


def stopped_looks(run: train.Run) -> list[Any]:
    """What three starts of a run do: a signal comes before the first step, at the last validation, and never."""
    seen: list[Any] = []
    later = StopsAt(1_000)

    def log_validation(step: int, *_: Any) -> None:
        seen.append(f"validation {step}")
        later.batches = later.seen

    metrics: Any = SimpleNamespace(
        log=lambda step, *_, **__: seen.append(step),
        log_validation=log_validation,
        log_dynamics=lambda *_: None,
        restart_clock=lambda *_: None,
    )
    checkpointer: Any = SimpleNamespace(
        save=lambda step, state, only_model, _: seen.append((step, state.get("stopped", False), only_model)),
        poll=lambda: None,
        close=lambda: None,
    )
    for stop in (StopsAt(0), later, NeverStop()):
        seen.append(train.train(run, metrics, checkpointer, stop))  # type: ignore[arg-type]
    return seen


def test_a_run_that_is_stopped_while_it_validates_validates_when_it_goes_on() -> None:
    given = ("--validation.enable", "true", "--validation.freq", "2", "--training.steps", "2", "--checkpoint.enable")
    more = ("--checkpoint.last_save_model_only", "--validation.at_start")
    seen = observe(*layout().run(), *given, *more, steps=0, at_end=stopped_looks).extra
    whole, done = (2, True, False), (2, False, True)
    assert seen == [143, "validation 0", 1, 2, whole, 143, "validation 2", done, 0]


def test_nothing_is_looked_at_without_being_asked_for() -> None:
    assert observe(*layout().run(), "--validation.enable", "false", steps=0, at_end=idle).extra == []


def idle(run: train.Run) -> list[Any]:
    nothing: Any = None
    looks = Looks(run.config, nothing, nothing, nothing)
    stop: Any = NeverStop()
    assert looks.if_due(run.config.training.steps, 0, stop) == 0
    return looks._looks


SAID = [{"prompt": "<And>", "text": " it", "tokens": [3]}]


def metrics_of(folder: Path, *words: str) -> Metrics:
    given = load_config(["--job.dump_folder", str(folder), *words])
    return Metrics(given, 0, torch.device("cpu"), (1, 1), "1 rank")


def test_samples_are_in_a_file_on_the_console_and_in_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = metrics_of(tmp_path, "--metrics.enable_tensorboard")
    metrics.resume(0, 0)
    for step in (2, 4):
        metrics.log_samples(step, SAID)
    metrics.log_evaluation(4, {"genesis": {"acc": 0.5, "documents": 4}})
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows == [{"step": step, **SAID[0]} for step in (2, 4)]
    assert "step 2  <And> →  it\n" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0}).Reload()
    texts = [each.tensor_proto.string_val for each in events.Tensors("samples/1/text_summary")]
    assert texts == [[b"<And> \xe2\x86\x92  it"]] * 2
    assert [each.value for each in events.Scalars("evaluation/genesis/acc")] == [0.5]
    assert json.loads((tmp_path / "evaluation.jsonl").read_text()) == {
        "step": 4,
        "task": "genesis",
        "acc": 0.5,
        "documents": 4,
    }
    again = metrics_of(tmp_path)
    again.resume(2, 0)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1, "step 4 runs again"
    assert (tmp_path / "evaluation.jsonl").read_text() == ""


def test_weights_and_biases_gets_samples_as_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    run = SimpleNamespace(id="a", dir=str(tmp_path), log=lambda row, step: rows.append(row), finish=lambda: None)
    fake = SimpleNamespace(init=lambda **_: run, Settings=dict, Html=lambda text: ("html", text), errors=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tracker,) = trackers(load_config(["--job.dump_folder", str(tmp_path), "--metrics.enable_wandb"]), 0)
    tracker.write({"step": 1, "samples/1": "<And> it", "loss": 1.0})
    tracker.close()
    assert rows == [{"samples/1": ("html", "<p>&lt;And&gt; it</p>"), "loss": 1.0}]


SAMPLES_SLOWLY = """
import time
from components.observe import samples
choose = samples.choose
def slow(*words):
    print("chooses", flush=True)
    time.sleep(0.2)
    return choose(*words)
samples.choose = slow
"""


@pytest.mark.torchrun
def test_a_signal_while_the_model_speaks_saves_and_stops(tmp_path: Path) -> None:
    words = (
        "--samples.prompts",
        '["In"]',
        "--samples.freq",
        "3",
        "--samples.tokens",
        "30",
        "--checkpoint.interval",
        "100",
    )
    whole = Whole(tmp_path, *words, fault=SAMPLES_SLOWLY)
    try:
        whole.wait_until(lambda: any("chooses" in log.read_text() for log in (tmp_path / "logs").glob("*/rank_0.log")))
        whole.process.send_signal(signal.SIGTERM)
        code, output = whole.end()
    finally:
        whole.kill()
    assert code == 128 + signal.SIGTERM, output
    assert "stopped by signal 15 after step 3, saved" in output
    assert steps_saved(tmp_path) == [3]
    assert content(tmp_path, 3)
    assert not (tmp_path / "samples.jsonl").exists(), "nothing of a text that was broken off"
    assert output.count("chooses") < 20
