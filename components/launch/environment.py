"""The Python environment: what pyproject.toml asks for, whether it is here, and how it comes. Standard library only.

run_train.sh and tests/run.sh call this before anything else is there:

    python components/launch/environment.py --check [--group test]     what is missing, one a line; exit 0 or 1
    python components/launch/environment.py --install [--group test]   install it with pip into the running Python
    python components/launch/environment.py --make [--group test]      make or complete .venv of the repository
"""

import argparse
import contextlib
import fcntl
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"


def requirements(groups: list[str]) -> list[str]:
    """`project.dependencies` of pyproject.toml and those of the named dependency groups."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [*document["project"]["dependencies"], *(line for group in groups for line in _group(document, group))]


def _group(document: dict, name: str) -> list[str]:
    if name not in document["dependency-groups"]:
        sys.exit(f"pyproject.toml has no dependency group {name}; it has {', '.join(document['dependency-groups'])}")
    return document["dependency-groups"][name]


def missing(groups: list[str]) -> list[str]:
    """The requirements that the running Python does not meet. Looks at metadata only: imports nothing."""
    return [line for line in requirements(groups) if not _met(line)]


def _met(requirement: str) -> bool:
    name, operator, wanted = _parse(requirement)
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    if operator == "==":
        return _release(installed) == _release(wanted)
    return _release(installed) >= _release(wanted)


def _parse(requirement: str) -> tuple[str, str, str]:
    """`torch>=2.13` as its three parts; >= and == are all that pyproject.toml uses."""
    parts = re.fullmatch(r"([\w.\-]+)(>=|==)([\d.]+)", requirement)
    assert parts, f"pyproject.toml: {requirement}: write it as name>=version or name==version"
    return parts[1], parts[2], parts[3]


def _release(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu: what follows the numbers, and zeros at the end, don't count."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    return tuple(release)


def install(groups: list[str]) -> int:
    """Bring what is missing in one pip call. A package in the group `pinned` comes at that version."""
    pins = {_parse(line)[0]: line for line in requirements(["pinned"]) if "==" in line}
    wanted = list(dict.fromkeys(pins.get(_parse(line)[0], line) for line in missing(groups)))
    interrupted = _unfinished(Path(sys.prefix)).exists()
    if interrupted:
        # Files of a package may be half there although its metadata is.
        wanted = ["--force-reinstall", *dict.fromkeys(pins.get(_parse(line)[0], line) for line in requirements(groups))]
    if not wanted:
        return 0
    with _unfinished_until_done(Path(sys.prefix)):
        return subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True).returncode


def _unfinished(prefix: Path) -> Path:
    """A file that is there while an installation runs, and stays after one that was cut short."""
    return prefix / "unfinished-install"


@contextlib.contextmanager
def _unfinished_until_done(prefix: Path) -> Iterator[None]:
    prefix.mkdir(exist_ok=True)
    _unfinished(prefix).touch()
    yield  # no finally: what fails stays unfinished
    _unfinished(prefix).unlink(missing_ok=True)


def make(groups: list[str]) -> None:
    """Make .venv of the repository, or bring what it lacks. One at a time: a second call waits for the first."""
    options = [word for group in groups for word in ("--group", group)]
    with _lock():
        if not (VENV / "bin/python").exists() or _unfinished(VENV).exists():
            print(f"making {VENV} and installing what pyproject.toml asks for (a few minutes, once)", flush=True)
            with _unfinished_until_done(VENV):
                _empty(VENV)
                venv.create(VENV, with_pip=True, symlinks=True)
        elif _in_venv("--check", *options, stdout=subprocess.DEVNULL) == 0:
            return
        else:
            print(f"installing into {VENV} what it lacks", flush=True)
        if code := _in_venv("--install", *options):
            sys.exit(f"installing into {VENV} failed with exit code {code}; the next start tries again")


def _empty(folder: Path) -> None:
    """Remove what an interrupted call left, but the mark that it was interrupted."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != _unfinished(folder):
            entry.unlink()


def _in_venv(*words: str, stdout: int | None = None) -> int:
    return subprocess.run([VENV / "bin/python", __file__, *words], stdout=stdout).returncode


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Released by the system when the holder dies, whatever the reason."""
    path = ROOT / ".cache/environment.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run is making .venv: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "install", "make"):
        action.add_argument(f"--{name}", dest="action", action="store_const", const=name)
    parser.add_argument("--group", action="append", default=[], help="a dependency group of pyproject.toml, beside")
    arguments = parser.parse_args()
    if arguments.action == "check":
        lacking = missing(arguments.group)
        if _unfinished(Path(sys.prefix)).exists():
            lacking.insert(0, "an installation that was cut short")
        print(*lacking, sep="\n", end="\n" if lacking else "")
        return 1 if lacking else 0
    try:
        if arguments.action == "install":
            install(arguments.group)
        else:
            make(arguments.group)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{arguments.action}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
