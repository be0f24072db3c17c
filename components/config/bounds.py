"""Types of bounded values, which keys.py describes in words. Every value within its bounds is safe to compute with."""

import argparse
import difflib
import glob
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction as Fractional
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator

LARGEST = 2**31 - 1
"""Largest size or count: the product of two such numbers fits into 64 bits."""


def is_folder(flavor: str) -> bool:
    """Whether model.flavor is a folder instead of a name."""
    return "/" in flavor


class PathError(argparse.ArgumentTypeError, ValueError):
    """The reason why a path is refused, for argparse and for pydantic."""


def local_path(path: str) -> str:
    """Returns the path with ~ expanded; the path need not exist.

    Raises PathError if it is a URL, has a user or a variable that is not expanded, or is not accessible.
    """
    if is_url(path):
        raise PathError("a URL; expected a path of this machine: mount the store, or copy its files")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PathError("no home folder of this user is known; write ./~ for a folder whose name begins with ~")
    variable = re.search(r"\$(?:\{\w+\}|[A-Za-z_]\w*)[^/]*", expanded)
    try:
        if variable and not os.path.lexists(expanded[: variable.end()]):
            raise PathError("variables are not expanded here; write the value instead of $ and its name")
        os.stat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        return expanded
    except OSError as error:
        raise PathError(error.strerror) from None
    return expanded


DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub", "file": "fsspec"}
"""Scheme of a store's URL -> the module that fsspec needs for it."""
_OTHER_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "wasb": "az", "huggingface": "hf"}


def is_url(value: object) -> bool:
    return isinstance(value, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value) is not None


def store_url(url: str) -> str:
    """Returns the URL of a file or folder in a store, without slashes at its end.

    Raises PathError for an unknown scheme, credentials in the URL, a missing driver, or a URL without a bucket.
    """
    scheme, _, rest = url.partition("://")
    if not is_url(url) or scheme not in DRIVERS:
        near = difflib.get_close_matches(scheme.lower() if is_url(url) else "", [*DRIVERS, *_OTHER_SCHEMES], 1, 0.5)
        hint = f"; did you mean {_OTHER_SCHEMES.get(near[0], near[0])}://?" if near else ""
        raise PathError(f"expected a URL that begins with {', '.join(f'{name}://' for name in DRIVERS)}{hint}")
    if redacted(url) != url:
        raise PathError("credentials in a URL would reach logs and run.json; give them to the driver's environment")
    is_named = rest.strip("/") and url.isprintable() and not {".", ".."} & {*rest.split("/")}
    # fsspec chains stores at ::, and takes what is before a glob that comes first for a path of the current folder
    is_whole = "::" not in rest and not glob.has_magic(rest.strip("/").partition("/")[0])
    if not is_named or not is_whole or (scheme == "file") != rest.startswith("/"):
        form = "file:///folder" if scheme == "file" else f"{scheme}://bucket/folder"
        raise PathError(f"expected {form}, without ::, a glob as the first name, and . and .. as names of folders")
    if importlib.util.find_spec(DRIVERS[scheme]) is None:
        raise PathError(f"{scheme}:// needs the package {DRIVERS[scheme]}: pip install {DRIVERS[scheme]}")
    return url.rstrip("/")


def path_or_url(value: str) -> str:
    """local_path, or store_url for a URL."""
    return store_url(value) if is_url(value) else local_path(value)


def no_store_or_url(value: str) -> str:
    """store_url, or the empty string. Raises PathError also for a glob."""
    url = value and store_url(value)
    if glob.has_magic(url):
        raise PathError("expected a folder of a store, not a glob")
    return url


def hub_repository(name: str) -> str:
    """Returns the name of a repository of the Hugging Face hub. Raises PathError if it is none."""
    parts = name.split("/")
    named = all(re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", part) for part in parts)
    if len(parts) != 2 or not named or len(name) > 96 or re.search(r"--|\.\.|\.git$", name):
        raise PathError(
            'expected "org/name" of the hub: at most 96 letters, digits and _, with single - and . between them, and '
            "without .git at the end"
        )
    return name


def repository_or_none(name: str) -> str:
    """hub_repository, or the empty string."""
    return name and hub_repository(name)


def redacted(text: str) -> str:
    """The text with *** instead of credentials in URLs: user, password and the parameters of a query."""
    for pattern, left in _CREDENTIALS:
        text = re.sub(pattern, left, text)
    return text


_PORT = r"(?!\d+(?:[/\s\"']|$))"
_CREDENTIALS = (
    (rf"(://)[^/@:\s]*:{_PORT}[^\s\"']*@", r"\1***@"),  # a password may have slashes
    (rf"(://[^/@:\s]*):{_PORT}[^/\s\"']+", r"\1:***"),
    (r"(://)[^/@\s]*@(?![^/\s]*\.windows\.net)", r"\1***@"),  # az://container@account.dfs.core.windows.net
    (r"(://[^?\s]*\?)[\w.~%-]+=[^\s\"']*", r"\1***"),
)
"""(pattern of credentials in a URL, what replaces it)."""


def path_argument(word: str) -> Path:
    """The type of a path on a command line, for argparse. Raises PathError."""
    return Path(local_path(word))


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers with the ratios of decimal numbers. Raises ValueError if their sum has over 31 bits."""
    exact = [Fractional(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    found = [int(weight * common) for weight in exact]
    found = [weight // math.gcd(*found) for weight in found]
    if sum(found) > LARGEST:
        raise ValueError(f"the ratios of the weights {weights} need integers of more than 31 bits; use fewer digits")
    return tuple(found)


Positive = Annotated[int, Ge(1), Le(LARGEST)]
NonNegative = Annotated[int, Ge(0), Le(LARGEST)]
Sequences = Annotated[int, Ge(1), Le(2**24)]
Seconds = Annotated[int, Ge(1), Le(10**9)]
Seed = Annotated[int, Ge(0), Lt(2**64)]
Position = Annotated[int, Ge(1), Le(2**53)]
Weight = Annotated[float, Ge(0), Le(10**6)]
PositiveFloat = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
Size = int | float | bool | str | list[str]
"""The value of a field of a model's configuration, which the model's family checks."""
PATH = AfterValidator(local_path)
PathName = Annotated[str, MinLen(1), PATH]
"""A path; relative to the current folder."""
PATH_OR_URL = AfterValidator(path_or_url)
DataPath = Annotated[str, MinLen(1), PATH_OR_URL]
"""A path, relative to the current folder, or the URL of data in a store."""
StoreFolder = Annotated[str, AfterValidator(no_store_or_url)]
"""The URL of a folder in a store, or empty."""
HubRepository = Annotated[str, AfterValidator(repository_or_none)]
"""The name of a repository of the Hugging Face hub, or empty."""
INSIDE = "inside job.dump_folder"
FolderName = Annotated[str, MinLen(1), PATH, INSIDE]
"""A folder inside job.dump_folder; relative to it, so that the dump folder can be moved."""
