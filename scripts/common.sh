# shellcheck shell=bash
# What scripts/setup, test and demo share. Sourced, not run.
set -euo pipefail

ROOT=$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/${VENV_NAME:-.venv}}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
PY=$VENV/bin/python
cd "$ROOT"

# horovodrun, mpirun, cmake, ruff and the like are those of the virtual environment.
export PATH=$VENV/bin:$PATH

# Several ranks share this machine's cores: more threads in each only stand in each other's way.
export OMP_NUM_THREADS=1

# A worker that waits longer than this for another ends the job. The default of 30 s is little where cores are short.
export HOROVOD_GLOO_TIMEOUT_SECONDS=${HOROVOD_GLOO_TIMEOUT_SECONDS:-300}

# Open MPI refuses to run as root unless told twice.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

say() { printf '%s: %s\n' "${0##*/}" "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# timed TEXT COMMAND...: say what is being done, do it, say how long it took. Returns the command's failure;
# a function given as the command must notice its own (set -e does not hold in it).
timed() {
    local text=$1 begin=$SECONDS
    shift
    say "$text"
    "$@" || return
    say "    done in $((SECONDS - begin)) s"
}
