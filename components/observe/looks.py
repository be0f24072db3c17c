"""Looks at the model while it trains, which do not change it: validation, the loss of a text, samples, evaluation."""

from collections.abc import Callable
from typing import Any, NamedTuple

from components.config import JobConfig
from components.launch.signals import StopSignal
from components.observe.evaluation import Evaluation
from components.observe.metrics import Metrics
from components.observe.samples import Samples
from components.observe.text_loss import TextLoss
from parallelize.scores import Scorer


class Look(NamedTuple):
    """One thing that looks, at steps of freq and at the last one. All ranks call `see` together."""

    freq: int
    see: Callable[[int, StopSignal], Any]
    """(step, stop) -> what is seen, or None for nothing. It may end early if all ranks agree to stop."""
    log: Callable[[int, Any], None]
    """Writes what is seen at a step."""
    at_start: bool = False
    """Look also before the first step."""


class Looks:
    """All that the job asks for."""

    def __init__(
        self, config: JobConfig, metrics: Metrics, validate: Callable[[StopSignal], Any], scorer: Scorer
    ) -> None:
        """All ranks call this. Raises ConfigError for prompts and tasks that cannot be used."""
        self._metrics, self._steps = metrics, config.training.steps
        self._looks: list[Look] = []
        validation = config.validation
        if validation.enable:
            log_validation: Callable[[int, Any], None] = lambda step, seen: metrics.log_validation(step, *seen)  # noqa: E731
            see: Callable[[int, StopSignal], Any] = lambda _, stop: validate(stop)  # noqa: E731
            self._looks.append(Look(validation.freq, see, log_validation, validation.at_start))
        if validation.enable and validation.text_path:
            text = TextLoss(config, scorer)
            self._looks.append(Look(validation.freq, text.see, metrics.log_text_loss, validation.at_start))
        if config.samples.prompts:
            self._looks.append(Look(config.samples.freq, Samples(config, scorer).see, metrics.log_samples))
        if config.evaluation.tasks:
            self._looks.append(Look(config.evaluation.freq, Evaluation(config, scorer).see, metrics.log_evaluation))

    def if_due(self, step: int, tokens: int, stop: StopSignal) -> int:
        """Look at the model if this step is due; returns the code of a signal that came meanwhile.

        step: 0 is before the first. tokens: seen so far. The time that looking takes is left out of the speed.
        """
        due = [
            look
            for look in self._looks
            if (look.at_start if step == 0 else step % look.freq == 0 or step == self._steps)
        ]
        for look in due:
            seen = look.see(step, stop)
            if stop.code:
                break
            if seen is not None:
                look.log(step, seen)
        if due:
            self._metrics.restart_clock(step, tokens)
        return stop.code
