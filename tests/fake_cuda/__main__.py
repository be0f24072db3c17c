"""Reads cases as JSON, prints their findings as JSON. Each case is run in a process of its own."""

import itertools
import json
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from components.commands.dry_run import NoData, init_fake_group
from components.config import ROOT, load_config
from components.state.copies import HostCopies
from components.state.init import give_memory
from models import meta_model
from models.attention import KERNELS
from models.visible import Visible
from parallelize import parallelize_model
from parallelize.mesh import Mesh, resolve_degrees
from tests.fake_cuda import Case
from tests.harness import rewrite
from tests.small import RECIPE, SMALL

aten = torch.ops.aten
OURS = re.compile(rf"{re.escape(str(ROOT))}/(train|components/.*|models/.*|parallelize/.*)\.py|<[\w.]+>")
"""Names of our files, and of functions with a planted fault."""


class Watch(TorchDispatchMode):
    """Notes copies between devices that block."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | (
            kwargs or {}
        )
        result = function(*args, **(kwargs or {}))
        source = {aten._to_copy.default: given.get("self"), aten.copy_.default: given.get("src")}.get(function)
        if source is not None and source.device != result.device and not given.get("non_blocking"):
            self.note(f"copy from {source.device} to {result.device}")
        return result


class FirstStep(TorchDispatchMode):
    """Answers the only value that it reads: yes, all stages of the pipeline were told their shapes."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1 if function is aten._local_scalar_dense.default else function(*args, **(kwargs or {}))


def findings(case: Case) -> list[str]:
    """Runs in a process of its own."""
    found: list[str] = []

    def note(what: str, stack: traceback.StackSummary | None = None) -> None:
        names = [frame.name for frame in stack or traceback.extract_stack() if OURS.fullmatch(frame.filename)]
        found.append(f"{what}, in {names[-1] if names else 'backward'}")

    if case.fault:
        rewrite(*case.fault)
    _stand_in_for_cuda(note)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(case.ranks)}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        step = _build(case, fake)
        with fake, FirstStep():
            step()
        found.clear()
        with fake, Watch(note):
            step()
    except Exception as error:
        note(f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__))
    return found


def _stand_in_for_cuda(note: Callable[[str], None]) -> None:
    """What device.cpp leaves out of torch.cuda; and a mesh's coordinates, which are computed on real tensors."""
    for name in ("Event", "Stream", "current_stream", "stream", "get_rng_state", "set_rng_state"):
        stand_in = MagicMock()
        stand_in.return_value.synchronize.side_effect = lambda: note("synchronize")
        setattr(torch.cuda, name, stand_in)
    torch.cuda.current_device = lambda: 0
    tensor_class: Any = torch.Tensor
    tensor_class.pin_memory = lambda tensor: tensor.clone()
    mesh_class: Any = DeviceMesh
    coordinates = mesh_class._compute_coordinate_on_dim

    def of_real_tensors(mesh: DeviceMesh) -> tuple[int, ...] | None:
        with unset_fake_temporarily():
            return coordinates(mesh)

    mesh_class._compute_coordinate_on_dim = of_real_tensors


def _build(case: Case, fake: FakeTensorMode) -> Callable[[], object]:
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *case.overrides])
    init_fake_group()
    degrees, device = resolve_degrees(config, dist.get_world_size()), torch.device("cuda", 0)
    mesh = Mesh(degrees, device.type, config.parallelism.pipeline_first)
    whole = meta_model(replace(config.model, attention_kernel="plain"))
    # FSDP makes tensors; a pipeline copies parameters, and fake copies are not given memory.
    with fake if degrees.pp == 1 else nullcontext():
        stages = parallelize_model(config.model.name)(whole, mesh, config)
    with fake:
        give_memory(stages, torch.device("cpu") if config.training.enable_cpu_offload else device)
        run = train.assemble(config, device, mesh, stages, NoData(config.training.seq_len), None)
    names = ["tokens", "labels", "positions", *(["document_ids"] if config.training.document_mask else [])]
    shape = (config.training.local_batch_size, config.training.seq_len)
    batches = itertools.repeat({name: torch.zeros(shape, dtype=torch.int64) for name in names})
    copies = HostCopies()

    def step() -> None:
        """A training step, the copy of a background save, and FlexAttention's blocks, though attention is plain."""
        documents = torch.zeros(2, 300, dtype=torch.int64, device=device)
        KERNELS["auto"].prepare(Visible(200, 300, device, documents, 50))
        train.train_step(run, batches, 1)
        copies.of({str(number): parameter.detach() for number, parameter in enumerate(run.parameters)})

    return step


def main() -> None:
    cases = [Case(tuple(overrides), ranks, fault) for overrides, ranks, fault in json.load(sys.stdin)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(findings, cases, chunksize=1)))


if __name__ == "__main__":
    main()
