"""Scores on lm-eval's tasks while the model trains, without an export: the numbers of lm-eval on the exported folder.

Rank 0 builds the tasks' requests once, at the start, and every rank keeps their tokens. At a step that is due all ranks
score them together (parallelize/scores.py), and lm-eval computes the metrics on rank 0.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from components.config import ConfigError, JobConfig, mistake, python_path
from components.data.tokenizer import load_tokenizer
from components.launch.exit_codes import ExitCode
from components.launch.signals import StopSignal
from parallelize.groups import print_on_rank_0
from parallelize.scores import Scorer
from parallelize.together import from_first


def check_evaluation(config: JobConfig) -> None:
    """Raises ConfigError if lm-eval is not installed, or a task is unknown or cannot be used; fetches its data."""
    tasks, limit = config.evaluation.tasks, config.evaluation.limit
    if not tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(mistake(config, "evaluation.tasks", 'needs lm-eval: pip install "lm-eval>=0.4.13"'))
    # In a process of its own, because lm-eval imports much, and runs code of tasks.
    given = tasks, limit, config.model.hf_assets_path, config.training.dataset_separator, config.training.seq_len
    command = [sys.executable, "-P", "-m", "components.observe.tasks", json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode == ExitCode.CONFIG:
        raise ConfigError(done.stdout.splitlines())
    if done.returncode:
        raise ConfigError(mistake(config, "evaluation.tasks", f"lm-eval has failed: {done.stderr.strip()[-200:]}"))


class Evaluation:
    """Evaluates the tasks of a job. All ranks make the same calls."""

    def __init__(self, config: JobConfig, scorer: Scorer) -> None:
        """Raises ConfigError on all ranks if rank 0 cannot use a task."""
        self._scorer = scorer
        self._tasks: Any = None
        """The tasks, on rank 0."""
        given: tuple[list[np.ndarray], list[int], str] = from_first(lambda: self._built(config))
        self._texts, self._scored, said = given
        print_on_rank_0(said)
        self._order = sorted(range(len(self._texts)), key=lambda number: -len(self._texts[number]))
        self._at_once = scorer.rows_at_once
        self._failed = False

    def _built(self, config: JobConfig) -> tuple[list[np.ndarray], list[int], str]:
        """On rank 0: the tokens of each text, the number of its last tokens that are scored, and a line about all."""
        from components.observe.tasks import Tasks

        tokenizer = load_tokenizer(config.model.hf_assets_path, config.training.dataset_separator)
        self._tasks = Tasks(config.evaluation.tasks, config.evaluation.limit, tokenizer, config.training.seq_len)
        windows = self._tasks.windows
        return (
            [np.array(window.tokens, dtype=np.int32) for window in windows],
            [window.scored for window in windows],
            self._tasks.describe(),
        )

    def see(self, step: int, stop: StopSignal) -> dict[str, dict[str, Any]] | None:
        """The metrics of each task, on all ranks. Ends early if all ranks agree to stop.

        If a task fails, that is said once, and nothing is evaluated any more: the run goes on.
        """
        if self._failed:
            return None
        found = self.likelihoods(stop)
        if stop.code:
            return None
        try:
            numbers: dict[str, dict[str, Any]] = from_first(lambda: self._tasks.numbers(found))
        except (ConfigError, OSError) as error:  # every rank has it
            self._failed = True
            print_on_rank_0(f"step {step}: evaluation has stopped, and training goes on: {error}")
            return None
        return numbers

    def likelihoods(self, stop: StopSignal) -> list[tuple[float, bool]]:
        """Log-likelihood of each text's scored tokens, and whether each of them was the likeliest."""
        found: dict[int, tuple[float, bool]] = {}
        starts = range(0, len(self._order), self._at_once)
        for start in stop.until_agreed(starts):
            numbers = self._order[start : start + self._at_once]
            scores = self._scorer.of_texts([self._texts[number].tolist() for number in numbers])
            for number, each in zip(numbers, scores, strict=True):
                count = self._scored[number]
                labels = self._texts[number][-count:]
                is_likeliest = bool((each.ids[-count:, 0].numpy() == labels).all())
                found[number] = float(each.label[-count:].sum()), is_likeliest
        return [found.get(number, (0.0, False)) for number in range(len(self._texts))]
