#!/usr/bin/env bash
# Tests before a commit: lint, format, types, and the tests that find nearly every mistake.
#
#   tests/run.sh                    the quick command: ten to 25 minutes on two cores
#   tests/run.sh WORDS              these words go to pytest, and nothing else is run: tests/run.sh tests/test_config.py
#   tests/run.sh --full             all tests and convergence runs: one to two and a half hours
#   tests/run.sh --rest [SECONDS]   what --full has beside the quick command; begins no test after so many seconds
#   tests/run.sh --all              --full and every layout of the matrix: two hours or more
#   tests/run.sh --costs            --full, and writes what each test took to tests/costs.json, which says what is slow
#   tests/run.sh --list             what each command proves
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/../run_train.sh"
find_python --group test
cd "$root"
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile what the first one has
export OPENBLAS_NUM_THREADS=1  # threads of numpy spin when a process starts
if [ -z "${MEASURED:-}" ]; then
    MEASURED=yes exec "$python" -m tests.cpu tests/run.sh "$@"
fi

failed=""
step() {
    echo "== $1"
    shift
    "$python" -m "$@" || failed="$failed $1"
}
tests() {
    step "tests" pytest -p tests.cpu -n 2 --dist loadfile --no-loadscope-reorder -rs "$@"
}
check() {
    step "lint" ruff check .
    step "format" ruff format --check .
    step "types" mypy train.py components models parallelize tests
    step "faults can be planted" pytest -p tests.cpu --plants
}

case "${1:-}" in
    "")
        check
        tests -m "not slow"
        step "one convergence run" tests.convergence recipes/llama_debug.toml "ddp 2 tp 2" -- --training.seq_len 64
        ;;
    --full | --all | --costs)
        check
        tests $([ "$1" != --costs ] || echo --write-costs)
        step "convergence" tests.convergence
        [ "$1" != --all ] || step "every layout" tests.matrix --all
        ;;
    --rest)
        left="${2:-36000}"
        if [ "$left" -gt 0 ]; then
            step "convergence" tests.convergence
        else
            echo "not run, the time was over: convergence"
        fi
        turn="$(git rev-parse HEAD 2>/dev/null || echo 0)"
        tests -m slow --turn "$turn" --until $(($(date +%s) + left - SECONDS))
        ;;
    --list) step "list" tests.listed ;;
    *) step "tests" pytest -p tests.cpu "$@" ;;
esac

if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
