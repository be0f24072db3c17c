"""run_train.sh, and the Python environment that it finds or makes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.config import ROOT
from components.launch import environment
from tests import limits
from tests.cpu import children_seconds
from tests.processes import small_disk


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what run_train.sh needs, with a launcher that only tells how it was called."""
    repository = tmp_path / "my repository"
    (repository / "components/launch").mkdir(parents=True)
    (repository / "components/commands").mkdir()
    (repository / "tests").mkdir()
    for name in ("run_train.sh", "pyproject.toml", "components/launch/environment.py"):
        shutil.copy(ROOT / name, repository / name)
    (repository / "components/commands/start.py").write_text(
        "import os, sys\nprint(sys.executable, os.environ['PYTHONPATH'], os.getcwd(), sys.argv[1:], sep='\\n')\n"
    )
    return repository


def run(script: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH")}
    return limits.run([script, *words], cwd=cwd, env={**environment, **variables})


def bare_python(folder: Path) -> Path:
    """A Python without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


def test_run_train_uses_a_python_that_has_all(copy: Path, tmp_path: Path) -> None:
    done = run(copy / "run_train.sh", "--a.b", "two words", cwd=tmp_path, PYTHON=sys.executable, PYTHONPATH="/mine")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    python, path, cwd, words = done.stdout.splitlines()
    assert (python, path, cwd) == (sys.executable, f"{copy}:/mine", str(tmp_path))
    assert words == "['--a.b', 'two words']"


@pytest.mark.parametrize("link", ["a/link", "a/b/there/link"])
def test_run_train_may_be_called_through_links(link: str, copy: Path, tmp_path: Path) -> None:
    """A relative link to an absolute one; and one in a linked folder, whose .. is not the folder that names it."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/absolute").symlink_to(copy / "run_train.sh")
    (tmp_path / "a/link").symlink_to("absolute")
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/link").symlink_to("../../my repository/run_train.sh")
    (tmp_path / "a/b/there").symlink_to(tmp_path / "deep/er")
    (tmp_path / "a/my repository").mkdir()
    done = run(tmp_path / link, cwd=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == str(copy)


def test_a_path_from_which_python_cannot_import_is_named(copy: Path, tmp_path: Path) -> None:
    there = copy.rename(tmp_path / "a:b")
    done = run(there / "run_train.sh", cwd=tmp_path, PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{there}: Python cannot import from a path with a colon")


def test_ranks_may_open_as_many_files_as_the_system_allows(copy: Path, tmp_path: Path) -> None:
    """Each rank has two sockets to every other."""
    printed = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    (copy / "components/commands/start.py").write_text(printed)
    script = tmp_path / "few.sh"
    script.write_text(f"ulimit -Sn 256; ulimit -Hn 300; exec '{copy}/run_train.sh'\n")
    assert run(Path("/bin/bash"), str(script), cwd=tmp_path, PYTHON=sys.executable).stdout == "(300, 300)\n"


def test_run_train_refuses_a_python_that_lacks_something(copy: Path, tmp_path: Path) -> None:
    python = bare_python(tmp_path / "bare")
    done = run(copy / "run_train.sh", cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 2
    assert f"PYTHON={python} lacks what pyproject.toml asks for: torch>=2.13 torchdata" in done.stderr
    done = run(copy / "run_train.sh", cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert "is not a Python 3.11 or newer" in done.stderr
    assert not (copy / ".venv").exists()


def test_run_train_finds_an_activated_environment(copy: Path, tmp_path: Path) -> None:
    done = run(copy / "run_train.sh", cwd=tmp_path, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert done.stdout.splitlines()[0] in (sys.executable, str(Path(sys.executable).with_name("python3")))
    assert not (copy / ".venv").exists()


FAKE_PIP = """
import os, sys, time
from pathlib import Path
log = Path(os.environ["PIP_LOG_FILE"])
log.write_text((log.read_text() if log.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
time.sleep(float(os.environ.get("PIP_TAKES", "0")))
if os.environ.get("PIP_DIES"):
    os.kill(os.getppid(), 9)
    os._exit(1)
for word in sys.argv[2:]:
    name, _, version = word.replace("==", ">=").partition(">=")
    folder = Path(sys.prefix) / f"lib/python3.{sys.version_info[1]}/site-packages/{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Name: {name}\\nVersion: {version}\\n")
"""


@pytest.fixture
def making(copy: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which run_train.sh makes .venv in the copy, by a pip that only pretends."""
    base = tmp_path / "base"
    bare_python(base)
    modules = tmp_path / "modules"
    (modules / "pip").mkdir(parents=True)
    (modules / "pip/__init__.py").touch()
    (modules / "pip/__main__.py").write_text(FAKE_PIP)
    # run_train.sh keeps PYTHONPATH, so these go before the real modules.
    path = f"{base}/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(modules), "PIP_LOG_FILE": str(tmp_path / "pip.log")}


def test_run_train_makes_an_environment_once_and_takes_no_half_made_one(
    copy: Path, making: dict[str, str], tmp_path: Path
) -> None:
    killed = run(copy / "run_train.sh", cwd=tmp_path, PIP_DIES="1", **making)
    assert killed.returncode != 0
    # Whatever was written, metadata of the packages included, is not trusted.
    check = [str(copy / ".venv/bin/python"), str(copy / "components/launch/environment.py"), "--check"]
    subprocess.run([check[0], "-m", "pip", "install", *environment.requirements([])], env=making, check=True)
    assert subprocess.run(check, capture_output=True, text=True).stdout == "an installation that was cut short\n"
    leftover = copy / ".venv/half-written"
    leftover.touch()
    Path(making["PIP_LOG_FILE"]).unlink()

    first = run(copy / "run_train.sh", cwd=tmp_path, **making)
    assert first.returncode == 0, first.stderr
    assert not leftover.exists()
    assert first.stdout.splitlines()[0] == str(copy / ".venv/bin/python")
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith(f"making {copy}/.venv")
    (call,) = Path(making["PIP_LOG_FILE"]).read_text().splitlines()
    assert call.startswith("install torch==2.13.0 torchdata==")
    assert ">=" not in call
    assert "pytest" not in call

    second = run(copy / "run_train.sh", cwd=tmp_path, **making)
    assert (second.returncode, second.stderr, second.stdout) == (0, "", first.stdout)


def test_two_first_runs_at_once_install_once(copy: Path, making: dict[str, str], tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [copy / "run_train.sh"],
            env={**os.environ, **making, "PIP_TAKES": "1", "PYTHON": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [limits.finish(process) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    assert sorted(bool("waiting" in err) for _, err in outputs) == [False, True]
    assert len(Path(making["PIP_LOG_FILE"]).read_text().splitlines()) == 1


def test_who_cannot_write_in_the_checkout_is_told_where_to_make_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "checkout", "1m") as checkout:
        subprocess.run(["mount", "-o", "remount,ro", str(checkout)], check=True)
        monkeypatch.setattr(environment, "ROOT", checkout)
        monkeypatch.setattr(sys, "argv", ["environment.py", "--make"])
        assert environment.main() == 1
    said = capsys.readouterr().err
    assert f"You cannot write in {checkout}" in said
    assert f"PYTHON=~/meshwright/bin/python {checkout}/run_train.sh" in said


def test_checking_the_environment_is_quick_and_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children_seconds()
    code = subprocess.run(
        [sys.executable, ROOT / "components/launch/environment.py", "--check", "--group", "test"]
    ).returncode
    assert code == 0
    assert children_seconds() - before < 0.5  # 0.09 s on an idle machine
    installed = {"torch": "2.10.1", "tyro": "1.0.17", "numpy": "1.26"}
    monkeypatch.setattr(environment.metadata, "version", lambda name: installed.get(name, "9999"))
    assert environment.missing([]) == ["torch>=2.13"]
    installed["torch"] = "2.14.0a0+git123"
    assert environment.missing([]) == []
    assert environment.missing(["pinned"])[0] == "torch==2.13.0"
    installed["torch"] = "2.13.0+cpu"
    assert environment.missing(["pinned"])[0].startswith("torchdata==")


def test_every_package_is_pinned_to_a_release_that_meets_its_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers or ruff that comes out tomorrow changes no new clone."""
    pinned = environment.requirements(["pinned"])[len(environment.requirements([])) :]
    assert all("==" in line for line in pinned)
    releases = dict(line.split("==") for line in pinned)
    monkeypatch.setattr(environment.metadata, "version", releases.__getitem__)
    assert environment.missing(["test", "pinned"]) == []
    assert len(releases) == len(environment.requirements(["test"]))
