"""The runs of a sweep as tasks of Slurm or Ray: each is `python -m components.sweep ... --only I`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from components.config import ROOT, ConfigError, python_path
from components.launch.exit_codes import ExitCode

_SLURM = """\
#!/usr/bin/env bash
# The runs of a sweep as a job array: {sbatch}
# Each saves five minutes before its time limit, and goes on in the queue's next turn. Report: {report}
#SBATCH --job-name=sweep
#SBATCH --array=0-{last}
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
{options}set -uo pipefail

export SHUTDOWN_TIMEOUT_SECONDS=240 # less than the 300 above
export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}
cd {folder}
{command} &
run=$!

# B: sends the signal to this shell alone, which passes it on.
trap 'kill -TERM "$run"' TERM
wait "$run"
while kill -0 "$run" 2>/dev/null; do wait "$run"; done # a signal ends the wait, not the run
wait "$run"
code=$?

# 143: saved because the time was up. 6: the time was too short for saving.
case "$code" in 143 | 6) scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" ;; esac
exit "$code"
"""


def _command(words: Sequence[str], which: str, settings: Sequence[str]) -> str:
    """The command line of one run, or of the report; which: its own option, for a shell to expand."""
    own = shlex.join([sys.executable, "-m", "components.sweep", *words])
    return " ".join([own, which, *([shlex.join(["--", *settings])] if settings else [])])


def write_slurm(runs: int, folder: Path, words: Sequence[str], settings: Sequence[str], options: str) -> int:
    """Write a script for sbatch whose tasks are the runs.

    words: the command line of the sweep, without its settings. options: those of sbatch.
    """
    path = folder / "sweep.sbatch"
    sbatch = shlex.join(["sbatch", str(path)])
    text = _SLURM.format(
        sbatch=sbatch,
        report=_command(words, "--report", settings),
        last=runs - 1,
        log=shlex.quote(str(folder / "slurm-%a.log")),
        options=f"#SBATCH {options}\n" if options else "",
        root=shlex.quote(str(ROOT)),
        folder=shlex.quote(os.getcwd()),
        command=_command(words, '--only "$SLURM_ARRAY_TASK_ID"', settings),
    )
    path.write_text(text, encoding="utf-8")
    print(sbatch)
    return ExitCode.DONE


def run_in_ray(ended: Sequence[bool], words: Sequence[str], settings: Sequence[str], gpus: int) -> list[int]:
    """Exit codes of the runs that have not ended, which are tasks of Ray; its machines see the folder and this code.

    Raises ConfigError if Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray: Ray is not installed; pip install ray, or leave --ray out") from None

    folder, found = os.getcwd(), {"PYTHONPATH": python_path()}

    def one(number: int) -> int:
        command = _command(words, f"--only {number}", settings)
        return subprocess.run(command, shell=True, cwd=folder, env=os.environ | found).returncode

    ray.init(ignore_reinit_error=True)
    task = ray.remote(num_gpus=gpus, max_retries=3)(one)
    return list(ray.get([task.remote(number) for number, done in enumerate(ended) if not done]))
