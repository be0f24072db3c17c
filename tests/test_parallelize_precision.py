"""Float32 products are computed in float32, by whichever library."""

from collections.abc import Iterator

import pytest
import torch

from parallelize import precision
from parallelize.precision import set_product_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    precision._products_are_exact.cache_clear()
    yield
    torch.set_float32_matmul_precision(before)
    precision._products_are_exact.cache_clear()


@pytest.mark.parametrize("shape", [(1024, 256, 768), (48, 96, 64), (100, 33, 1027)], ids=str)
def test_products_keep_all_bits(shape: tuple[int, int, int]) -> None:
    """bfloat16 inside would be off by 2e-3."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    exact = left.double() @ right.double().T
    set_product_precision("highest", CPU)
    for found in (left @ right.T, (right @ left.T).T, left.T.contiguous().T @ right.T, (left[None] @ right.T[None])[0]):
        assert (found - exact).norm() / exact.norm() < 1e-6


def test_a_cpu_that_rounds_to_bfloat16_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with AMX does for "medium"."""
    exact = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        large = torch.get_float32_matmul_precision() == "medium" and right.shape[-1] > 100
        return exact(left.bfloat16(), right.bfloat16()).float() if large else exact(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    for asked in ("highest", "high", "medium"):
        set_product_precision(asked, CPU)
        assert torch.get_float32_matmul_precision() == asked


def test_a_gpu_gets_what_was_asked_for() -> None:
    set_product_precision("high", torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == "high"
