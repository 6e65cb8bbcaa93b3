# shellcheck shell=bash
# Functions and settings of scripts/setup, test and demo. Sourced, not run.
set -euo pipefail

ROOT=$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/${VENV_NAME:-.venv}}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
PY=$VENV/bin/python
cd "$ROOT"

# horovodrun, mpirun, cmake, ruff and the like are those of the virtual environment.
export PATH=$VENV/bin:$PATH

# Several ranks share this machine's cores: more threads in each only slow each other down.
export OMP_NUM_THREADS=1

# A worker that waits longer than this for another ends the job. The default of 30 s is little where cores are short.
export HOROVOD_GLOO_TIMEOUT_SECONDS=${HOROVOD_GLOO_TIMEOUT_SECONDS:-300}

# Open MPI refuses to run as root without both of these.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

say() { printf '%s: %s\n' "${0##*/}" "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# load_and_processor: on what the figures of a page are measured, from now on.
load_and_processor() {
    echo "$(cut -d ' ' -f 1 /proc/loadavg) ($(grep -m 1 'model name' /proc/cpuinfo | cut -d ':' -f 2 | xargs))"
}

# make_private FOLDER REMEDY: make a folder for what will be run later, or take the one that is there, unless others could
# have put something into it.
make_private() {
    local folder=$1 problem=""
    mkdir -p "$(dirname "$folder")" 2> /dev/null || true
    mkdir -m 700 "$folder" 2> /dev/null || true
    if [ -L "$folder" ]; then
        problem="is a link"
    elif [ ! -d "$folder" ] || [ ! -w "$folder" ]; then
        problem="cannot be written to"
    elif [ ! -O "$folder" ]; then
        problem="belongs to $(stat -c %U "$folder")"
    elif [ $((0$(stat -c %a "$folder") & 022)) != 0 ]; then
        problem="can be written to by others"
    fi
    [ -z "$problem" ] || die "$folder $problem; $2"
    chmod 700 "$folder"
}

# require_owner FOLDER: stop if another user owns it, whose programs would be run. The checkout's owner is trusted anyway.
require_owner() {
    local owner
    owner=$(stat -L -c %u "$1")
    [ "$owner" = "$(id -u)" ] || [ "$owner" = "$(stat -c %u "$ROOT")" ] ||
        die "$1 belongs to $(stat -L -c %U "$1"); remove it, or set VENV=/a/folder/of/yours"
}

# timed TEXT COMMAND...: say what is being done, do it, say how long it took. Returns the command's failure;
# a function given as the command must notice its own (set -e does not hold in it).
timed() {
    local text=$1 begin=$SECONDS
    shift
    say "$text"
    "$@" || return
    say "    done in $((SECONDS - begin)) s"
}
