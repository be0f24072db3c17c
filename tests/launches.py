"""Ranks started by the launcher, in a folder of their own, with a small script in the place of train.py."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.config import ROOT
from tests.limits import finish, wait_until

START = """
import os, sys
from components.commands import start
config, settings = start.check(sys.argv[2:], os.environ)
start.preload([], settings.threads)
sys.exit(start.start(config, settings, 'tests.script:run', sys.argv[1:]))
"""


@dataclasses.dataclass
class Launched:
    """A launcher that runs, in its folder."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, line: str) -> None:
        assert self.process.stdout
        while (read := self.process.stdout.readline()) != "":
            if line in read:
                return
        pytest.fail(f"ended before it printed {line}: {self.end()}")

    def end(self) -> tuple[int, str, str]:
        out, err = finish(self.process)
        return self.process.returncode, out, err

    def ended(self) -> bool:
        return self.process.poll() is not None

    def log(self, rank: int) -> str:
        (path,) = self.folder.glob(f"outputs/logs/*/rank_{rank}.log")
        return path.read_text()


Start = Callable[..., Launched]


def launcher(tmp_path: Path) -> Iterator[Start]:
    """Start a script on ranks; whatever is left of it is killed at the end."""
    folder = tmp_path / "with spaces"
    folder.mkdir()
    begun: list[Launched] = []

    def begin(script: str, *words: str, start: str = START, **variables: str) -> Launched:
        (folder / "my script.py").write_text(textwrap.dedent(script))
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        settings = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "NGPU": "2"}
        process = subprocess.Popen(
            [sys.executable, "-c", start, "my script.py", *words],
            cwd=folder,
            env={**kept, **settings, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(Launched(process, folder))
        return begun[-1]

    yield begin
    for launched in begun:
        launched.process.send_signal(signal.SIGQUIT)  # the launcher kills its ranks
        wait_until(launched.ended)
