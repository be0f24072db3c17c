#!/usr/bin/env bash
# Train:  ./run_train.sh [--job.config_file FILE] [--table.key value ...]     (--help lists every key)
#
# Finds a Python that has what pyproject.toml asks for, or makes .venv in the repository, and hands over to
# components/commands/start.py. Works in any folder and with bash 3.2. PYTHON names the Python to use.
set -euo pipefail

script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname -- "$script")/$link" ;; esac
done
root="$(CDPATH='' cd -P -- "$(dirname -- "$script")" && pwd -P)"
case "$root" in
    *:*)
        echo "$root: Python cannot import from a path with a colon; move the repository to another folder" >&2
        exit 2
        ;;
esac

# Sets $python. Options (--group test) go to components/launch/environment.py. Says nothing when the environment is there.
find_python() {
    local environment="$root/components/launch/environment.py" lacks base
    if [ -n "${PYTHON:-}" ]; then
        python="$PYTHON"
        if ! modern "$python"; then
            echo "PYTHON=$PYTHON is not a Python 3.11 or newer; unset PYTHON to let one be found or made" >&2
            return 2
        fi
        if ! lacks="$("$python" "$environment" --check "$@")"; then
            echo "PYTHON=$PYTHON lacks what pyproject.toml asks for: $(echo "$lacks" | tr '\n' ' ')" >&2
            echo "Install it there ($PYTHON $environment --install $*) or unset PYTHON" >&2
            return 2
        fi
        return 0
    fi
    for python in "$root/.venv/bin/python" python3 python; do
        if "$python" "$environment" --check "$@" >/dev/null 2>&1; then return 0; fi
    done
    for base in python3 python3.13 python3.12 python3.11 python; do
        if modern "$base" && "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            "$base" "$environment" --make "$@" >&2 || return $?
            python="$root/.venv/bin/python"
            return 0
        fi
    done
    echo "No Python 3.11 or newer that can make an environment was found. Install one (on Debian and Ubuntu" >&2
    echo "with python3-venv), or name one that has what pyproject.toml asks for: PYTHON=... $0" >&2
    return 2
}

modern() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    find_python
    # gloo connects each rank with every other one, by two sockets: beyond the usual 1,024 files from about 500 ranks on.
    ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true
    # Before the caller's own path, so that no other `components` is found first. -P: nor beside start.py.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -P "$root/components/commands/start.py" "$@"
fi
