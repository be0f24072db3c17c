"""Campaigns of restarts and stops: whole runs of two ranks, whose weights are compared with the unbroken run's.

Each start takes half a minute or more. `sigterm` and `launcher` keep what they have seen, and go on from there.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from components.config import ROOT
from tests.benchmarks import exits
from tests.harness import observe
from tests.limits import wait_until
from tests.runs import RUN, Whole, content, descendants, last_step, steps_saved

# Writes where rank 0 is: attempt, place, step. Every place lasts long enough to be hit.
PACED = """
import os, time
from components.state.checkpoint import Checkpointer
step, batches, save = train.train_step, train.validation_batches, Checkpointer._write
def at(place):
    if rank == 0:
        with open(FILE, "a") as file:
            file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {place} {time.time()}\\n")
    time.sleep(0.05)
def train_step(run, batches, valid):
    at("step")
    return step(run, batches, valid)
def validation_batches(*words):
    for batch in batches(*words):
        at("validation")
        yield batch
def write(self, *words):
    at("save")
    return save(self, *words)
train.train_step, train.validation_batches, Checkpointer._write = train_step, validation_batches, write
"""
VALIDATES = ("--validation.enable", "true", "--validation.freq", "6", "--validation.held_out_fraction", "0.05")
WORKERS = ("--training.dataloader.num_workers", "1")
PROGRESS = ROOT / ".cache" / "campaigns"


def campaign_restarts(kills: float = 20) -> list[str]:
    """Ranks of one run are killed 20 times at random, with MAX_RESTARTS=20: weights, and the time of each restart."""
    steps = ("--training.steps", str(int(kills) * 8))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "killed"
        folder.mkdir()
        whole = _start(folder, *steps, MAX_RESTARTS=str(int(kills)))
        seconds = [_kill_one(whole, attempt) for attempt in range(int(kills))]
        code, output = whole.end()
        observe(*RUN, *VALIDATES, *steps, ranks=2, steps=int(steps[1]), folder=str(Path(name) / "unbroken/checkpoint"))
        same = content(folder, int(steps[1])) == content(Path(name) / "unbroken", int(steps[1]))
    assert code == 0, output
    return [
        f"{len(seconds)} kills, exit code {code}, weights, moments and state {'' if same else 'NOT '}bit-equal",
        f"a restart took {sorted(seconds)[len(seconds) // 2]:.1f} s, at the most {max(seconds):.1f} s",
    ]


def campaign_sigterm(stops: float = 30) -> list[str]:
    """SIGTERM to every process of a run at once, 30 times in steps, validations and saves, with loader workers."""
    places = ("step", "validation", "save")

    def stop(whole: Whole, number: int) -> dict[str, Any]:
        place = places[number % len(places)]
        _wait_for(whole, place, random.randint(1, 6))
        for pid in [whole.process.pid, *descendants(whole.process.pid)]:
            os.kill(pid, signal.SIGTERM)
        code, output = whole.end()
        reached, saved = last_step(whole.folder), [0, *steps_saved(whole.folder)][-1]
        return {"place": place, "kept": code == 143 and saved == reached, "code": code, "output": output[-500:]}

    seen = _repeat("sigterm", int(stops), stop)
    kept = {place: [each["kept"] for each in seen if each["place"] == place] for place in places}
    return [f"in a {place}: {sum(found)} of {len(found)} saved, no step lost" for place, found in kept.items()]


def campaign_launcher(kills: float = 10) -> list[str]:
    """The launcher is killed 10 times, with log_freq 1000: its ranks save and end, and the same command goes on."""

    def kill(whole: Whole, number: int) -> dict[str, Any]:
        _wait_for(whole, "step", random.randint(2, 8))
        ranks, before = whole.ranks(), ([0, *steps_saved(whole.folder)])[-1]
        os.kill(whole.process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not any(Path(f"/proc/{rank}/fd/1").exists() for rank in ranks))
        seconds = time.monotonic() - killed_at
        return {"kept": [0, *steps_saved(whole.folder)][-1] > before, "seconds": seconds}

    seen = _repeat("launcher", int(kills), kill, "--metrics.log_freq", "1000")
    slowest = max(each["seconds"] for each in seen)
    kept = sum(each["kept"] for each in seen)
    return [f"{kept} of {len(seen)} saved a later step than before; ranks gone after {slowest:.1f} s at the most"]


def campaign_exits(runs: float = 20) -> list[str]:
    """Clean runs of four ranks through the launcher: their exit codes."""
    codes = exits.main(int(runs))
    return [f"{codes[0]} of {int(runs)} exit codes are 0"]


def _start(folder: Path, *words: str, **variables: str) -> Whole:
    (folder / "places").write_text("")
    fault = PACED.replace("FILE", repr(str(folder / "places")))
    return Whole(folder, *VALIDATES, "--validation.local_batch_size", "1", *words, fault=fault, **variables)


def _places(whole: Whole) -> list[list[str]]:
    """Where rank 0 has been: attempt, place, time."""
    lines = (whole.folder / "places").read_text().splitlines()
    return [words for line in lines if len(words := line.split()) == 3]


def _wait_for(whole: Whole, place: str, times: int) -> None:
    """Until rank 0 is there for the n-th time since the start."""
    whole.wait_until(lambda: [words[1] for words in _places(whole)].count(place) >= times)
    time.sleep(random.random() * 0.1)


def _kill_one(whole: Whole, attempt: int) -> float:
    """Kill a rank in this attempt; seconds to the first step of the next."""
    steps = random.randint(2, 10)
    whole.wait_until(lambda: [words[:2] for words in _places(whole)].count([str(attempt), "step"]) >= steps)
    time.sleep(random.random() * 0.3)
    os.kill(random.choice(whole.ranks()), signal.SIGKILL)
    killed_at = time.time()
    whole.wait_until(lambda: any(words[0] == str(attempt + 1) for words in _places(whole)))
    return float(next(words[2] for words in _places(whole) if words[0] == str(attempt + 1))) - killed_at


def _repeat(name: str, count: int, act: Any, *words: str) -> list[dict[str, Any]]:
    """Start one run again and again, and act on it each time; what was seen is kept in PROGRESS, with the run."""
    folder = PROGRESS / name
    seen_file = folder / "seen.json"
    folder.mkdir(parents=True, exist_ok=True)
    seen: list[dict[str, Any]] = json.loads(seen_file.read_text()) if seen_file.exists() else []
    while len(seen) < count:
        whole = _start(folder, "--training.steps", "100000", *WORKERS, *words)
        try:
            seen.append(act(whole, len(seen)))
        finally:
            whole.kill()
        seen_file.write_text(json.dumps(seen))
        print(f"{name} {len(seen)}/{count}: {seen[-1]}", flush=True)
    shutil.rmtree(folder)
    return seen
