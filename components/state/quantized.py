"""Low-precision weights of Hugging Face folders, which are widened as they are read: FP8 in blocks, and MXFP4.

A tensor and its scales are one tensor here, with the name and the shape of the widened tensor. Reading a slice reads
only the slice's numbers, and the scales of the blocks that the slice touches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from components.config.bounds import Positive


class Stored(Protocol):
    """A tensor of a file, of which slices can be read: what safetensors' get_slice returns."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """The dtype, as safetensors names it: F32, BF16, F8_E4M3, U8."""

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor: ...


@dataclass
class Quantization:
    """quantization_config of config.json."""

    quant_method: Literal["fp8", "mxfp4"]
    weight_block_size: tuple[Positive, Positive] = (128, 128)
    """Rows and columns of a block; fp8 only."""


class Fp8:
    """Blocks of float8_e4m3fn numbers (arXiv:2412.19437). Each block is multiplied by a float32 scale of its own.

    Numbers are (N, K), scales (N / rows of a block, K / columns of a block), both rounded up.
    """

    suffixes = ("", "_scale_inv")
    """Suffixes of the names of numbers and of scales, after the tensor's name."""
    dtypes = ("F8_E4M3", "F32")

    def __init__(self, numbers: Stored, scales: Stored, quantization: Quantization) -> None:
        self._numbers, self._scales, self._block = numbers, scales, quantization.weight_block_size

    def fits(self) -> bool:
        """Whether the shapes are those of this format."""
        shape = self._numbers.get_shape()
        return len(shape) == 2 and self._scales.get_shape() == [
            -(-size // block) for size, block in zip(shape, self._block, strict=True)
        ]

    def get_shape(self) -> list[int]:
        return self._numbers.get_shape()

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """A slice of the numbers, float32."""
        places = [range(*part.indices(size)) for part, size in zip(where, self.get_shape(), strict=True)]
        blocks = [_blocks(each, block) for each, block in zip(places, self._block, strict=True)]
        rows, columns = (
            torch.arange(each.start, each.stop, each.step) // block - touched.start
            for each, block, touched in zip(places, self._block, blocks, strict=True)
        )
        return self._numbers[where].float().mul_(self._scales[tuple(blocks)][rows][:, columns])


class Mxfp4:
    """Blocks of 32 e2m1 numbers with an e8m0 scale each (OCP Microscaling Formats 1.0), in the order of gpt-oss.

    Numbers are bytes (..., N, K / 32, 16), each with two numbers, the first in the lower half. Scales are bytes
    (..., N, K / 32). A byte s stands for the scale 2^(s - 127), and 255 for NaN. The tensor is (..., K, N), as
    transformers has it.
    """

    suffixes = ("_blocks", "_scales")
    dtypes = ("U8", "U8")

    def __init__(self, numbers: Stored, scales: Stored, quantization: Quantization) -> None:
        self._numbers, self._scales = numbers, scales

    def fits(self) -> bool:
        """Whether the shapes are those of this format."""
        shape = self._numbers.get_shape()
        return len(shape) > 2 and shape[-1] == 16 and self._scales.get_shape() == shape[:-1]

    def get_shape(self) -> list[int]:
        *leading, rows, blocks, _ = self._numbers.get_shape()
        return [*leading, 32 * blocks, rows]

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """A slice of the numbers, in bfloat16, which holds each number exactly."""
        *leading, across, rows = where
        places = range(*across.indices(self.get_shape()[-2]))
        blocks = _blocks(places, 32)
        pairs = self._numbers[(*leading, rows, blocks)]
        scales = self._scales[(*leading, rows, blocks)].view(torch.float8_e8m0fnu)
        table = torch.tensor(_E2M1 + [-number for number in _E2M1], dtype=torch.bfloat16)
        numbers = torch.stack((table[(pairs & 15).int()], table[(pairs >> 4).int()]), dim=-1).flatten(-2)
        numbers *= scales.bfloat16().unsqueeze(-1)
        first = 32 * blocks.start
        return numbers.flatten(-2)[..., places.start - first : places.stop - first : places.step].mT


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_FORMATS: dict[str, type[Fp8] | type[Mxfp4]] = {"fp8": Fp8, "mxfp4": Mxfp4}
_WIDE = ("F64", "F32", "F16", "BF16")
_ALLOWED = "use 16 to 64 bits; or fp8 or mxfp4, with scales and quantization_config in config.json"


def _blocks(places: range, block: int) -> slice:
    """The blocks that places along a dimension touch."""
    return slice(places[0] // block, places[-1] // block + 1) if places else slice(0, 0)


def widened(
    stored: Mapping[str, Stored], quantization: Quantization | None
) -> tuple[dict[str, Stored], dict[str, Fp8 | Mxfp4]]:
    """A folder's tensors of 16 bits or more, and its low-precision tensors, each by the name of the widened tensor.

    Raises ValueError if a tensor is neither.
    """
    wide, narrow, wrong = dict(stored), {}, []
    if quantization:
        kind = _FORMATS[quantization.quant_method]
        of_numbers, of_scales = kind.suffixes
        for base in [name.removesuffix(of_numbers) for name in stored if name.endswith(of_numbers)]:
            if base + of_scales not in stored:
                continue
            pair = wide.pop(base + of_numbers), wide.pop(base + of_scales)
            narrow[base] = kind(*pair, quantization)
            dtypes = tuple(each.get_dtype() for each in pair)
            if base in wide:
                wrong.append(f"{base} is there twice: as it is, and in {quantization.quant_method}")
            if dtypes != kind.dtypes or not narrow[base].fits():
                shapes = " and ".join(f"{each.get_dtype()} {each.get_shape()}" for each in pair)
                wrong.append(f"{base}: {shapes} are not numbers and scales of {quantization.quant_method}")
    wrong += [
        f"{name} is {each.get_dtype()}: {_ALLOWED}" for name, each in wide.items() if each.get_dtype() not in _WIDE
    ]
    if wrong:
        raise ValueError(wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    return wide, narrow
