#!/usr/bin/env bash
# Everything that must pass before a commit: lint, format, types, tests, and the short convergence runs.
# Words given go to pytest, and are all that is tested then.
# With --all first: then the whole matrix too, two hours or more on two cores.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/../run_train.sh"
find_python --group test
cd "$root"
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile what the first one has
export OPENBLAS_NUM_THREADS=1  # threads of numpy spin when a process starts

failed=""
step() {
    echo "== $1"
    shift
    "$python" -m "$@" || failed="$failed $1"
}
step "lint" ruff check .
step "format" ruff format --check .
step "types" mypy train.py components models parallelize tests
whole=""
if [ "${1:-}" = --all ]; then
    whole=yes
    shift
fi
if [ $# -gt 0 ]; then
    step "tests" pytest --durations=10 "$@"
else
    step "tests" pytest -n 2 --dist loadfile --durations=10
    step "convergence" tests.convergence
fi
[ -z "$whole" ] || step "every layout" tests.matrix --all

if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
