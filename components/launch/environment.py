"""Checks, completes or makes the Python environment that pyproject.toml requires. Standard library only.

run_train.sh and tests/run.sh call this before any package is installed:

    python components/launch/environment.py --check [--group test]     list missing packages, one per line; exit 0 or 1
    python components/launch/environment.py --install [--group test]   install them with pip into the running Python
    python components/launch/environment.py --make [--group test]      make or complete the repository's .venv
"""

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"


def requirements(groups: list[str]) -> list[str]:
    """`project.dependencies` of pyproject.toml, and the dependencies of the named dependency groups."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = document["dependency-groups"]
    if unknown := [name for name in groups if name not in known]:
        sys.exit(f"pyproject.toml has no dependency group {unknown[0]}; it has {', '.join(known)}")
    return [*document["project"]["dependencies"], *(line for group in groups for line in known[group])]


def missing(groups: list[str]) -> list[str]:
    """The requirements that the running Python does not meet. Reads only metadata and imports no package."""
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
    """Splits `torch>=2.13` into its three parts; pyproject.toml uses only >= and ==."""
    parts = re.fullmatch(r"([\w.\-]+)(>=|==)([\d.]+)", requirement)
    assert parts, f"pyproject.toml: {requirement}: write it as name>=version or name==version"
    return parts[1], parts[2], parts[3]


def _release(version: str) -> tuple[int, ...]:
    """Parses 2.13.0+cpu as (2, 13): suffixes and trailing zeros are left out."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    return tuple(release)


def install(groups: list[str]) -> int:
    """Installs missing packages in one pip call, at the releases in the group `pinned`."""
    pins = {_parse(line)[0]: line for line in requirements(["pinned"]) if "==" in line}
    # After an interruption a package may lack files although its metadata is there.
    interrupted = _unfinished(Path(sys.prefix)).exists()
    lines = requirements(groups) if interrupted else missing(groups)
    if not lines:
        return 0
    force = ["--force-reinstall"] if interrupted else []
    wanted = dict.fromkeys(pins.get(_parse(line)[0], line) for line in lines)
    with _unfinished_until_done(Path(sys.prefix)):
        return subprocess.run([sys.executable, "-m", "pip", "install", *force, *wanted], check=True).returncode


def _unfinished(prefix: Path) -> Path:
    """A file that exists during an installation and remains after an interrupted one."""
    return prefix / "unfinished-install"


@contextlib.contextmanager
def _unfinished_until_done(prefix: Path) -> Iterator[None]:
    prefix.mkdir(exist_ok=True)
    _unfinished(prefix).touch()
    yield  # no finally, because the file must remain after a failure
    _unfinished(prefix).unlink(missing_ok=True)


def make(groups: list[str]) -> None:
    """Makes the repository's .venv, or installs its missing packages. A second call waits for the first."""
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
    """Empties a folder after an interrupted installation, except for the file that marks the interruption."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != _unfinished(folder):
            entry.unlink()


def _in_venv(*words: str, stdout: int | None = None) -> int:
    return subprocess.run([VENV / "bin/python", __file__, *words], stdout=stdout).returncode


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Holds a lock. On a file system with flock, the operating system releases the lock when the process dies."""
    path = ROOT / ".cache/environment.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run is making .venv: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without flock
            stack.enter_context(_made(path.with_suffix(".held")))
        yield


@contextlib.contextmanager
def _made(path: Path) -> Iterator[None]:
    """Waits until this process can make the file; removes it at the end. A killed process leaves the file."""
    mine = f"process {os.getpid()} on {socket.gethostname()}"
    for attempt in itertools.count():
        try:
            with path.open("x") as file:
                file.write(mine)
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # the file was just removed
                if not attempt:
                    print(
                        f"waiting for {path.read_text()}, which makes .venv; if it has ended, remove {path}", flush=True
                    )
            time.sleep(0.2)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


_ELSEWHERE = """\
You cannot write in {root}. Make an environment in a folder of yours, and name its Python at each start:
  python3 -m venv ~/meshwright
  ~/meshwright/bin/python {root}/components/launch/environment.py --install
  PYTHON=~/meshwright/bin/python {root}/run_train.sh ..."""


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
        {"install": install, "make": make}[arguments.action](arguments.group)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{arguments.action}: {error}", file=sys.stderr)
        if arguments.action == "make" and not os.access(ROOT, os.W_OK):
            print(_ELSEWHERE.format(root=ROOT), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
