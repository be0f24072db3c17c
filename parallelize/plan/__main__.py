"""Ranks the layouts of a job that fit a number of devices, by predicted time: docs/plan.md.

python -m parallelize.plan recipes/llama70b.toml --devices 256 --device h100-80g
"""

import argparse
import json
import sys
from pathlib import Path

from components.config import ConfigError, load_config
from components.config.bounds import path_argument
from components.config.rule import value_of
from components.data.tokenizer import with_rows
from parallelize.layouts import KEYS, Layout
from parallelize.mesh import Degrees, resolve_degrees
from parallelize.plan import calibrate, compare
from parallelize.plan.devices import find_device
from parallelize.plan.memory import LINES
from parallelize.plan.search import LOCAL, OFFLOADS, Plan, Planner, refusal
from parallelize.plan.time import PARTS
from parallelize.rules.chosen import resolved


def main(argv: list[str]) -> int:
    """Print plans; returns an exit code: 1 if no layout fits, 2 for a mistake of the user."""
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    if argv[:1] == ["calibrate"]:
        return calibrate.main(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a job file")
    parser.add_argument("--devices", type=int, required=True, help="number of devices, which is that of ranks")
    parser.add_argument("--device", default="h100-80g", help="a name in parallelize/plan/devices.toml, or a .toml file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key that is not to change")
    parser.add_argument("--why-not", metavar="tp=16,...", help="what is wrong with a layout, beside the best one")
    parser.add_argument("--explain", action="store_true", help="the job file's own layout, line by line")
    parser.add_argument("--count", type=int, default=3, help="plans to print (3)")
    parser.add_argument("--price", type=float, help="of a device for an hour, for the cost of the run")
    parser.add_argument("--json", action="store_true", help="print a list of plans")
    parser.add_argument("--html", type=path_argument, metavar="FILE", help="pictures of the first plan as one page")
    parser.add_argument("--png", type=path_argument, metavar="FOLDER", help="these pictures as PNG files")
    options, unknown = parser.parse_known_args(argv)
    if unknown and "." in unknown[0]:
        key, *value = unknown[0].lstrip("-").split("=") + unknown[1:2]
        parser.error(f"{unknown[0]}: a key of the job is given as --set {key}={value[0] if value else 'VALUE'}")
    options = parser.parse_args(argv)
    others = [name for name in ("json", "html", "png", "explain", "price") if getattr(options, name)]
    if options.why_not and others:
        parser.error(f"--why-not prints a text of its own; leave out --{others[0]}")
    try:
        for name in ("devices", "count"):
            if (given := getattr(options, name)) < 1:
                raise ConfigError(f"--{name} {given}: use a number of 1 or more")
        return _answer(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _answer(options: argparse.Namespace) -> int:
    pairs = [each.partition("=") for each in options.set]
    if wrong := [each for each, (_, sign, _) in zip(options.set, pairs, strict=True) if not sign]:
        raise ConfigError(f"--set {wrong[0]}: use KEY=VALUE, as in --set parallelism.tensor_parallel_degree=8")
    given = {key.strip().replace("-", "_"): value for key, _, value in pairs}
    # The job file's local batch size need not divide the batch, because the search chooses another one.
    free = {} if options.explain or LOCAL in given else {LOCAL: "1"}
    words = [word for key, value in (free | given).items() for word in (f"--{key}", value)]
    job = load_config(["--job.config_file", str(options.recipe), *words])
    pinned = {key for key, origin in job.origins.items() if origin == "command line"} - {*free, "job.config_file"}
    job = resolved(with_rows(job))
    planner = Planner(job, options.devices, find_device(options.device), frozenset(pinned))
    if options.explain:
        degrees = resolve_degrees(job, options.devices)
        if reason := refusal(job, degrees):
            raise ConfigError(reason)
        plan = planner.plan(job, degrees)
        return _print([plan], planner, options) or _explain(plan, options)
    if options.why_not:
        return _why_not(options.why_not, planner)
    plans, nearest = planner.search(options.count)
    if not plans:
        why = f"{planner.tried} were tried" if nearest else planner.reason()
        print(f"no layout of {options.devices} x {options.device} fits; {why}", file=sys.stderr)
        _print(nearest, planner, options)
        return 1
    return _print(plans, planner, options) or _obvious(plans, planner, options)


def _explain(plan: Plan, options: argparse.Namespace) -> int:
    """The formula of each line of the plan."""
    if not options.json:
        for name, formula in LINES.items():
            print(f"  {name:12} {plan.gib[name]:8.2f} GiB  {formula}")
        for name, formula in PARTS.items():
            if seconds := getattr(plan.times, name):
                print(f"  {name:12} {seconds:8.3f} s    {formula}")
    return 0


def _obvious(plans: list[Plan], planner: Planner, options: argparse.Namespace) -> int:
    """The layout that most people try first, FSDP over all devices, if it is not among the plans."""
    plain, batch = Degrees(dp_shard=planner.ranks), planner.job.training.global_batch_size
    pins = {f"parallelism.{key}" for key in KEYS.values()}
    if options.json or planner.pinned & pins or any(plan.degrees == plain for plan in plans):
        return 0
    other = planner.pinning(Layout(plain).settings)
    found, nearest = other.search(1)
    for plan in found or nearest:
        room = "" if plan.fits else f", and {plan.gib['total'] + plan.device.reserved_gib:.0f} GiB do not fit"
        print(f"{Layout(plain)}, {_methods(plan)}: {_beside(plan, plans[0])}{room}")
    if not found and not nearest:
        few = f"refused: {planner.ranks} ranks need a sequence each, and training.global_batch_size = {batch}"
        few = few if batch < planner.ranks else refusal(other.job, plain)
        print(f"{Layout(plain)}: {few or 'refused'}")
    return 0


def _print(plans: list[Plan], planner: Planner, options: argparse.Namespace) -> int:
    if plans and (options.html or options.png):
        from parallelize.plan.page import write

        write(plans[0], planner, options)
    if options.json:
        print(json.dumps([plan.as_json() for plan in plans], indent=1))
        return 0
    for number, plan in enumerate(plans):
        print(_described(plan, options.price))
        print(f"  {_beside(plan, plans[0])}" if number else _toml(plan, planner))
    if not options.explain:
        print(f"{planner.tried} layouts were tried")
    return 0


def _described(plan: Plan, price: float | None) -> str:
    gib, times, job = plan.gib, plan.times, plan.job
    parts = ", ".join(f"{name} {gib[name]:.1f}" for name in LINES)
    seconds = ", ".join(f"{name} {value:.3f}" for name, value in vars(times).items() if value)
    room = "" if plan.fits else f"; it does not fit, because {plan.device.memory_gib:g} GiB are there"
    lines = [
        f"{Layout(plan.degrees)}, local batch {job.training.local_batch_size}, {_methods(plan)}",
        f"  {plan.tokens_per_second:,.0f} tokens/s a device, MFU {plan.mfu:.1%}, {times.bound_by} most",
        f"  memory {gib['total']:.1f} GiB ({parts}), and {plan.device.reserved_gib:g} reserved{room}",
        f"  step {times.total:.3f} s ({seconds})",
    ]
    days = times.total * job.training.steps / 86_400
    tokens = job.training.steps * job.training.global_batch_size * job.training.seq_len
    cost = f", {days * 24 * plan.degrees.world_size * price:,.0f} at {price:g} an hour" if price else ""
    return "\n".join([*lines, f"  the run: {tokens:.3g} tokens in {days:.2f} days{cost}"])


def _methods(plan: Plan) -> str:
    job = plan.job
    mode = job.activation_checkpoint.mode
    option = f" {job.activation_checkpoint.selective_ac_option}" if mode == "selective" else ""
    schedule = f", {job.parallelism.pipeline_parallel_schedule}" if plan.degrees.pp > 1 else ""
    never = ", weights stay gathered" if job.parallelism.fsdp_reshard_after_forward == "never" else ""
    offloads = "".join(f", {key.partition('.')[2]}" for key in OFFLOADS if value_of(job, key))
    return f"checkpointing {mode}{option}{schedule}{never}{offloads}"


def _beside(plan: Plan, best: Plan) -> str:
    """Differences in time and memory from the best plan."""
    more = {name: getattr(plan.times, name) - getattr(best.times, name) for name in vars(best.times)}
    name = max(more, key=lambda each: more[each])
    memory = plan.gib["total"] - best.gib["total"]
    slower = plan.times.total / best.times.total - 1
    return f"beside the best: {slower:+.1%} time, most of it in {name} ({more[name]:+.3f} s); {memory:+.1f} GiB"


def _toml(plan: Plan, planner: Planner) -> str:
    """The settings that differ from the job's, and those of --set, as tables of a job file."""
    tables: dict[str, list[str]] = {}
    pinned = {key: value_of(plan.job, key) for key in planner.pinned}
    for key, value in (plan.settings | pinned).items():
        if value == value_of(planner.job, key) and key not in {LOCAL, *pinned}:
            continue
        table, _, name = key.partition(".")
        tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(
        line for table, lines in tables.items() for line in (f"  [{table}]", *(f"  {line}" for line in lines))
    )


def _why_not(asked: str, planner: Planner) -> int:
    """Say what rules, memory or time have against the best layout with these degrees."""
    degrees: dict[str, int] = {}
    for part in asked.split(","):
        word, _, value = part.strip().partition("=")
        if word not in KEYS or not value.isdecimal() or not int(value):
            raise ConfigError(f"--why-not {asked}: use degrees, as in tp=8,pp=2; words are {', '.join(KEYS)}")
        degrees[f"parallelism.{KEYS[word]}"] = int(value)
    other = planner.pinning(degrees)
    plans, nearest = other.search(1)
    best, _ = planner.search(1)
    for plan in plans or nearest:
        print(_described(plan, None))
        print(f"  {_beside(plan, best[0])}" if best else "  no other layout fits either")
    if not plans and not nearest:
        print(other.reason())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
