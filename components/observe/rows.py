"""Files of rows, one JSON object a line, which outlive a full disk and a run that starts again."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from components.config.files import replace
from components.observe.report import read_rows


class Rows:
    """A file of rows, each with a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = self._told = False

    def resume(self, step: int) -> None:
        """Continue after this step: an earlier run's rows of later steps are dropped, because those steps run again.

        Raises OSError.
        """
        if not step and self.path.exists():  # the rows are another run's
            until = time.strftime("%Y-%m-%d_%H-%M-%S")
            self.path.replace(self.path.with_name(f"{self.path.stem}-until-{until}.jsonl"))
        rows = read_rows(self.path)
        replace(self.path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row, and return it as it is written: with null for numbers that are not finite."""
        row = without_nan(row)
        try:
            with self.path.open("a") as file:
                file.write("\n" * self._torn + json.dumps(row) + "\n")  # a line break first, to end a torn row
            self._torn = False
        except OSError as error:  # a full disk must not end the run
            if not self._told:
                print(f"step {row['step']}: rows are lost: {self.path}: {error.strerror}", file=sys.stderr, flush=True)
            self._torn = self._told = True
        return row


def without_nan(value: Any) -> Any:
    """Replaces numbers that are not finite by None (null), because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(inside) for key, inside in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
