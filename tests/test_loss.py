"""The loss by chunks of tokens has the plain one's value and gradients, at less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.loss
from tests.benchmarks.loss import chunked, peak_bytes
from tests.benchmarks.loss import whole as plain


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(2, tokens, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(100, 32, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 100, (2, tokens), generator=generator)
    labels[:, 1::5] = -100
    return hidden, weight, labels


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 7, 16, 40], ids="{} tokens".format)
def test_chunks_have_the_plain_loss_and_gradients(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall: a loss by chunks that is right while its gradients are not. The last chunk is a part of one."""
    monkeypatch.setitem(models.loss.CHUNK, "cpu", (16, 0))
    hidden, weight, labels = inputs(tokens)
    found, expected = chunked(hidden, weight, labels), plain(hidden, weight, labels)
    assert error(found, expected) < 1e-6
    # Divided by the number of labels, as the loop does.
    of_found = torch.autograd.grad(found / 9, (hidden, weight))
    for got, want in zip(of_found, torch.autograd.grad(expected / 9, (hidden, weight)), strict=True):
        assert error(got, want) < 1e-6


def test_bfloat16_gradients_are_no_worse_than_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.loss.CHUNK, "cpu", (16, 0))
    hidden, weight, labels = inputs(200, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = torch.autograd.grad(F.cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), labels.flatten()), exact)
    found = torch.autograd.grad(chunked(hidden, weight, labels) / (labels != -100).sum(), (hidden, weight))
    expected = torch.autograd.grad(plain(hidden, weight, labels) / (labels != -100).sum(), (hidden, weight))
    for got, want, right in zip(found, expected, truth, strict=True):
        assert got.dtype == torch.bfloat16
        assert error(got, right) < 1.1 * error(want, right)


def test_no_valid_label_gives_zero() -> None:
    hidden, weight, labels = inputs(20)
    labels.fill_(-100)
    loss = chunked(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_no_gradient_is_worked_out_where_none_is_asked_for() -> None:
    hidden, weight, labels = inputs(600)
    asked = peak_bytes(chunked, hidden, weight, labels)
    with torch.no_grad():
        assert peak_bytes(chunked, hidden, weight, labels) <= asked - hidden.nbytes - weight.nbytes


def test_memory_is_that_of_a_chunk() -> None:
    """A vocabulary of 128k: at most 0.4 of what whole logits take."""
    hidden = torch.randn(1, 1024, 16, requires_grad=True)
    weight = torch.randn(131_072, 16, requires_grad=True)
    labels = torch.randint(0, 131_072, (1, 1024))
    whole, by_chunks = (peak_bytes(loss, hidden, weight, labels) for loss in (plain, chunked))
    assert by_chunks < 0.4 * whole


def test_a_chunk_is_chosen_by_bytes() -> None:
    """A GPU's has 2,048 tokens of the whole vocabulary of Llama 3, and half a GiB of a part of it."""
    assert [models.loss.chunk_tokens("cuda", vocabulary) for vocabulary in (128_256, 16_032)] == [2048, 8371]
    assert [models.loss.chunk_tokens("cpu", vocabulary) for vocabulary in (128_256, 4096, 1024)] == [256, 512, 2048]


def test_the_scale_of_a_loss_is_not_rounded_in_bfloat16() -> None:
    """1 / 384 would be off by 2e-3, and with it all gradients below the head."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 32, dtype=torch.bfloat16, requires_grad=True) for rows in (48, 64))
    labels = torch.randint(0, 64, (1, 48))
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        loss = chunked(hidden[None].to(dtype), weight.to(dtype), labels) / 384
        gradients.append(torch.autograd.grad(loss, hidden)[0].double())
    ratio = (gradients[0] * gradients[1]).sum() / gradients[1].square().sum()
    assert abs(ratio - 1) < 5e-4
