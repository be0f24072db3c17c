"""Weights from a checkpoint of torchtitan v0.2: the format of torch.distributed.checkpoint, without a manifest.

Parameters have this project's names, with or without `model.` before them. torchtitan's Llama rotates each even row of
a head against the next odd row. This project, in Hugging Face's order, rotates a head's first half against its second.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from components.config import ConfigError
from components.state.folder import Fault, Saved, manifest
from components.state.packed import to_fill
from components.state.tensors import Reader, check_finite, check_fit, fill_copies, open_reader
from models.parameters import is_adapter, tied_names
from parallelize.groups import print_on_rank_0
from parallelize.sharding import own_slice
from parallelize.together import read_together

_OTHERS = ("optimizer", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""First parts of the names of entries that are not weights."""
_PAIRED = {"llama": ("attention.wq.weight", "attention.wk.weight")}
"""Family, by its name at Hugging Face -> the weights whose rows are in another order in torchtitan."""


def is_foreign(saved: Saved) -> bool:
    """Whether a folder is a checkpoint that this project did not write. Called by all ranks. Raises ConfigError."""

    def look() -> bool:
        if saved.state is not None or not isinstance(manifest(saved.folder), Fault):
            return False
        return (saved.folder / ".metadata").exists() and not (saved.folder / "manifest.json").exists()

    return read_together(look, first_only=True)[0]


def load_torchtitan(stages: list[nn.Module], folder: Path) -> None:
    """Fill every parameter but adapters; each rank reads its slices, and whole tensors where rows are in another order.

    Raises ConfigError if tensors do not fit (with every misfit), a file is outside the folder, or a number not finite.
    """
    reader = open_reader(folder, foreign=True)
    parameters = [each for stage in stages for each in stage.named_parameters() if not is_adapter(each[0])]
    named = [(name, parameter.detach()) for name, parameter in parameters]
    weights = dict(named)
    prefix = _keep_weights(reader)
    renamed = {prefix + name: tensor for name, tensor in weights.items()}
    tied = {prefix + name: weights[first] for stage in stages for name, first in tied_names(stage)}
    tied = {name: tensor for name, tensor in tied.items() if name in reader.metadata.state_dict_metadata}
    check_fit(renamed | tied, reader, convert=True)
    paired: dict[str, Any] = {
        prefix + name: stage
        for stage in stages
        for name, _ in stage.named_parameters()
        if name.endswith(_PAIRED.get(getattr(stage, "hf_type", ""), ()))
    }

    def read() -> None:
        for name, tensor in renamed.items():
            with to_fill(tensor) as numbers:
                if name in paired:
                    _read_paired(name, numbers, paired[name].config.head_dim, reader)
                else:
                    _read({name: numbers}, reader)
        for name, tensor in tied.items():
            _read({name: (other := torch.empty_like(tensor))}, reader)
            if not own_slice(other)[0].equal(own_slice(tensor)[0]):
                raise ConfigError(f"{folder}: {name} is another tensor than the embedding, to which this model ties it")

    read_together(read)
    fill_copies(named, weights)
    check_finite(renamed, folder)
    print_on_rank_0(f"{folder} is torchtitan's: it has no manifest.json, so nothing could be verified against hashes")


def _keep_weights(reader: Reader) -> str:
    """Leave only weights in the reader's table; returns the prefix of the names."""
    entries = reader.metadata.state_dict_metadata
    prefix = "model." if any(name.startswith("model.") for name in entries) else ""
    for name in [*entries]:
        if name.partition(".")[0] in _OTHERS:
            del entries[name]
    return prefix


def _read(tensors: dict[str, Any], reader: Reader) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch warns that only one process loads
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def _read_paired(name: str, tensor: Tensor, head_dim: int, reader: Reader) -> None:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    _read({name: whole}, reader)
    here = halves_of_pairs(whole, head_dim)
    local, offset = own_slice(tensor)
    if local.numel():
        local.copy_(here[tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))])


def halves_of_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows 2 i and 2 i + 1 of each head (of head_dim rows) become rows i and i + head_dim / 2."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
