"""Defaults of environment variables; a variable with an empty value counts as unset."""

import os


def set_default(name: str, value: str) -> None:
    """Sets a variable that is unset or empty, because an empty value makes libraries fail or end the process."""
    if not os.environ.get(name):
        os.environ[name] = value
