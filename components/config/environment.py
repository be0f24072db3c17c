"""Defaults of environment variables; a variable with an empty value counts as unset."""

import os


def set_default(name: str, value: str) -> None:
    """Sets a variable that is unset or empty, because libraries reject an empty value, or end because of it."""
    if not os.environ.get(name):
        os.environ[name] = value
