"""Pairs: their rows, their losses, the reference, and the same run at every layout."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from components.config import ConfigError, load_config
from components.config.tables import Chat, Preference
from components.data.pairs import PairRows, Pairs
from components.data.template import BadChat
from components.observe.report import points, read_rows
from components.state import reference
from components.state.checkpoint import Checkpointer
from models import sizes
from models.preference import LOSSES, WITH_REFERENCE, Sides, logged_names, weigh
from parallelize.scores import label_scores, without_adapters
from tests.benchmarks import preference as benchmark
from tests.chats import CHATML, rows_in, tokenizer_in
from tests.harness import observe, rewrite
from tests.layouts import layout
from tests.runs import Whole
from tests.small import PAIRS, SMALL

PAIR = {"prompt": "ask", "chosen": "good", "rejected": "bad one"}


def said(*turns: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": turn} for turn in turns]


ASKED = said("ask", role="user")
SHAPES: dict[str, dict[str, Any]] = {
    "texts": PAIR,
    "lists": {"prompt": ASKED, "chosen": said("good"), "rejected": said("bad one")},
    "lists that begin with the prompt": {"chosen": ASKED + said("good"), "rejected": ASKED + said("bad one")},
    "both": {"prompt": "ask", "chosen": ASKED + said("good"), "rejected": ASKED + said("bad one")},
    "messages": {"messages": ASKED, "chosen": said("good")[0], "rejected": said("bad one")[0]},
    "conversation": {"conversation": ASKED, "chosen": said("good")[0], "rejected": said("bad one")[0]},
    "columns of a table": {**PAIR, "messages": None},
}


def pairs_in(folder: Path, **settings: Any) -> Pairs:
    return Pairs(Chat(**settings), str(tokenizer_in(folder, CHATML)))


@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_each_shape_are_the_same_pair(tmp_path: Path, shape: str) -> None:
    pairs = pairs_in(tmp_path)
    found = pairs.sequences(SHAPES[shape])
    shown = [pairs.tokenizer.decode(ids) for ids, _ in found]
    head = "<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\n"
    assert shown == [head + "good<|im_end|>", head + "bad one<|im_end|>"]
    trained = [pairs.tokenizer.decode([id for id, is_trained in zip(*each) if is_trained]) for each in found]
    assert trained == ["good<|im_end|>", "bad one<|im_end|>"]


def test_the_field_of_prompts_can_be_named(tmp_path: Path) -> None:
    record = {"talk": "ask", "prompt": "another", "chosen": "good", "rejected": "bad"}
    found = pairs_in(tmp_path, messages_field="talk").sides(record)
    assert found[0] == ASKED
    with pytest.raises(BadChat, match=r'no field "talk" \(chat.messages_field\)'):
        pairs_in(tmp_path, messages_field="talk").sides(PAIR)


def test_only_the_assistants_turns_after_the_prompt_are_trained(tmp_path: Path) -> None:
    pairs = pairs_in(tmp_path)
    longer = [*said("first"), *said("more", role="user"), *said("second")]
    ids, trained = pairs.sequences({"prompt": [*ASKED, *said("before"), *ASKED], "chosen": longer, "rejected": "no"})[0]
    text = pairs.tokenizer.decode([id for id, is_trained in zip(ids, trained, strict=True) if is_trained])
    assert text == "first<|im_end|>second<|im_end|>"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "ask", "chosen": "good"}, 'no field "rejected"; it has prompt, chosen'),
        ({**PAIR, "chosen": "bad one"}, "chosen and rejected are the same"),
        ({**PAIR, "chosen": 3}, "chosen: expected a text, a message or a list of messages, not 3"),
        ({**PAIR, "chosen": []}, r"chosen: expected a text, .*, not \[\]"),
        ({**PAIR, "chosen": [{"content": "x"}]}, "chosen: message 1: no role"),
        ({"chosen": said("x", role="user"), "rejected": said("y")}, "chosen: begins with a turn of user"),
        ({**PAIR, "chosen": "<|im_end|>"}, r"message 2: spells the special token <\|im_end\|>"),
        (["a list"], "expected an object"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(BadChat, match=message):
        pairs_in(tmp_path).sequences(record)


PREFERENCE = ("--training.dataset_format", "preference")


def pair_rows(folder: Path, records: list[Any], seq_len: int, *words: str, **given: Any) -> PairRows:
    found = rows_in(folder, records, seq_len, *PREFERENCE, *words, **given)
    assert isinstance(found, PairRows)
    return found


def test_a_pair_lies_in_one_row_as_two_documents(tmp_path: Path) -> None:
    records = [{**PAIR, "chosen": "good" * (1 + number % 3)} for number in range(9)]
    rows = pair_rows(tmp_path, records, 200)
    numbers = np.arange(len(rows))
    assert rows.count_pairs(numbers) == 9
    assert len(rows) < 9
    tokens, documents = rows.get(numbers)
    sides, trained = rows.sides_at(numbers), rows.trained(numbers)
    assert trained is not None
    assert ((sides > 0) == trained[:, 1:]).all()
    assert (sides[sides > 0] == documents[sides > 0] + 1).all()
    found = set()
    for row in numbers:
        for pair in range(rows.count_pairs(np.asarray([row]))):
            both = [tokens[row, 1:][sides[row] == 2 * pair + side] for side in (1, 2)]
            assert all(map(len, both))
            found.add(tuple(map(len, both)))
    assert len(found) == 3, "three lengths of the chosen completion, one of the rejected"


@pytest.mark.parametrize(("policy", "pairs"), [("skip", 1), ("truncate_end", 2)])
def test_a_pair_that_does_not_fit_is_cut_or_left_out(tmp_path: Path, policy: str, pairs: int) -> None:
    records = [PAIR, {**PAIR, "chosen": "good" * 100}]
    with pytest.raises(ConfigError, match=r"chats.jsonl:2: .* tokens, and 0 other pairs, do not fit"):
        pair_rows(tmp_path, records, 200)
    rows = pair_rows(tmp_path, records, 200, "--chat.too_long", policy)
    assert rows.too_long == 1
    assert rows.count_pairs(np.arange(len(rows))) == pairs
    if policy == "truncate_end":
        lengths = rows.lengths.reshape(-1, 2)
        cut = lengths[lengths.sum(1) == lengths.sum(1).max()][0]
        assert cut.sum() == 201, "the shorter sequence is whole, the longer one fills the row"


def test_a_pair_whose_side_has_no_label_left_is_left_out(tmp_path: Path) -> None:
    records = [PAIR, {**PAIR, "prompt": "ask" * 100}]
    rows = pair_rows(tmp_path, records, 150, "--chat.too_long", "truncate_end")
    assert rows.without_labels == 1
    assert rows.count_pairs(np.arange(len(rows))) == 1


def test_held_out_pairs_are_whole(tmp_path: Path) -> None:
    records = [{**PAIR, "prompt": f"ask {number:03}"} for number in range(40)]
    parts = [pair_rows(tmp_path, records, 300, part=part, fraction=0.1) for part in ("train", "validation")]
    counts = [part.count_pairs(np.arange(len(part))) for part in parts]
    assert counts == [36, 4]
    texts = [{tuple(row) for row in part.get(np.arange(len(part)))[0]} for part in parts]
    assert not texts[0] & texts[1]


# Losses beside torch's own gradients.


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)


def expected(loss: str, settings: Preference, found: Tensor, given: Tensor, sides: Tensor) -> Tensor:
    """The sum over pairs of their losses, from the formulas of the papers."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(found)):
        for pair in range(int(sides[row].max()) // 2):
            chosen, rejected = (sides[row] == 2 * pair + side for side in (1, 2))
            (c, c0, n), (r, r0, m) = (
                (found[row][each].sum(), given[row][each].sum(), int(each.sum())) for each in (chosen, rejected)
            )
            beta, noise = settings.beta, settings.label_smoothing
            if loss == "dpo":
                margin = beta * ((c - c0) - (r - r0))
                total = total - (1 - noise) * margin.sigmoid().log() - noise * (1 - margin.sigmoid()).log()
            elif loss == "ipo":
                total = total + ((c - c0) / n - (r - r0) / m - 1 / (2 * beta)) ** 2
            elif loss == "simpo":
                margin = beta * (c / n - r / m) - settings.gamma
                total = total - (1 - noise) * margin.sigmoid().log() - noise * (1 - margin.sigmoid()).log()
            else:
                odds = [(mean.exp() / (1 - mean.exp())).log() for mean in (c / n, r / m)]
                total = total - c / n - beta * (odds[0] - odds[1]).sigmoid().log()
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_torch(loss: str, smoothing: float) -> None:
    settings = Preference(loss=loss, beta=0.3, label_smoothing=smoothing, gamma=0.7)  # type: ignore[arg-type]
    if smoothing and loss in ("ipo", "orpo"):
        pytest.skip("refused")
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 24, 11, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (2, 24), generator=draw)
    sides = torch.tensor([[0, 1, 1, 1, 0, 0, 2, 2, 0, 3, 0, 4, 4, 4, 4, *[0] * 9], [0, 0, 1, 1, 0, 2, *[0] * 18]])
    labels[sides == 0] = -100
    given = torch.randn(2, 24, generator=draw, dtype=torch.float64) * (sides > 0)
    found = log_probabilities(logits, labels)
    total = expected(loss, settings, found, given, sides)
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
    pairs = weigh(found.detach(), labels, sides, given, settings, lambda part: part)
    (ours,) = torch.autograd.grad(-(pairs.weights.double() * found).sum(), logits)
    assert pairs.losses.sum().item() == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-8)
    numbers = dict(zip(logged_names(settings), pairs.logged.tolist(), strict=True))
    assert numbers["logp_chosen"] == pytest.approx(sum(found[sides % 2 == 1].tolist()))
    assert numbers["logp_rejected"] == pytest.approx(sum(found[(sides > 0) & (sides % 2 == 0)].tolist()))
    assert 0 <= numbers["reward_accuracy"] <= 3
    assert ("reference_drift" in numbers) == (loss in WITH_REFERENCE)


def test_a_pair_of_which_a_side_has_no_label_counts_nothing() -> None:
    sides, settings = torch.tensor([[1, 1, 2, 3, 4, 0, 0, 0]]), Preference()
    found = -torch.arange(1.0, 9.0, dtype=torch.float64)[None]
    labels = torch.where(sides == 2, -100, 5)
    pairs = weigh(found, labels, sides, None, settings, lambda part: part)
    assert pairs.weights[0, :3].eq(0).all()
    assert pairs.losses.sum() == pytest.approx(-math.log(1 / (1 + math.exp(-0.1))))


def test_odds_are_finite_for_certain_and_impossible_completions() -> None:
    sure = Sides(torch.tensor([[0.0, -800.0], [-1e-9, -1e-3]], dtype=torch.float64), *[torch.ones(2, 2).double()] * 2)
    assert LOSSES["orpo"](sure, Preference(loss="orpo")).isfinite().all()


# The reference.


def reference_of(run: train.Run) -> dict[str, Any]:
    """By sequence: from the cache; and from one forward of the model, which has to have its starting weights."""
    rows: Any = run.train_set
    assert rows.reference is not None
    return {"reference": rows.reference.copy(), "sides": rows.labels_by_sequence}


def test_the_reference_is_the_log_probability_under_the_starting_weights() -> None:
    words = layout(data="pairs").run()
    found = observe(*words, steps=0, at_end=functools.partial(with_logits)).extra
    assert np.abs(found["cached"] - found["computed"]).max() < 1e-4


def with_logits(run: train.Run) -> dict[str, np.ndarray]:
    """Cached numbers of the first rows, and the numbers of the model's logits, one document at a time."""
    rows: Any = run.train_set
    (model,) = run.stages
    cached, computed = [], []
    for number in range(4):
        tokens, documents = rows.get(np.asarray([number]))
        trained = rows.trained(np.asarray([number]))[0]
        ids = np.append(documents[0], documents[0, -1])
        span = rows.sequences_of(number)
        ends = np.cumsum(rows.lengths[span])
        for end, length, value in zip(ends, rows.lengths[span], rows.reference[span], strict=True):
            text = torch.from_numpy(tokens[0, end - length : end].copy())
            with torch.no_grad():
                logits = model(text[None, :-1])[0].double().log_softmax(-1)
            each = logits.gather(1, text[1:, None])[:, 0]
            computed.append((each * torch.from_numpy(trained[end - length + 1 : end])).sum().item())
            cached.append(value)
        assert len(ids) == len(trained)
    return {"cached": np.asarray(cached), "computed": np.asarray(computed)}


REFERENCE_LAYOUTS: list[dict[str, str]] = [
    {"dp": "fsdp 2"},
    {"cp": "2", "tp": "2", "loss_parallel": "false"},
    {"pp": "2", "schedule": "DualPipeV"},
]


@pytest.mark.parametrize("each", REFERENCE_LAYOUTS, ids=lambda each: " · ".join(f"{key} {each[key]}" for key in each))
def test_the_reference_is_the_same_at_every_layout(each: dict[str, str]) -> None:
    chosen = layout(**each, data="pairs")
    found = observe(*chosen.overrides(), ranks=chosen.ranks, steps=0, at_end=reference_of).extra
    alone = observe(*chosen.run(), steps=0, at_end=reference_of).extra
    assert not np.isnan(found["reference"]).any()
    assert np.abs(found["reference"] - alone["reference"]).max() < 1e-4


def base_twice(run: train.Run) -> list[Tensor]:
    """Log-probabilities of a batch: without adapters, with them, and with their matrices B at zero."""
    batch = next(train.local_batches(run))
    part = train.own_part(run, batch)
    plain = {name: column for name, column in part.items() if name not in ("dropout_keys", "reference")}
    adapted = label_scores(run.stages, run.runner, plain)
    with torch.no_grad():
        for stage in run.stages:
            for name, parameter in stage.named_parameters():
                if name.endswith("lora_B"):
                    parameter.zero_()
    return [part["reference"], adapted, label_scores(run.stages, run.runner, plain)]


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_the_base_of_adapters_is_the_reference(model: str) -> None:
    dropout = {"dropout": "0.25"} if model == "llama" else {}
    words = layout(data="pairs", lora="all-linear", model=model, **dropout).run()
    found, adapted, base = observe(*words, steps=0, at_end=base_twice).extra
    assert torch.equal(found, base)
    assert not torch.equal(adapted, base)


def test_adapters_are_back_after_the_reference() -> None:
    layer = torch.nn.Linear(2, 2)
    from models.lora import AdaptedLinear

    adapted = AdaptedLinear(layer, 1, 2.0)
    with without_adapters([adapted]):
        assert adapted.scale == 0
    assert adapted.scale == 2


# The same run at every layout.

LAYOUTS: list[dict[str, str]] = [
    {"dp": "ddp 3", "preference": "ipo"},
    {"dp": "fsdp 2", "accumulation": "3"},
    {"tp": "2", "vocabulary": "1027"},
    {"cp": "2", "method": "ring allgather"},
    {"cp": "2", "method": "allgather_kv", "preference": "simpo"},
    {"cp": "2", "method": "ulysses", "balancer": "none", "preference": "orpo"},
    {"pp": "2"},
    {"dp": "fsdp 2", "lora": "all-linear", "dropout": "0.25"},
    {"pp": "2", "lora": "all-linear", "preference": "ipo"},
]


@functools.cache
def one_process(run: tuple[str, ...]) -> Observation:
    return observe(*run, steps=2)


@pytest.mark.parametrize("each", LAYOUTS, ids=lambda each: " · ".join(f"{key} {each[key]}" for key in each))
def test_a_layout_is_the_run_of_one_process(each: dict[str, str]) -> None:
    chosen = layout(**each, data="pairs")
    assert not chosen.refusal()
    observed = observe(*chosen.overrides(), ranks=chosen.ranks, steps=2)
    assert broken_bars(observed, one_process(chosen.run())) == {}


def row_after_two_steps(run: train.Run) -> dict[str, float]:
    return train.row_of(torch.zeros(()), run.logged, run.objective, run.mesh)


@pytest.mark.parametrize("each", [{"cp": "2"}, {"dp": "ddp 3"}, {"tp": "2"}, {"pp": "2"}], ids=str)
def test_what_is_logged_is_the_same_at_every_layout(each: dict[str, str]) -> None:
    chosen = layout(**each, data="pairs")
    found = observe(*chosen.overrides(), ranks=chosen.ranks, steps=2, at_end=row_after_two_steps).extra
    alone = observe(*chosen.run(), steps=2, at_end=row_after_two_steps).extra
    assert set(alone) == {"loss", "reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected", "reference_drift"}
    assert alone["reference_drift"] > 1e-3
    assert 0 < alone["reward_accuracy"] <= 1
    for name, value in alone.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name


# Planted faults.


def divide_by_rank() -> None:
    """A mean over the rank's own pairs instead of the global batch's."""
    from components.data.loader import DIVISORS, GlobalOrder

    def own(self: Any, what: str) -> int:
        share = self.global_batch_size // self.batch_ranks
        start = self.consumed_sequences + self.batch_rank * share
        numbers = self.sequences.at(np.arange(start, start + share), self.seed)
        return DIVISORS[what](self.sequences, numbers) * self.batch_ranks

    GlobalOrder.count = own  # type: ignore[method-assign]


def no_mask_in_the_reference() -> None:
    rewrite("components.state.reference", "_sums", "document_mask=True", "document_mask=False")


def sums_of_a_rank() -> None:
    rewrite("parallelize.context", "_whole_sequences", ".full_tensor()", ".to_local()")


def adapters_in_the_reference() -> None:
    rewrite("parallelize.scores", "with_base_scores", "with_adapters=False", "with_adapters=True")


def counted_by_each_rank() -> None:
    rewrite("models.preference", "weigh", "is_pair[:, 0] / tokens[:, 0]", "is_pair[:, 0] / (tokens[:, 0] / 2)")


FAULTS: list[tuple[Any, dict[str, str]]] = [
    (divide_by_rank, {"dp": "ddp 3"}),
    (sums_of_a_rank, {"cp": "2"}),
    (no_mask_in_the_reference, {"dp": "fsdp 2"}),
    (adapters_in_the_reference, {"dp": "fsdp 2", "lora": "all-linear"}),
    (counted_by_each_rank, {"cp": "2"}),
]


@pytest.mark.parametrize(("fault", "each"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_fault_is_found(fault: Any, each: dict[str, str]) -> None:
    chosen = layout(**each, data="pairs")
    observed = observe(*chosen.overrides(), ranks=chosen.ranks, steps=2, mutate=fault)
    assert broken_bars(observed, one_process(chosen.run()))


# The cache of the reference.


def computed_again(run: train.Run, cache: Path) -> list[int]:
    """Rows computed by three starts: the first; one after a kill between two pieces; one with a complete cache."""
    counts = list[int]()
    checkpointer = Checkpointer(Path(), run.config.checkpoint, run.stages, run.optimizer)
    compute = reference._sums

    def counted(scorer: Any, rows: Any, numbers: np.ndarray) -> Any:
        counts[-1] += len(numbers)
        return compute(scorer, rows, numbers)

    reference._sums = counted
    rows: Any = run.train_set
    wanted = rows.reference.copy()
    for number in range(3):
        counts.append(0)
        if number == 1:
            pieces = sorted(cache.glob("*/rows-*.npz"), key=lambda file: file.stat().st_mtime)
            pieces[-2].unlink()
            pieces[0].write_bytes(pieces[0].read_bytes()[:40])
        run.reference = ""
        reference.add_reference(run, checkpointer, cache)
        assert np.nanmax(np.abs(rows.reference - wanted)) < 1e-5
    reference._sums = compute
    return counts


def test_another_forward_pass_of_the_same_weights_is_another_reference() -> None:
    rows = SimpleNamespace(key="rows", seq_len=32)

    def key(*words: str) -> str:
        config = load_config([*SMALL, *PAIRS, *words])
        return reference._key(config, sizes(config.model), "weights", rows)  # type: ignore[arg-type]

    scaled = ("--model.rope_scaling.rope_type", "linear", "--model.rope_scaling.factor", "2")
    assert key() == key("--optimizer.lr", "1e-2", "--parallelism.tensor_parallel_degree", "2")
    others = [scaled, ("--model.sizes.rope_theta", "77.0"), ("--model.sizes.norm_eps", "0.5")]
    others.append(("--training.float32_matmul_precision", "high"))
    assert len({key(), *(key(*each) for each in others)}) == 5


def test_a_reference_that_was_killed_goes_on(tmp_path: Path) -> None:
    small = "--training.local_batch_size", "4", "--training.global_batch_size", "4"
    words = (*layout(data="pairs").run(), *small)
    first, second, third = observe(*words, steps=0, at_end=functools.partial(computed_again, cache=tmp_path)).extra
    assert first > second > 0 == third


def after_a_resumption(run: train.Run, cache: Path, changed: bool) -> tuple[float, str, bool]:
    """How far the reference is from the starting weights' when the cache is gone after some steps; the error."""
    checkpointer = Checkpointer(Path(), run.config.checkpoint, run.stages, run.optimizer)
    rows: Any = run.train_set
    wanted, weights = rows.reference.copy(), [parameter.detach().clone() for parameter in run.parameters]
    if changed:
        run.reference = "0" * 16
    try:
        reference.add_reference(run, checkpointer, cache)
    except ConfigError as error:
        return 0.0, str(error), True
    known = ~np.isnan(rows.reference)
    kept = all(torch.equal(one, other) for one, other in zip(weights, run.parameters, strict=True))
    return float(np.abs(rows.reference - wanted)[known].max()), "", kept


def test_a_lost_cache_is_computed_again_from_the_starting_weights(tmp_path: Path) -> None:
    chosen = layout(data="pairs", dp="fsdp 2")
    again = functools.partial(after_a_resumption, cache=tmp_path / "gone", changed=False)
    apart, error, kept = observe(*chosen.overrides(), ranks=2, steps=2, at_end=again).extra
    assert (error, kept) == ("", True)
    assert apart < 1e-4
    other = functools.partial(after_a_resumption, cache=tmp_path / "other", changed=True)
    apart, error, _ = observe(*chosen.run(), steps=2, at_end=other).extra
    assert "checkpoint.initial_load_path: other weights than the run has started from" in error


# The same numbers as trl's.


@pytest.mark.slow
@pytest.mark.parametrize("loss", benchmark.CASES)
def test_losses_and_margins_are_those_of_trl(tmp_path: Path, loss: str) -> None:
    record = {each["loss"]: each["steps"] for each in map(json.loads, benchmark.RECORD.read_text().splitlines())}
    found = benchmark.ours(loss, tmp_path)
    assert len(found) == benchmark.STEPS
    assert benchmark.apart(found, record[loss]) < 1e-4


def test_pairs_and_their_losses_cost_other_objectives_nothing() -> None:
    """The head of another objective makes one product, and calls nothing of pairs."""
    from models.layers import Head

    head = Head(8, 12)
    head.whole = None  # type: ignore[assignment]
    labels = torch.tensor([[1, 2, -100]])
    x = torch.randn(1, 3, 8)
    loss = head(x, labels)
    assert loss.item() == pytest.approx(F.cross_entropy((x @ head.weight.T)[0], labels[0], reduction="sum").item())


@pytest.mark.slow
def test_a_validation_at_the_start_shows_what_the_run_learns_and_changes_nothing(tmp_path: Path) -> None:
    beside = ("--validation.at_start", "--validation.text_path", "assets/kjv/63-2-john.txt")
    found = []
    for number, words in enumerate((beside, ())):
        folder = tmp_path / str(number)
        words = (*PAIRS, "--validation.enable", "true", "--validation.freq", "8", "--validation.steps", "1", *words)
        code, said = Whole(folder, *words, NGPU="1").end()
        assert code == 0, said
        found.append(read_rows(folder / "metrics.jsonl"))
    shown, plain = found
    keys = "validation_reward_accuracy", "validation_reward_margin", "validation_text_loss", "validation_text_tokens"
    at_start = {key: value for row in shown if row["step"] == 0 for key, value in row.items()}
    assert abs(at_start["validation_reward_margin"]) < 1e-5, "the run's starting weights are the reference"
    assert at_start["validation_text_loss"] == pytest.approx(math.log(1024), abs=0.5)
    assert at_start["validation_text_tokens"] == 8 * 32, "a global batch"
    for key in keys:
        assert points(shown, key)[0] == [0, 8, 16]
    assert points(plain, "validation_reward_accuracy")[0] == [8, 16]
    assert points(shown, "loss") == points(plain, "loss")
    assert points(shown, "validation_loss")[1][1:] == points(plain, "validation_loss")[1]
