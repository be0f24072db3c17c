"""docs/reliability.md, from the table and from what was seen."""

from typing import Any

from components.config import ROOT
from components.config.files import read_json_if_whole
from tests.faults.rows import FOLDER, Row

PAGE, RESULTS = ROOT / "docs" / "reliability.md", FOLDER / "results.json"

_HEAD = """\
# Faults and bad input: what happens

Written by `python -m tests.faults`, which runs the tests of every row in one run of pytest. A row *held* if all of its
tests passed. Each test fails if the row's protection is removed from the code. Rows with ranks use real processes and
real collectives, on CPU with gloo. `tests/faults/rows*.toml` names the tests of each row.
"""
_PEERS = """\
## What others do

The table says what their sources, documents and issue threads of 2026 say. A cell is empty if these say nothing.

| | here | torchtitan v0.2 | Megatron-LM | OLMo-core | Fast-LLM | axolotl |
|---|---|---|---|---|---|---|
| unknown key | refused with the nearest name | refused, no hint | refused | refused | refused | dropped silently |
| value of a wrong type | refused, all at once | accepted | refused | refused | refused | |
| a step that is not finite | skipped, no bit changes | aborts | rerun machine | skipped, but writes NaN | | |
| resumed at another data parallel degree | same sequences | refused | goes on | goes on | goes on | |
| torn checkpoints when pruning | not counted | counted: the last good one is deleted | | | | |

torch.distributed.checkpoint alone, measured: a flipped bit loads without an error; a step that is saved again and loses
one rank loads mixed weights; reading its `.metadata` runs what the pickle says. KempnerForge has asynchronous
checkpoints with automatic resume, detection of NaN, and a stop for Slurm's preemption.
"""


def read_results() -> dict[str, Any]:
    """rows: number -> seen, seconds, date, revision. campaigns: name -> about, lines, seconds, date, revision."""
    return {"rows": {}, "campaigns": {}} | read_json_if_whole(RESULTS)


def page(rows: list[Row], results: dict[str, Any]) -> str:
    seen = {row.number: results["rows"].get(str(row.number)) for row in rows if row.tests}
    held = sum(found is not None and found["seen"] == "held" for found in seen.values())
    marks = sorted({(found["date"], found["revision"]) for found in seen.values() if found})
    when = ", ".join(f"{date} at revision {revision}" for date, revision in marks) or "never"
    cost = (
        f" All of it takes {results['processor_seconds']} s of processor time."
        if "processor_seconds" in results
        else ""
    )
    lines = [_HEAD, f"Seen on {when}: {held} of {len(rows)} rows held.{cost}", ""]
    lines += ["| row | fault | what must happen | seen | seconds |", "|---|---|---|---|---|"]
    lines += [_line(row, seen.get(row.number)) for row in rows]
    lines += [
        "",
        "## Campaigns",
        "",
        "Campaigns take long, so the test command leaves them out: `python -m tests.faults --campaign`.",
        "",
    ]
    for name, result in sorted(results["campaigns"].items()):
        lines += [
            f"**{name}**, {result['date']}, revision {result['revision']}, {result['seconds']} s: {result['about']}",
            "",
        ]
        lines += [*(f"- {line}" for line in result["lines"]), ""]
    return "\n".join([*lines, _PEERS])


def _line(row: Row, found: dict[str, Any] | None) -> str:
    seen, seconds = (
        (found["seen"], f"{found['seconds']:.1f}") if found else ("no test yet" if not row.tests else "", "")
    )
    return f"| {row.number} | {row.fault} | {row.expected} | {seen} | {seconds} |"
