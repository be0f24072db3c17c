"""What is checked before ranks are started: the environment variables, the folder, the job file; and how soon."""

import contextlib
import difflib
import errno
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import setproctitle

import train
from components.commands import check, start
from components.config import ROOT, ConfigError, DataLoader, JobConfig, load_config
from components.config.environment import set_default
from components.data import __main__ as prepare
from components.data.loader import build_loader
from components.launch import rank, signals
from components.launch import settings as settings_module
from components.launch.process import shorten_temporary_folder
from components.launch.settings import OTHERS, Settings, read_settings, with_variables
from tests.cpu import children_seconds
from tests.jobs import OURS, job
from tests.limits import run


def settings(config: JobConfig | None = None, **environment: str) -> Settings:
    return read_settings(config or JobConfig(), environment)


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 0)
    assert settings().ranks == 2
    assert settings(load_config(["--parallelism.data_parallel_replicate_degree", "4"])).ranks == 4
    assert settings(load_config(["--parallelism.data_parallel_shard_degree", "1"])).ranks == 1
    assert settings(NGPU="3").ranks == 3
    four = load_config(["--parallelism.data_parallel_shard_degree", "4"])
    assert settings(four, NNODES="2", RDZV_ENDPOINT="a:1").ranks == 2
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 8)
    assert settings().ranks == 8
    assert settings(NGPU="1").ranks == 1
    with pytest.raises(ConfigError, match=r'NGPU = "16": this node has 8 GPUs.*--comm.share_gpus'):
        start.check([], {"NGPU": "16"})


def test_ranks_that_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: 2)
    shared = load_config(["--comm.share_gpus", "--parallelism.tensor_parallel_degree", "4"])
    assert settings(shared).ranks == 4
    assert settings(load_config(["--comm.share_gpus", "--parallelism.data_parallel_shard_degree", "1"])).ranks == 2
    start.check_devices(shared, settings(shared), {})
    with pytest.raises(ConfigError, match=r"comm.share_gpus = true: .* not of NNODES=2"):
        start.check_devices(shared, settings(shared, NNODES="2", RDZV_ENDPOINT="a:1"), {})


@pytest.mark.parametrize(
    ("visible", "there", "runs"),
    [("0,1", 1, False), ("0", 0, False), ("GPU-8932f937", 0, False), ("0, 1", 2, True), ("-1", 0, True), ("", 0, True)],
)
def test_gpus_that_are_named_are_there(visible: str, there: int, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job for GPUs does not train on the CPU because a device is missing."""
    for module in (settings_module, start):
        monkeypatch.setattr(module, "gpus", lambda: there)
    given = {"NGPU": "1", "CUDA_VISIBLE_DEVICES": visible}
    said = f'CUDA_VISIBLE_DEVICES = "{visible}": torch can use {there} of these devices'
    with contextlib.nullcontext() if runs else pytest.raises(ConfigError, match=said):
        start.check_devices(JobConfig(), settings(NGPU="1"), given)


def test_wrong_variables_are_all_named() -> None:
    wrong = {
        "NGPU": "two",
        "NNODES": "0",
        "NODE_RANK": "1",
        "RDZV_ENDPOINT": "host",
        "MAX_RESTARTS": "-1",
        "SHUTDOWN_TIMEOUT_SECONDS": "soon",
        "OMP_NUM_THREADS": "all",
        "TORCH_FR_BUFFER_SIZE": "1k",
        "LOGLEVEL": "info",
    }
    with pytest.raises(ConfigError) as caught:
        read_settings(JobConfig(), wrong)
    for name, value in wrong.items():
        assert [line for line in caught.value.messages if line.startswith(f'environment: {name} = "{value}": ')]
    with pytest.raises(ConfigError, match=r'LOG_RANK = "2": expected all, or ranks from 0 to 1'):
        settings(NGPU="2", LOG_RANK="2")
    with pytest.raises(ConfigError, match="RDZV_ENDPOINT is needed too"):
        settings(NGPU="2", NNODES="2")
    assert settings(NGPU="2", MAX_RESTARTS="1").restarts == 1
    read_settings(JobConfig(), dict.fromkeys(wrong, ""))  # empty is unset
    settings(OMP_NUM_THREADS="4,1", TORCH_FR_BUFFER_SIZE="0", LOGLEVEL="INFO")


def test_an_empty_variable_gets_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EMPTY": "", "GIVEN": "1"}.items():
        monkeypatch.setenv(name, value)
        set_default(name, "2")
    assert (os.environ["EMPTY"], os.environ["GIVEN"]) == ("2", "1")
    files = [ROOT / "train.py", *(ROOT / "components").rglob("*.py"), *(ROOT / "parallelize").rglob("*.py")]
    assert [file for file in files if "environ.setdefault" in file.read_text()] == [], "it keeps an empty value"


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert [settings(NGPU=ranks).threads for ranks in ("1", "2", "5", "24")] == [12, 6, 2, 1]


def test_the_dump_folder_must_be_one_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        start.check(["--job.dump_folder", str(tmp_path / "file/outputs")], {"NGPU": "1"})
    start.check(["--job.dump_folder", str(tmp_path / "a/b")], {"NGPU": "1"})
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "checking makes nothing"


def test_checkpoints_must_be_writable_before_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--job.dump_folder", str(tmp_path), "--checkpoint.enable"]
    (tmp_path / "checkpoint").touch()
    with pytest.raises(ConfigError, match=f"checkpoint.folder.*: {tmp_path}/checkpoint is not a folder"):
        start.check(words, {"NGPU": "1"})
    (tmp_path / "checkpoint").unlink()
    start.check(words, {"NGPU": "1"})
    (tmp_path / "checkpoint").mkdir()
    allowed = os.access
    read_only = str(tmp_path / "checkpoint")  # as a file system mounted so, on which root cannot write either
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != read_only and allowed(path, mode))
    with pytest.raises(ConfigError, match=f"checkpoint.folder.*: no permission to write in {tmp_path}/checkpoint"):
        start.check(words, {"NGPU": "1"})
    start.check([*words, "--checkpoint.load_only"], {"NGPU": "1"})


@pytest.mark.parametrize(
    ("words", "name", "key"),
    [
        (["--metrics.enable_tensorboard"], "tb", "metrics.save_tb_folder"),
        (["--profiling.enable_profiling"], "profile_traces", "profiling.save_traces_folder"),
        (["--checkpoint.enable", "--checkpoint.last_save_in_hf"], "hugging_face", "checkpoint.last_save_in_hf"),
    ],
)
def test_each_folder_of_outputs_is_checked(words: list[str], name: str, key: str, tmp_path: Path) -> None:
    config = load_config([*words, "--job.dump_folder", str(tmp_path)])
    start.check_folders(config)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"{key} = .*{name} is not a folder"):
        start.check_folders(config)


def test_without_a_job_file_the_debug_recipe_is_run() -> None:
    recipe = ["--job.config_file", str(start.DEFAULT_RECIPE)]
    assert start.with_recipe(["--training.steps", "3"]) == [*recipe, "--training.steps", "3"]
    for words in (["--job.config_file", "a.toml"], ["--job.config-file=a.toml"]):
        assert start.with_recipe(words) == words


def test_torchtitans_variables_are_read_and_options_win_over_them() -> None:
    given = {"CONFIG_FILE": "a.toml", "COMM_MODE": "fake_backend"}
    words = with_variables(["--training.steps", "3"], given)
    assert start.with_recipe(words) == words
    assert words == ["--job.config_file", "a.toml", "--comm.mode", "fake_backend", "--training.steps", "3"]
    recipe = str(start.DEFAULT_RECIPE)
    words = with_variables(["--job.config_file", recipe, "--comm.mode", "default"], given)
    config = load_config(words)
    assert (config.job.config_file, config.comm.mode) == (recipe, "default")
    assert with_variables([], {"CONFIG_FILE": "", "COMM_MODE": ""}) == []
    for mode, reason in {"local_tensor": "CUDA_VISIBLE_DEVICES= runs", "fake": 'expected "default" or "fake_b'}.items():
        with pytest.raises(ConfigError, match=f'environment: COMM_MODE = "{mode}": .*{reason}'):
            with_variables([], {"COMM_MODE": mode})


@pytest.mark.parametrize("command", [start.main, check.main])
def test_both_commands_read_the_variables(
    command: Callable[[list[str]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "preload", None)  # nothing is started
    monkeypatch.setattr(check, "CHECKS", {})
    monkeypatch.setenv("CONFIG_FILE", str(job(tmp_path, "stepz = 1")))
    assert command([]) == 2
    assert f"{tmp_path}/job.toml:1: stepz = 1: unknown key" in "".join(capsys.readouterr())


def test_variables_of_other_launchers_are_refused_where_nothing_replaces_them() -> None:
    given = dict.fromkeys(OTHERS, "2")
    with pytest.raises(ConfigError) as caught:
        read_settings(JobConfig(), given)
    assert [message.split(" = ")[0] for message in caught.value.messages] == [f"environment: {name}" for name in OTHERS]
    read_settings(JobConfig(), {name: idle for name, (idle, _, _) in OTHERS.items()})
    theirs = {"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
    ours = {"NNODES": "2", "NGPU": "1", "RDZV_ENDPOINT": "a:1"}
    assert read_settings(JobConfig(), theirs | ours).world_size == 2


def test_garbage_is_collected_while_data_are_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But not among what is imported, nor while torch is."""
    seen: list[object] = []

    def checks(config: JobConfig, settings: object) -> JobConfig:
        seen.append(gc.isenabled())
        return config

    monkeypatch.setattr(start, "preload", lambda modules, threads: None)
    monkeypatch.setattr(start, "check_layout_and_weights", checks)
    monkeypatch.setattr(signals, "end_at_signals", lambda when: None)

    def prepare_all(config: JobConfig) -> JobConfig:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 1e4))
        return config

    monkeypatch.setattr(prepare, "prepare_all", prepare_all)
    monkeypatch.setattr(start, "start", lambda *arguments: 0)
    try:
        assert start.main(["--job.dump_folder", str(tmp_path)]) == 0
    finally:
        gc.unfreeze()
    assert seen == [False, (True, True)]


# TMPDIR


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR as clusters make it; the link to it is removed in the end."""
    folder = tmp_path / ("job_" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before = set(Path("/tmp").glob("meshwright-*"))
    yield folder
    for link in set(Path("/tmp").glob("meshwright-*")) - before:
        if Path(os.readlink(link)) == folder:
            link.unlink()


def test_ranks_can_be_started_in_a_long_temporary_folder(long_folder: Path) -> None:
    code = "import os; from components.launch.process import preload; preload([], 1); print(os.environ['TMPDIR'])"
    for _ in range(2):  # the second run finds the link
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).resolve() == long_folder
        assert len(done.stdout) < 60


def test_no_place_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(ConfigError, match=r"TMPDIR: No usable temporary directory .*: is the disk full\?"):
        shorten_temporary_folder()


def test_loader_workers_have_a_short_temporary_folder(long_folder: Path) -> None:
    build_loader(None, config=DataLoader())  # type: ignore[arg-type]
    assert tempfile.gettempdir() == str(long_folder)
    build_loader(None, config=DataLoader(num_workers=1))  # type: ignore[arg-type]
    assert Path(tempfile.gettempdir()).resolve() == long_folder
    assert os.environ["TMPDIR"] == tempfile.gettempdir() != str(long_folder)


def test_a_long_temporary_folder_to_which_no_link_can_be_made_is_refused(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_temporary_folder()
    link = Path(tempfile.gettempdir())
    link.unlink()
    link.symlink_to("/etc")  # as another user could have made it
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    try:
        with pytest.raises(
            ConfigError, match=rf'environment: TMPDIR = "{long_folder}": too long .* at most \d\d bytes'
        ):
            shorten_temporary_folder()
    finally:
        link.unlink()


# Through the launcher


def launch(words: list[str], folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The launcher's own process, and its seconds of processor time."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES", "LOG_RANK")}
    code = (
        "import sys\n"
        "from components.commands.start import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'imported torch to refuse a job'\n"
        "sys.exit(code)\n"
    )
    before = children_seconds()
    done = run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables},
    )
    return done, children_seconds() - before


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("[training", {}, "job.toml:1:10: not TOML"),
        ("[training]\nstepz = 1\n", {}, "job.toml:2: training.stepz = 1: unknown key; did you mean training.steps?"),
        ('[training]\nsteps = "1"\n', {}, 'job.toml:2: training.steps = "1": expected an integer of 1 or more'),
        ('[checkpoint]\nfolder = "../.."\n', {}, "must be a folder inside job.dump_folder"),
        ("[parallelism]\ndata_parallel_shard_degree = 3\n", {"NGPU": "2"}, "makes 3 ranks, but there are 2. What fits"),
        ("", {"NGPU": "abc"}, 'environment: NGPU = "abc": expected an integer of 1 or more'),
        ("", {"NGPU": "0"}, 'environment: NGPU = "0": expected an integer of 1 or more'),
        ('[job]\ndump_folder = "job.toml/outputs"\n', {}, "job.toml is not a folder"),
    ],
)
def test_a_mistake_ends_the_launch_in_a_second_with_code_2(
    text: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    job(tmp_path, text)
    done, seconds = launch(["--job.config_file", "job.toml"], tmp_path, **variables)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"], "the dump folder was touched"
    assert seconds < 1.5


def test_help_shows_every_key() -> None:
    done, _ = launch(["--help"], ROOT, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    missing = [key for key in OURS if f"--{key}" not in done.stdout]
    assert not missing, difflib.get_close_matches(missing[0], done.stdout.split())
    assert "origins" not in done.stdout
    for name in ("--check", "NGPU", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "LOG_RANK", "PYTHON", "exit codes"):
        assert name in done.stdout


def test_ranks_train_the_job_that_the_launcher_has_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also after a restart, when the job file may be another one or gone."""
    given: list[list[str]] = []
    seen: list[object] = []
    words = ["--job.config_file", str(job(tmp_path, "[training]\nsteps = 7\n")), "--job.dump_folder", str(tmp_path)]
    config = load_config(words)
    monkeypatch.setattr(start, "preload", lambda modules, threads: None)
    monkeypatch.setattr(signals, "end_at_signals", lambda when: None)
    monkeypatch.setattr(prepare, "prepare_all", lambda config: config)

    def take(config: JobConfig, settings: Settings, main: str, argv: list[str]) -> int:
        given.append(argv)
        return 0

    monkeypatch.setattr(start, "start", take)
    try:
        assert start.main(words) == 0
    finally:
        gc.unfreeze()
    (tmp_path / "job.toml").unlink()
    monkeypatch.setattr(rank, "run_to_exit", lambda main, config: seen.append((main, config)))
    monkeypatch.setattr(setproctitle, "setproctitle", seen.append)
    rank.run(given[0])
    title = f"--job.config_file {tmp_path / 'job.toml'} --job.dump_folder {tmp_path}"
    assert seen == [f"{sys.executable} {train.__file__} {title}", (train.main, config)]


@pytest.mark.parametrize(("handles", "code"), [(True, 7), (False, 143)])
def test_sigterm_is_passed_on_to_a_command_in_its_own_process(tmp_path: Path, handles: bool, code: int) -> None:
    """Its end is waited for, and its code is the launcher's."""
    lines = ["import signal, sys, time", "def main(argv):", '    print("ready", flush=True)', "    time.sleep(20)"]
    handler = "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    (tmp_path / "waits.py").write_text("\n".join([*lines[:2], *[handler] * handles, *lines[2:]]), encoding="utf-8")
    call = "import sys; from components.commands.start import run_alone; sys.exit(run_alone('waits', [], {}))"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with subprocess.Popen([sys.executable, "-c", call], env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(15) == code
