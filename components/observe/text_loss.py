"""The mean loss of a text (validation.text_path), whatever the run trains on: the same at every layout."""

import numpy as np
import torch

from components.config import JobConfig
from components.data.datasets import build_text
from components.data.loader import validation_batches
from components.launch.signals import StopSignal
from parallelize.mesh import global_batch_size
from parallelize.scores import Scorer


class TextLoss:
    """Scores the text's sequences by next-token cross-entropy."""

    def __init__(self, config: JobConfig, scorer: Scorer) -> None:
        """All ranks call this. Raises ConfigError if the text cannot be used."""
        self._config, self._scorer = config, scorer
        self._text = build_text(config, scorer.vocabulary)

    def see(self, step: int, stop: StopSignal) -> tuple[float, int]:
        """The mean loss of the text's labels, in nats, and their number. Ends early if all ranks agree to stop."""
        del step
        config, scorer, count = self._config, self._scorer, len(self._text)
        if config.validation.steps != -1:
            count = min(count, config.validation.steps * global_batch_size(config, scorer.degrees))
        size = config.validation.local_batch_size or config.training.local_batch_size
        given = size, scorer.batch_rank, scorer.degrees.batch_ranks, count, config.training.masks_documents
        total = torch.zeros((), dtype=torch.float64)
        for batch in stop.until_agreed(validation_batches(self._text, *given)):
            total -= scorer.joined(scorer.of_batch(batch, 0).label).sum().cpu()
        labels = self._text.count_valid(np.arange(count))
        return total.item() / max(1, labels), labels
