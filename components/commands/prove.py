"""`./run_train.sh --prove [usual arguments]`: is the job's layout the same run as one process?

The job is shrunk (shrink.py), and runs some steps on gloo ranks beside one process. If they differ, each axis runs by
itself, and the first wrong parameter is named with its likely cause.
"""

import contextlib
import io
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from components.commands.figures import BARS, Observation, errors, figures
from components.commands.observed import STEPS, Proof
from components.commands.shrink import alone, only, shrink
from components.commands.start import GPUS, with_recipe
from components.commands.teach import make_up
from components.config import ROOT, ConfigError, JobConfig, check_rules, load_config, to_json
from components.config.contradictions import CONTRADICTIONS
from components.data.__main__ import prepare_all
from components.launch.exit_codes import ExitCode
from components.launch.process import last_lines, preload
from components.launch.ranks import run_ranks
from components.launch.settings import Settings, read_settings, with_variables
from components.launch.signals import STOP_SIGNALS
from parallelize.mesh import Degrees, minimum_ranks, resolve_degrees
from parallelize.plan.auto import filled
from parallelize.rules import check_device, check_layout
from parallelize.rules.chosen import resolved

_RANK = "components.commands.observed:rank"
_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_MOST_FREE = 4096
"""Most ranks that are tried for a job that takes any number of ranks."""


class Ended(Exception):
    """Ranks of the small job ended with an error, which the text describes."""


class Lost(Exception):
    """A rank of the small job was killed, which says nothing about the job."""


def main(argv: list[str]) -> int:
    """Prove the job of these arguments; returns 0 for the same run, 1 for another one, 2 for a job that is refused.

    Returns 5, and no verdict, if a rank was killed.
    """
    try:
        config = load_config(with_recipe(with_variables(argv, os.environ)))
        model = config.model
        if model.sizes.get("vocab_size") == "tokenizer":  # the small job has its own
            config = replace(config, model=replace(model, sizes={**model.sizes, "vocab_size": 1024}))
        config = resolved(config)
        if config.parallelism.auto:
            count = int(os.environ.get(GPUS, "0"))
            settings = _settings(config, {**os.environ, "NGPU": os.environ.get("NGPU") or str(count or "")})
            config = filled(config, settings.world_size, settings.nodes, count > 0)
        real = degrees_of(config, os.environ)
        free = not os.environ.get("NGPU") and -1 in (
            config.parallelism.data_parallel_replicate_degree,
            config.parallelism.data_parallel_shard_degree,
        )
        for number in _SIGNALS:
            signal.signal(number, _stop)
        with tempfile.TemporaryDirectory() as folder:
            small, degrees, notes = shrink(config, real, free, Path(folder))
            check(small, degrees)
            check(alone(small), Degrees())
            return prove(small, degrees, notes, Path(folder))
    except ConfigError as error:
        print(*error.messages, sep="\n", file=sys.stderr)
        return ExitCode.CONFIG
    except Ended as error:
        print(f"no proof       one process ends with an error:\n{error}")
        return ExitCode.ERROR
    except Lost as error:
        print(f"no proof       {error}, perhaps by the system for memory: free memory and run it again")
        return ExitCode.LOST_RANK


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def degrees_of(config: JobConfig, environment: Mapping[str, str]) -> Degrees:
    """The job's degrees, on NGPU x NNODES ranks; if NGPU is unset, on the fewest ranks that the rules accept.

    Raises ConfigError if the rules refuse the job, or if NGPU or NNODES is no number.
    """
    if environment.get("NGPU"):
        counts = [_settings(config, environment).world_size]
    else:
        counts = [minimum_ranks(config)]
        free = (config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree)
        while -1 in free and counts[-1] * 2 <= _MOST_FREE:
            counts.append(counts[-1] * 2)
    refused: ConfigError | None = None
    for count in counts:
        try:
            degrees = resolve_degrees(config, count)
            check_layout(config, degrees)
            return degrees
        except ConfigError as error:
            refused = refused or error
    assert refused
    raise refused


def _settings(config: JobConfig, environment: Mapping[str, str]) -> Settings:
    """The settings of a start of the job itself, whose nodes need not meet. Raises ConfigError."""
    nodes = {"NNODES": environment.get("NNODES") or "1", "RDZV_ENDPOINT": "none:1"}
    return read_settings(config, {**environment, **nodes})


def check(config: JobConfig, degrees: Degrees) -> None:
    """Raises ConfigError if a rule refuses the small job."""
    check_rules(CONTRADICTIONS, config)
    check_layout(config, degrees)
    check_device(config, None)


def prove(config: JobConfig, degrees: Degrees, notes: list[str], folder: Path) -> int:
    """Run the small job beside one process, print what was found, and return the exit code."""
    sizes = ", ".join(f"{name} {value}" for name, value in config.model.sizes.items())
    print(f"layout         {degrees}, {degrees.world_size} ranks on this machine, beside one process")
    print(f"small model    {config.model.name}: {sizes}")
    print(f"not shown      {'; '.join(notes)}", flush=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        make_up(config)
        config = prepare_all(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork server inherits that; ranks take it back
    preload([_RANK.partition(":")[0]], 1)
    signal.signal(signal.SIGINT, _stop)
    one = run(alone(config), Degrees(), folder)
    bars = bars_of(config)
    try:
        many = _compared(config, degrees, one, folder, bars)
    except Ended as error:
        print(f"another run    the ranks end with an error:\n{error}")
        print("\n".join(_axes(config, degrees, one, folder, bars)[0]))
        return ExitCode.ERROR
    found = figures(many.observation, one.observation)
    over = {name for name, value in found.items() if not value <= bars[name]}
    print("another run" if over else f"the same run   in {STEPS} steps, every figure within its bar")
    for name, value in found.items():
        if name in over or value or name in ("weights at step 0", "tokens", "loss", "gradient", "weights"):
            print(f"  {name:18} {_shown(value, bars[name])}{_where(name, many.observation, one.observation)}")
    if not over:
        return ExitCode.DONE
    lines, clearest, axis = _axes(config, degrees, one, folder, bars)
    print("\n".join([*lines, *diagnose(clearest or many, one, getattr(degrees, axis, degrees.world_size), axis)]))
    return ExitCode.ERROR


def _compared(config: JobConfig, degrees: Degrees, one: Proof, folder: Path, bars: Mapping[str, float]) -> Proof:
    """The proof of a layout; with experts, and over a bar, once more with the routing of one process.

    A token of all but equal scores may go to other experts at another layout, which is no fault.
    """
    proof, routing = run(config, degrees, folder), one.observation.routing
    found = figures(proof.observation, one.observation)
    if routing.known and any(not value <= bars[name] for name, value in found.items()):
        torch.save(routing, folder / "routing")
        try:
            replayed = run(config, degrees, folder, folder / "routing")
        except Ended:  # scores that one process has not: no flip
            return proof
        return replayed
    return proof


def bars_of(config: JobConfig) -> dict[str, float]:
    """BARS; wider for what follows from rounded moments, of which one may be the next number."""
    if config.optimizer.state_dtype == "float32":
        return BARS
    return BARS | {
        "weights": 1e-3,
        "loss": 1e-4,
        "gradient norm": 1e-3,
        "validation loss": 1e-4,
        "loss by source": 1e-4,
    }


def run(config: JobConfig, degrees: Degrees, folder: Path, routing: Path | None = None) -> Proof:
    """Start the ranks of a small job; returns what they have observed. Raises Ended, or Lost."""
    result, logs = folder / "result", folder / f"logs_{len(list(folder.glob('logs_*')))}"
    result.unlink(missing_ok=True)
    logs.mkdir()
    settings = Settings(ranks=degrees.world_size, shown=frozenset(), shutdown_seconds=10)
    with _stderr_to(logs / "launcher.log"):
        code = run_ranks(_RANK, [to_json(config), str(result), str(routing or "")], settings, logs)
    for number in _SIGNALS:  # which the launcher has taken
        signal.signal(number, _stop)
    if code > 128 or code == ExitCode.UNSAVED:
        raise SystemExit(code)
    if lost := re.search(r"rank \d+ was killed by SIGKILL", (logs / "launcher.log").read_text()):
        raise Lost(lost[0])
    if code or not result.exists():
        raise Ended(_last_words(logs, degrees.world_size))
    proof: Proof = torch.load(result, weights_only=False)
    return proof


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Keeps the launcher's report of a failed rank off the console."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _last_words(logs: Path, ranks: int) -> str:
    """The error of the rank that says most about it: losing another rank is a consequence."""
    said = {rank: list(last_lines(logs / f"rank_{rank}.log", 60)) for rank in range(ranks)}
    for rank, lines in said.items():
        last = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        if last and not re.match(r".*(Dist|gloo)", last[-1]):
            frames = [place for place, line in enumerate(lines) if re.match(rf'  File "{re.escape(str(ROOT))}/', line)]
            where = lines[frames[-1] :][:2] if frames else []
            return "\n".join([*where, f"  rank {rank}: {last[-1]}"])
    return "\n".join(f"  {line}" for line in next(iter(said.values()), [])[-6:])


def _axes(
    config: JobConfig, degrees: Degrees, one: Proof, folder: Path, bars: Mapping[str, float]
) -> tuple[list[str], Proof | None, str]:
    """Run each axis by itself. Returns lines, and the proof and name of the first axis that is another run."""
    lines, clearest, guilty = list[str](), None, ""
    axes = [axis for axis, size in asdict(degrees).items() if size > 1]
    if len(axes) == 1:
        return [f"axis           {axes[0]}, the only one"], None, axes[0]
    for axis in axes:
        job, kept = only(config, degrees, axis)
        try:
            check(job, kept)
            proof = run(job, kept, folder)
        except ConfigError:
            continue  # an axis that a rule ties to others
        except Ended as error:
            lines.append(f"axis           {axis} alone ends with an error too:\n{error}")
            guilty = guilty or axis
            continue
        found = figures(proof.observation, one.observation)
        if over := [name for name, value in found.items() if not value <= bars[name]]:
            lines.append(f"axis           {axis} alone is another run: {', '.join(over)}")
            if clearest is None:
                clearest, guilty = proof, axis
    if not lines:
        lines.append(f"axis           no axis alone is another run: {' x '.join(axes)} together are")
    return lines, clearest, guilty


def diagnose(many: Proof, one: Proof, degree: int, axis: str) -> list[str]:
    """Which parameters are wrong, by how much, and the likely cause, nearest cause first."""
    left, right = many.observation, one.observation
    if left.sequences != right.sequences:
        return ["wrong          the tokens: ranks read other sequences than one process"]
    if left.first_weights.keys() != right.first_weights.keys():
        names = left.first_weights.keys() ^ right.first_weights.keys()
        return [f"wrong          the parameters: {', '.join(sorted(names))} are in one of the two only"]
    started = [name for name, each in right.first_weights.items() if not torch.equal(left.first_weights[name], each)]
    if started:
        return [f"wrong          {_named(started)} at step 0: a slice has the wrong place in the full tensor"]
    same_loss = abs(left.losses[0] / right.losses[0] - 1) <= BARS["loss"]
    off = errors(left.gradients, right.gradients)
    wrong = {name: error for name, error in off.items() if error > BARS["gradient"]}
    if forward := "" if same_loss else _first_output(many.outputs, one.outputs):
        own = [name for name in right.first_weights if name.rpartition(".")[0] == forward]
        own.sort(key=lambda name: not name.endswith("bias"))
        beside = [name for name in wrong if name.startswith(forward.rpartition(".")[0] + ".")]  # of attention's core
        named = own or beside or list(wrong)
        error = max((wrong.get(name, 0.0) for name in named), default=0.0)
        lines = [f"wrong          {_named(named)}: gradient off by {error:.1e} on {axis or 'all axes'}"]
        lines.append(f"first          in forward, the output of {_pattern(forward)} is wrong before any other")
        return [*lines, f"likely cause   {_cause_forward(own, many, axis)}"]
    if not wrong:
        weights = errors(left.weights, right.weights)
        worst = max(weights, key=lambda name: weights[name])
        what = (
            "the update, as gradients are right" if weights[worst] > BARS["weights"] else "the loss, not its gradient"
        )
        if any(rows[0] != right.expert_rows[name][0] for name, rows in left.expert_rows.items()):
            what = "tokens of experts are not counted over all ranks"
        return [f"wrong          {_named([worst])}: weights off by {weights[worst]:.1e}; {what}"]
    # Backward goes from the last module to the first, and carries an error along.
    places = {module: place for place, module in enumerate(one.outputs)}
    wrong = dict(sorted(wrong.items(), key=lambda item: places.get(item[0].rpartition(".")[0], -1)))
    causes = {name: _cause(name, many, one, degree, axis) for name in wrong}
    certain = [name for name, cause in causes.items() if cause]
    last = (certain or list(wrong))[-1]
    alike = [name for name in wrong if _pattern(name) == _pattern(last)]
    same_cause = {_pattern(name) for name in certain if causes[name] == causes[last]} - {_pattern(last)}
    error = max(wrong[name] for name in alike)
    lines = [f"wrong          {_named([last])}: gradient off by {error:.1e} on {axis or 'all axes'}"]
    if same_cause:
        lines.append(f"and            {', '.join(sorted(same_cause))}")
    if others := {_pattern(name) for name in wrong} - same_cause - {_pattern(last)}:
        lines.append(f"with it        {_some(sorted(others))}, as a consequence or for another cause")
    return [*lines, f"likely cause   {causes[last] or _unknown(many, one, len(wrong) == len(off), axis)}"]


def _cause(name: str, many: Proof, one: Proof, degree: int, axis: str) -> str:
    """The likely cause of a wrong gradient where forward is right; empty if no sign is known."""
    left, right = many.observation.gradients[name].double(), one.observation.gradients[name].double()
    along = axis or "an axis"
    if name in many.apart:
        return f"an all-reduce over {along} is missing: ranks hold different gradients of the same numbers"
    ratio = ((left * right).sum() / right.square().sum()).item()
    if not left.any():
        return "nothing reaches the gradient, which is 0: the output was detached, or reduced away"
    if ((left - ratio * right).norm() / left.norm()).item() > 1e-3:
        return ""
    if math.isclose(ratio, 1 / degree, rel_tol=1e-3):
        return f"gradient x {ratio:.3g}: an average over {along} where a sum belongs, or one rank's part of the sum"
    if math.isclose(ratio, degree, rel_tol=1e-3):
        return f"gradient x {ratio:.3g}: {along} ranks add up what is complete on each of them"
    return f"gradient x {ratio:.3g}: another divisor than the global batch's, such as a mean over a rank's labels"


def _unknown(many: Proof, one: Proof, everything: bool, axis: str) -> str:
    """The likely cause where no parameter has a sign of its own. everything: all gradients are wrong."""
    if everything:
        left, right = many.observation.gradients, one.observation.gradients
        ratios = [((left[name] * each).sum() / each.square().sum()).item() for name, each in right.items()]
        middle = sum(ratios) / len(ratios)
        if max(abs(ratio - middle) for ratio in ratios) < 0.1 * abs(1 - middle):
            return f"every gradient is about x {middle:.2g}: divided once more, by ranks, micro-batches or accumulation"
    along = axis or "an axis"
    return f"a part of the sum over {along} is missing or counted twice, here or in the gradient that comes in"


def _first_output(outputs: Mapping[str, tuple[float, float]], wanted: Mapping[str, tuple[float, float]]) -> str:
    """The first module whose output is wrong. Ranks that hold the same output count alike in both sums."""
    for name, (one, two) in wanted.items():
        if name in outputs and one and two:
            ratio, squares = outputs[name][0] / one, outputs[name][1] / two
            whole = max(ratio, 1.0)
            if abs(ratio / squares - 1) > 1e-4 or abs(whole / round(whole) - 1) > 1e-4 or ratio < 0.9999:
                return name
    return ""


_OUTPUTS = {
    "cp": "a rank has positions, masks, keys or values of another part of the sequence, or merges parts of attention"
    " without their shares of the softmax",
    "pp": "a stage gets another hidden state than the one before it gives",
    "ep": "rows went to other experts, or came back in another order",
    "dp_shard": "ranks compute with other weights than they hold together",
    "dp_replicate": "replicas compute with different weights",
}
"""Axis -> likely cause of a wrong output."""


def _cause_forward(parameters: list[str], many: Proof, axis: str) -> str:
    if axis in _OUTPUTS:
        return _OUTPUTS[axis]
    along = axis or "an axis"
    if any(name.endswith("bias") for name in parameters):
        return f"each {along} rank adds the whole bias to its part of a sum; or partial sums are not added up"
    if any(name in many.apart for name in parameters):
        return f"an all-reduce over {along} is missing: ranks hold different gradients of the same numbers"
    return f"a partial sum over {along} is not added up (RowwiseParallel left out), or each rank took another's part"


def _pattern(name: str) -> str:
    """layers.3.attention.wq.weight -> layers.*.attention.wq.weight."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _named(names: list[str]) -> str:
    patterns = list(dict.fromkeys(_pattern(name) for name in names))
    return f"{_some(patterns)} ({names[-1]})" if patterns[0] != names[-1] else _some(patterns)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _shown(value: float, bar: float) -> str:
    if not bar:
        return "different" if value else "equal"
    return f"{value:.1e}  (bar {bar:.0e})"


def _where(name: str, left: Observation, right: Observation) -> str:
    """The worst parameter of a figure."""
    if name not in ("gradient", "weights"):
        return ""
    if name == "gradient":
        found = errors(left.gradients, right.gradients)
    else:
        zeros = [key for key, each in right.first_weights.items() if not each.any()]
        found = errors(left.weights, right.weights, zeros)
    return f"  {max(found, key=lambda key: found[key])}" if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
