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

    def resume(self, step: int, looks_again: bool = False, beside: bool = False) -> None:
        """Continue after this step: an earlier run's rows of later steps are dropped, because those steps run again.

        looks_again: so are rows of validations and other looks at the model after this step. beside: the earlier run
        may go on, and its rows stay in a file of their own. Raises OSError.
        """
        rows = read_rows(self.path) if step else []
        if (not step or beside) and self.path.exists():  # the rows are another run's
            until = time.strftime("%Y-%m-%d_%H-%M-%S")
            self.path.replace(self.path.with_name(f"{self.path.stem}-until-{until}.jsonl"))
        trained = {"loss", "dynamics"}
        kept = [row for row in rows if row["step"] <= step - (looks_again and not trained & row.keys())]
        replace(self.path, "".join(json.dumps(row) + "\n" for row in kept))

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
