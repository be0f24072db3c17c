"""Training steps on fake CUDA tensors, on a machine without CUDA: what would make the host wait for the GPU.

Nothing is computed. torch's FakeTensorMode raises where an operation mixes devices and where the host reads a value of
the GPU; Watch notes copies between host and GPU that block. FSDP's, DTensor's and autograd's own code runs, with
device.cpp in the place of the CUDA that a CPU build of torch lacks. Streams and events are stand-ins, so that their
order is not checked. Attention is products and a softmax instead of fused kernels, but for the ring's flash attention.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch

from components.config import ROOT


class Case(NamedTuple):
    """A layout, seen from rank 0 of so many ranks."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    fault: tuple[str, str, str, str] | None = None
    """What tests.harness.rewrite plants first."""


def findings(*cases: Case) -> list[list[str]]:
    """Of each case: what the host waits for in the second step and the save after it; or an error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda"],
        input=json.dumps(cases),
        env={**os.environ, "LD_PRELOAD": str(_library())},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cache
def _library() -> Path:
    """device.cpp, compiled in two seconds."""
    library = Path(mkdtemp()) / "device.so"
    inside = Path(torch.__file__).parent
    source = Path(__file__).with_name("device.cpp")
    links = [f"-L{inside / 'lib'}", f"-Wl,-rpath,{inside / 'lib'}", "-lc10", "-ltorch_cpu"]
    words = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{inside / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*words, *links], check=True)
    return library
