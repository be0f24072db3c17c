"""Faults and bad input: what must happen, the tests that show it, and docs/reliability.md with what was seen.

rows.toml          every row: number, fault, expected, tests
rows_<part>.toml   tests that a part of the code adds to rows
<part>.py          campaigns: functions that take long, run by `python -m tests.faults --campaign`
results.json       what was seen last, by row and by campaign, with date and revision
"""
