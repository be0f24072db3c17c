"""Environment variables, whose empty value is the same as none."""

import os


def set_default(name: str, value: str) -> None:
    """Sets a variable that is unset or empty: libraries would take an empty one for a wrong value, or end on it."""
    if not os.environ.get(name):
        os.environ[name] = value
