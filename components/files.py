"""Files: JSON, hashes, durability."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def digest(path: Path) -> list:
    """Size in bytes, and a hash, of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, hashlib.blake2b).hexdigest()]


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
