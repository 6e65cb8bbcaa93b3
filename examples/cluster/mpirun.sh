#!/usr/bin/env bash
# Train on several hosts with plain mpirun (Open MPI 4), without horovodrun and without a batch system.
#
#   examples/cluster/mpirun.sh host1:4,host2:4 python examples/torch_digits.py --compression global-qsgd --bits 8
#
# Every host needs the same environment in the same path, and ssh from this host without a password.
set -euo pipefail

HOSTS=$1 # name:workers,name:workers,...
shift
WORKERS=$(tr , '\n' <<< "$HOSTS" | awk -F: '{ sum += ($2 ? $2 : 1) } END { print sum }')
# An Open MPI that pip has installed beside Python has moved since it was built, and needs OPAL_PREFIX.
BIN=$(dirname "$(command -v mpirun)")
if [ -e "$BIN/python" ]; then export OPAL_PREFIX=${OPAL_PREFIX:-${BIN%/bin}}; fi
# Variables that every worker needs; Open MPI passes on none by itself.
PASSED=(-x PATH -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}")
for name in $(compgen -e | grep -E '^(HOROVOD_|NCCL_|(LD_LIBRARY|PYTHON)PATH$|OPAL_PREFIX$)'); do PASSED+=(-x "$name"); done

# ob1 without openib is what Horovod's documentation recommends: MPI only carries what NCCL and Gloo do not.
# Set INTERFACE where hosts have several networks: otherwise Open MPI may choose one that they do not share.
exec mpirun -np "$WORKERS" -H "$HOSTS" --bind-to none --map-by slot \
    -mca pml ob1 -mca btl ^openib ${INTERFACE:+-mca btl_tcp_if_include "$INTERFACE"} \
    "${PASSED[@]}" "$@"
