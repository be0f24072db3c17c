"""What docs/launch/ offers: the batch script is run as Slurm would, the manifests are of their schemas' form, and the
launcher takes the command and the environment that they give it."""

import ast
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from components.commands import start
from components.config import ROOT
from components.launch.settings import Settings
from tests.limits import finish, wait_until
from tests.test_train import TINY_RUN, numbers

FOLDER = ROOT / "docs/launch"
BATCH = FOLDER / "slurm.sbatch"
SCHEMAS = json.loads((ROOT / "tests/schemas/launch.json").read_text())


# Slurm

# As srun: the command on every node at once, signals passed on, the highest exit code.
SRUN = """\
#!/usr/bin/env python3
import os, signal, subprocess, sys
words = sys.argv[1:]
options = [words.pop(0) for word in list(words) if words[0].startswith("-")]
assert set(options) == {"--kill-on-bad-exit=0", "--cpu-bind=none"}, options
nodes = [
    subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(node)})
    for node in reversed(range(int(os.environ["SLURM_JOB_NUM_NODES"])))
]
signal.signal(signal.SIGUSR1, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max(node.wait() for node in nodes))
"""
SCONTROL = """\
#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then printf 'localhost\\nother\\n'; else echo "$@" >> "$SCONTROL_LOG"; fi
"""

Submit = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """Run the batch script on two pretended nodes of one CPU rank each."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    begun: list[subprocess.Popen[str]] = []

    def submit(*words: str) -> subprocess.Popen[str]:
        job = {
            "SLURM_JOB_ID": str(free_port() - 20000),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
            "OMP_NUM_THREADS": "1",
        }
        kept = {name: value for name, value in os.environ.items() if name not in ("NODE_RANK", "LOG_RANK")}
        environment = {**kept, **job, "PATH": f"{tools}:{os.environ['PATH']}", "NGPU": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["bash", str(BATCH), "--job.config_file", "recipes/llama_debug.toml", *TINY_RUN, *words]
        begun.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return begun[-1]

    yield submit
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGQUIT)  # the launchers kill their ranks
            finish(process)


def free_port() -> int:
    """One of those that the script chooses from: 20000 to 29999."""
    for port in range(20000, 30000):
        with socket.socket() as candidate:
            if candidate.connect_ex(("localhost", port)):
                return port
    raise AssertionError("no free port")


def test_the_batch_script_is_bash_and_leaves_time_to_save() -> None:
    text = BATCH.read_text()
    assert subprocess.run(["bash", "-n", BATCH]).returncode == 0
    warning = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.M)
    grace = re.search(r"^export SHUTDOWN_TIMEOUT_SECONDS=(\d+)", text, re.M)
    assert warning
    assert grace
    assert int(grace[1]) + 30 <= int(warning[1])


@pytest.mark.torchrun
def test_a_batch_job_saves_when_its_time_is_up_and_ends_in_its_next_turn(submit: Submit, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    words = ("--job.dump_folder", str(dump), "--training.steps", "24", "--validation.enable", "false")
    first = submit(*words)
    wait_until(lambda: (dump / "metrics.jsonl").exists() and len(numbers(dump)) >= 2, first)
    first.send_signal(signal.SIGUSR1)  # to the batch shell alone
    output = finish(first)[0]
    assert first.returncode == 138, output
    stopped_at = numbers(dump)[-1][0]
    assert stopped_at < 24
    assert (dump / f"checkpoint/step-{stopped_at}").is_dir()
    assert re.fullmatch(r"requeue \d+\n", (tmp_path / "scontrol.log").read_text())

    second = submit(*words)
    output = finish(second)[0]
    assert second.returncode == 0, output
    assert f"continuing after step {stopped_at}" in output
    assert [step for step, _, _ in numbers(dump)] == list(range(1, 25))
    assert json.loads((dump / "run.json").read_text())["ranks"] == 2
    assert {path.name for path in dump.glob("logs/*/*")} == {"rank_0.log", "rank_1.log"}
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1, "only when the time was up"


def test_a_batch_job_with_a_mistake_is_not_queued_again(submit: Submit, tmp_path: Path) -> None:
    process = submit("--training.stepz", "3")
    output = finish(process)[0]
    assert process.returncode == 2
    assert output.count("did you mean training.steps?") == 2, "once a node"
    assert not (tmp_path / "scontrol.log").exists()


# Files of YAML


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def validator(kind: str) -> jsonschema.Draft202012Validator:
    schema = {"$defs": SCHEMAS["$defs"], "$ref": f"#/$defs/{kind}"}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each key of a document is."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        if isinstance(value, dict):
            yield (*above, key)
        yield from paths(part, (*above, key))


FREE = ("labels", "annotations", "limits", "requests", "plugins", "envs", "environment", "args", "services", "volumes")
"""What stands in these has names of one's own."""
KINDS = {
    "kubeflow.yaml": ["ClusterTrainingRuntime", "TrainJob"],
    "volcano.yaml": ["Job"],
    "skypilot.yaml": ["SkyPilot"],
    "dstack.yaml": ["dstack"],
    "compose.yaml": ["Compose"],
}
ELSEWHERE = {"slurm.sbatch", "Dockerfile", "Dockerfile.dockerignore", "ray_train.py"}
"""Files that other tests check."""


def test_every_file_is_checked() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {*KINDS, *ELSEWHERE}


@pytest.mark.parametrize(("name", "kinds"), KINDS.items())
def test_a_manifest_is_of_its_schemas_form_and_a_misspelt_one_is_not(name: str, kinds: list[str]) -> None:
    if name in INJECTED:
        assert [document["kind"] for document in documents(name)] == kinds
    for number, kind in enumerate(kinds):
        check = validator(kind)
        assert [error.message for error in check.iter_errors(documents(name)[number])] == []
        for path in paths(documents(name)[number]):
            if (len(path) > 1 and path[-2] in FREE and isinstance(path[-1], str)) or path[0] == "x-node":
                continue
            wrong = documents(name)[number]
            place: Any = wrong
            for key in path[:-1]:
                place = place[key]
            place[f"{path[-1]}x"] = place.pop(path[-1])
            assert not check.is_valid(wrong), path


def pod(name: str) -> dict[str, Any]:
    """The pod of one node: its container, with the job's arguments, and its grace period."""
    first, *rest = documents(name)
    if name == "volcano.yaml":
        return first["spec"]["tasks"][0]["template"]["spec"]
    (replicated,) = first["spec"]["template"]["spec"]["replicatedJobs"]
    found = replicated["template"]["spec"]["template"]["spec"]
    found["containers"][0]["args"] = rest[0]["spec"]["trainer"]["args"]
    return found


# What the operators put into each container, for node 1 of 2.
INJECTED: dict[str, dict[str, str]] = {
    "kubeflow.yaml": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "llama8b-node-0-0.llama8b",
        "PET_MASTER_PORT": "29500",
    },
    "volcano.yaml": {
        "VC_TASK_INDEX": "1",
        "VC_NODE_NUM": "2",
        "VC_NODE_HOSTS": "llama8b-node-0.llama8b,llama8b-node-1.llama8b",
    },
}


def started(command: list[str], given: dict[str, str], tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the variables of run_train.sh, for which a stand-in tells how a command calls it."""
    stand_in = tmp_path / "run_train.sh"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" > words\nenv -0 > environment\n')
    stand_in.chmod(0o755)
    subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"], **given}, check=True)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    return words, dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().split("\0")[:-1])


@pytest.mark.skipif(" " in torch.__file__, reason="the recipe compiles: refused where torch's path has a space")
@pytest.mark.parametrize(("name", "port"), [("kubeflow.yaml", 29500), ("volcano.yaml", 29500)])
def test_the_launcher_takes_what_a_manifest_gives_it(name: str, port: int, tmp_path: Path) -> None:
    """Its own command, run with a stand-in for run_train.sh that tells how it was called."""
    (container,) = pod(name)["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    words, environment = started([*container["command"], *container["args"]], given | INJECTED[name], tmp_path)
    assert words == container["args"]
    config, settings = start.check([*words, "--job.dump_folder", str(tmp_path)], environment)
    assert config.checkpoint.enable, "a restart continues"
    assert settings == Settings(
        ranks=8,
        nodes=2,
        node_rank=1,
        endpoint=f"{INJECTED[name].get('PET_MASTER_ADDR', 'llama8b-node-0.llama8b')}:{port}",
        shutdown_seconds=300,
    )


@pytest.mark.parametrize("name", INJECTED)
def test_a_pod_has_time_to_save_shared_memory_and_a_shared_folder(name: str) -> None:
    found = pod(name)
    (container,) = found["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert found["terminationGracePeriodSeconds"] >= int(environment["SHUTDOWN_TIMEOUT_SECONDS"]) + 30
    assert "exec " in container["command"][2], "the container's first process gets the signal: it must be the launcher"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
    for key in ("job.dump_folder", "training.dataset_cache", "training.dataset_path"):
        (word,) = [word for word in container["args"] if word.startswith(f"--{key}=")]
        assert word.partition("=")[2].startswith("/shared/"), "the same on every node"


def test_what_would_happen_again_is_not_tried_again() -> None:
    """Exit codes 2 and 3, as components/exit_codes.py has them."""
    job = documents("volcano.yaml")[0]["spec"]
    ended = [policy["exitCode"] for policy in job["policies"] if policy["action"] == "AbortJob"]
    events = [policy.get("event") for policy in job["policies"]]
    assert ended == [2, 3]
    assert events == [None, None, "PodFailed", "PodEvicted"], "the first that fits is taken"
    assert job["minAvailable"] == job["tasks"][0]["replicas"]
    runtime = documents("kubeflow.yaml")[0]["spec"]["template"]["spec"]
    batch = runtime["replicatedJobs"][0]["template"]["spec"]
    (rule,) = batch["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert batch["backoffLimit"] == 0
    assert runtime["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


# SkyPilot, dstack, Compose

# Variables that SkyPilot and dstack set on node 1 of 2.
OF_NODE = {
    "skypilot.yaml": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    },
    "dstack.yaml": {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    },
}


@pytest.mark.skipif(" " in torch.__file__, reason="the recipe compiles: refused where torch's path has a space")
@pytest.mark.parametrize("name", OF_NODE)
def test_the_launcher_takes_what_skypilot_and_dstack_give_it(name: str, tmp_path: Path) -> None:
    (task,) = documents(name)
    given = task["envs"] if "envs" in task else dict(line.split("=", 1) for line in task["env"])
    script = task["run"] if "run" in task else " && ".join(task["commands"])
    words, environment = started(["bash", "-c", script], given | OF_NODE[name], tmp_path)
    assert "exec ./run_train.sh" in script, "signals reach the launcher"
    grace = int(environment["SHUTDOWN_TIMEOUT_SECONDS"])
    config, settings = start.check_job([*words, "--job.dump_folder", str(tmp_path)], environment)
    assert config.checkpoint.enable, "a restart continues"
    assert settings == Settings(ranks=8, nodes=2, node_rank=1, endpoint="10.0.0.1:29500", shutdown_seconds=grace)
    if name == "dstack.yaml":
        assert int(task["stop_duration"].removesuffix("m")) * 60 >= grace + 30
        assert "error" not in task["retry"]["on_events"], "exit codes 2 and 3 would only happen again"
    else:
        assert not {0, 1, 2, 3, 4} & {*task["resources"]["job_recovery"]["recover_on_exit_codes"]}
        assert config.checkpoint.remote == f"{given['BUCKET']}/llama8b", "the nodes share no folder"


def test_the_launcher_takes_what_compose_gives_it(tmp_path: Path) -> None:
    (file,) = documents("compose.yaml")
    assert [service["hostname"] for service in file["services"].values()] == [*file["services"]] == ["node0", "node1"]
    for service in file["services"].values():
        words = [*service["command"], "--job.dump_folder", str(tmp_path)]
        config, settings = start.check_job(words, service["environment"])
        assert config.checkpoint.enable
        assert settings == Settings(ranks=1, nodes=2, endpoint="node0:29500", shutdown_seconds=60)
        assert int(service["stop_grace_period"].removesuffix("s")) >= settings.shutdown_seconds + 30
        build = service["build"]
        assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Dockerfile")
        assert {*build["args"]} <= {*re.findall(r"^ARG (\w+)", (FOLDER / "Dockerfile").read_text(), re.M)}


def test_skypilots_own_schema_takes_its_file() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="SkyPilot is not installed")
    (task,) = documents("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_dstacks_own_model_takes_its_file() -> None:
    models = pytest.importorskip("dstack._internal.core.models.configurations", reason="dstack is not installed")
    (task,) = documents("dstack.yaml")
    assert models.TaskConfiguration.model_validate(task).nodes == 2
    with pytest.raises(ValueError, match="retri"):
        models.TaskConfiguration.model_validate({**task, "retri": task["retry"]})


def test_the_schema_of_compose_takes_its_file() -> None:
    compose = pytest.importorskip("compose", reason="docker-compose is not installed")
    schema = json.loads((Path(compose.__file__).parent / "config/compose_spec.json").read_text())
    jsonschema.validate(documents("compose.yaml")[0], schema)


# The image


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words), without comments and with continued lines joined."""
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def test_the_image_is_small_and_does_not_run_as_root() -> None:
    found = instructions()
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
    assert {name for name, _ in found} == known
    assert [words for name, words in found if name == "USER"] == ["1000"]
    assert found[-1] == ("ENTRYPOINT", '["./run_train.sh"]'), "no shell: the launcher gets the signals"
    for words in (words for name, words in found if name == "COPY" and "--from" not in words):
        assert all((ROOT / source).exists() for source in words.split()[:-1] if not source.startswith("--")), words
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv", ".cache", "outputs", "tests"} <= {*ignored}
    for needed in (
        "assets",
        "components",
        "models",
        "parallelize",
        "recipes",
        "run_train.sh",
        "train.py",
        "pyproject.toml",
    ):
        assert needed not in ignored
    assert all("--no-install-recommends" in words for name, words in found if "apt-get install" in words)


def test_hadolint_takes_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_for_ray_uses_names_that_are_there() -> None:
    """Without Ray; tests/test_ray_train.py runs it."""
    tree = ast.parse((FOLDER / "ray_train.py").read_text())
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("components")
    ]
    assert len(ours) == 6
    for node in ours:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
