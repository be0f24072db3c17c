"""Scores of texts, and the loss of a text beside other data: one process's at every layout, and those of its logits."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from components.data.datasets import build_text
from components.observe.text_loss import TextLoss
from parallelize.scores import Scorer, Scores
from tests.harness import observe
from tests.layouts import layout
from tests.test_samples import NeverStop

TEXTS = [
    [(7 * place * place + 3 * number) % 1000 for place in range(length)]
    for number, length in enumerate((33, 2, 20, 9, 17, 30, 5))
]
LAYOUTS: list[dict[str, str]] = [
    {"dp": "fsdp 2"},
    {"dp": "ddp 3"},
    {"tp": "2", "vocabulary": "1027"},
    {"tp": "2", "vocabulary": "1027", "loss_parallel": "false", "sequence_parallel": "false"},
    {"cp": "2"},
    {"cp": "2", "method": "ulysses", "balancer": "none"},
    {"pp": "2", "tied": "true"},
    {"pp": "2", "schedule": "DualPipeV", "splits": "1"},
    {"pp": "2", "splits": "2"},
    {"dp": "fsdp 2", "model": "qwen3_moe", "ep": "2"},
    {"dp": "hsdp 2x2", "lora": "nf4"},
    {"cp": "2", "method": "allgather_kv", "tp": "2", "compile": "true"},
]


def scores_of(run: train.Run, count: int) -> list[Scores]:
    return Scorer(run.stages, run.runner, run.mesh, run.config).of_texts(TEXTS, count)


def logits_of(run: train.Run) -> list[torch.Tensor]:
    (model,) = run.stages
    with torch.no_grad():
        return [model(torch.tensor([text[:-1]]))[0] for text in TEXTS]


def observed(each: dict[str, str], at_end: object, ranks: int) -> list:
    chosen = layout(**each)
    words = chosen.overrides() if ranks > 1 else chosen.run()
    return observe(*words, ranks=ranks, steps=1, at_end=at_end).extra


CASES = [pytest.param(each, marks=[pytest.mark.slow] if "compile" in each else []) for each in LAYOUTS]


@pytest.mark.parametrize("each", CASES, ids=lambda each: " · ".join(f"{key} {each[key]}" for key in each))
def test_a_layout_scores_as_one_process(each: dict[str, str]) -> None:
    chosen = layout(**each)
    assert not chosen.refusal()
    found = observed(each, functools.partial(scores_of, count=5), chosen.ranks)
    for scores, logits, text in zip(found, observed(each, logits_of, 1), TEXTS, strict=True):
        expected, labels = logits.double().log_softmax(-1), torch.tensor(text[1:])
        torch.testing.assert_close(scores.label, expected.gather(1, labels[:, None])[:, 0], rtol=0, atol=1e-5)
        best = expected.topk(5)
        torch.testing.assert_close(scores.likeliest, best.values, rtol=0, atol=1e-5)
        assert torch.equal(scores.ids[:, 0], best.indices[:, 0])


def test_texts_that_do_not_fit_are_named() -> None:
    observe(*layout().run(), steps=1, at_end=refused)


def refused(run: train.Run) -> None:
    scorer = Scorer(run.stages, run.runner, run.mesh, run.config)
    for length in (1, run.config.training.seq_len + 2):
        with pytest.raises(ValueError, match=f"a text of {length} tokens"):
            scorer.of_texts([[1] * length])


def gathered(run: train.Run) -> list[str]:
    """Parameters that a call of the scorer has left gathered."""
    scores_of(run, 1)
    named = [each for stage in run.stages for each in stage.named_parameters()]
    return [name for name, parameter in named if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize("reshard", ["default", "never"])
def test_weights_are_shards_again_after_scores(reshard: str) -> None:
    """Else a save, an average or an update would meet whole weights."""
    chosen = layout(dp="fsdp 2", reshard=reshard)
    assert observe(*chosen.overrides(), ranks=2, steps=1, at_end=gathered).extra == []


# The loss of a text beside pairs and chats.

BESIDE = ("--validation.text_path", "assets/kjv/63-2-john.txt", "--validation.local_batch_size", "3")


def text_loss(run: train.Run) -> tuple[float, int]:
    stop: Any = NeverStop()
    return TextLoss(run.config, Scorer(run.stages, run.runner, run.mesh, run.config)).see(0, stop)


def cross_entropy(run: train.Run) -> tuple[float, int]:
    """The same, by torch's cross-entropy of the logits of one process."""
    (model,), seq_len = run.stages, run.config.training.seq_len
    text = build_text(run.config, model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens, _ = text.get(np.arange(len(text)))
    given = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(given[:, :-1]).double().flatten(0, 1), given[:, 1:].flatten())
    return loss.item(), len(text) * seq_len


@pytest.mark.parametrize(
    "each",
    [{"dp": "fsdp 2", "tp": "2"}, {"cp": "2", "dp": "ddp 2"}, {"pp": "2"}],
    ids=lambda each: " · ".join(f"{key} {each[key]}" for key in each),
)
def test_a_run_on_pairs_logs_the_loss_of_a_text(each: dict[str, str]) -> None:
    chosen = layout(data="pairs", **each)
    assert not chosen.refusal()
    words = [*chosen.overrides(), *BESIDE]
    loss, labels = observe(*words, ranks=chosen.ranks, steps=1, at_end=text_loss).extra
    expected = observe(*chosen.run(), *BESIDE, steps=1, at_end=cross_entropy).extra
    assert labels == expected[1]
    assert loss == pytest.approx(expected[0], abs=1e-5)
