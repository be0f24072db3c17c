"""Environment variables: their defaults, and mistakes in them. A variable with an empty value counts as unset."""

import os
from collections.abc import Mapping


def set_default(name: str, value: str) -> None:
    """Sets a variable that is unset or empty, because an empty value makes libraries fail or end the process."""
    if not os.environ.get(name):
        os.environ[name] = value


def wrong(environment: Mapping[str, str], name: str, reason: str) -> str:
    """The message about a variable with a wrong value."""
    return f'environment: {name} = "{environment.get(name, "")}": {reason}'
