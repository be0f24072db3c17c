"""Faults planted in random places of the code, one at a time: does the quick command find them?

python -m tests.planted --count 40 --seed 1 --list       the places and the faults; which of them change nothing?
python -m tests.planted --count 40 --seed 1 --omit 3 17  runs the tests with each of the others, until one fails
python -m tests.planted --seed 1 --only 5 --full         with the tests that are slow too
"""

import argparse
import ast
import copy
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from components.config import ROOT

ONLY_PLANTS = "MESHWRIGHT_ONLY_PLANTS"
"""pytest --plants sets it: the code that a test's own fault replaces is looked for, and no layout is run."""
CODE = ("components", "models", "parallelize")
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Fault:
    """A span of a file's text, by line and column (in bytes, as ast counts), and what it is replaced with."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    kind: str
    new: str

    def planted(self) -> str:
        """The file's text with the fault."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        before = b"".join(lines[: first - 1]) + lines[first - 1][:left]
        after = lines[last - 1][right:] + b"".join(lines[last:])
        return (before + self.new.encode() + after).decode()

    def __str__(self) -> str:
        old = "\n".join(self.path.read_text(encoding="utf-8").splitlines()[self.start[0] - 1 : self.end[0]])
        place = f"{self.path.relative_to(ROOT)}:{self.start[0]}"
        return f"{place}  {self.kind}\n    {' '.join(old.split())}\n    {' '.join(self.new.split())}"


def variants(node: ast.AST) -> Iterator[tuple[str, Callable[[], ast.AST]]]:
    """The faults of one expression or statement, by name, and the code of each."""

    def changed(**fields: object) -> Callable[[], ast.AST]:
        def make() -> ast.AST:
            other = copy.copy(node)
            for name, value in fields.items():
                setattr(other, name, value)
            return other

        return make

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _OPERATORS:
            yield "another operator", changed(op=_OPERATORS[type(op)]())
        case ast.Compare(ops=[op]):
            yield "another comparison", changed(ops=[_OPERATORS[type(op)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "a sign less", lambda: operand
        case ast.Constant(value=bool(value)):
            yield "the other truth", changed(value=not value)
        case ast.Constant(value=int(value)):
            yield "off by one", changed(value=value + 1)
        case ast.Expr(value=ast.Call()):
            yield "a call less", ast.Pass
        case ast.IfExp(body=body, orelse=orelse):
            yield "the other branch", changed(body=orelse, orelse=body)
        case ast.Dict(keys=keys, values=values) if len(keys) > 1:
            yield "an entry less", changed(keys=keys[:-1], values=values[:-1])
    if isinstance(node, ast.Call) and node.keywords:
        yield "a keyword less", changed(keywords=node.keywords[:-1])
    if isinstance(node, ast.Call) and len(node.args) > 1 and type(node.args[0]) is type(node.args[1]):
        yield "arguments swapped", changed(args=[node.args[1], node.args[0], *node.args[2:]])


def faults_of(path: Path) -> list[Fault]:
    """Every fault of a file. Texts, annotations, and the sentences of errors are left as they are."""
    found = list[Fault]()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.expr | ast.stmt):
            start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            for kind, make in variants(node):
                new = ast.unparse(make())
                found.append(Fault(path, start, end, kind, f"({new})" if isinstance(node, ast.expr) else new))
        for name, field in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in field if isinstance(field, list) else [field]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise):
                        visit(child)

    visit(ast.parse(path.read_bytes()))
    return found


def drawn(count: int, seed: int) -> list[Fault]:
    """Faults in places drawn at random from all of the code: any place is as likely as another."""
    files = [ROOT / "train.py", *sorted(file for name in CODE for file in (ROOT / name).rglob("*.py"))]
    return random.Random(seed).sample([fault for file in files for fault in faults_of(file)], count)


def first_failure(fault: Fault, folder: Path, words: list[str]) -> str:
    """The test that fails first in a clone of the code with this fault; empty if none does."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    # Nothing but the fault has changed since the commit before, so its own tests are run first.
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests", "commit", "--quiet", "--allow-empty", "-m", "none"]
    subprocess.run(git, cwd=folder, check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    (folder / fault.path.relative_to(ROOT)).write_text(fault.planted(), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.cpu", "-x", "-rfE", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"exit code {done.returncode}"


def main(argv: list[str]) -> int:
    """Print each fault and the test that found it; 1 if any was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--omit", type=int, nargs="*", default=[], metavar="N", help="faults that change nothing")
    parser.add_argument("--only", type=int, nargs="*", metavar="N")
    parser.add_argument("--full", action="store_true", help="also with the tests that are slow")
    options = parser.parse_args(argv)
    total = missed = 0
    for number, fault in enumerate(drawn(options.count, options.seed)):
        if number in options.omit or (options.only is not None and number not in options.only):
            continue
        print(f"{number:3}  {fault}", flush=True)
        if options.list:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = first_failure(fault, Path(folder) / "clone", [] if options.full else ["-m", "not slow"])
        total, missed = total + 1, missed + (not found)
        print(f"    {time.monotonic() - started:.0f} s: {found or 'not found'}", flush=True)
    if total:
        print(f"{total - missed} of {total} found")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
