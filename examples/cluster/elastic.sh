#!/usr/bin/env bash
# Train while hosts come and go. The file `hosts` lists those of the moment; edit it while the job runs.
#
#   printf 'host1:1\nhost2:1\n' > hosts
#   examples/cluster/elastic.sh 2 4 python examples/torch_digits_elastic.py --method global-qsgd-8
#
# With GlobalQSGD, give enough bits for the largest number of workers. Elastic training needs Gloo.
set -euo pipefail

LEAST=$1 MOST=$2
shift 2
HERE=$(dirname "${BASH_SOURCE[0]}")

exec horovodrun --gloo -np "$LEAST" --min-np "$LEAST" --max-np "$MOST" \
    --host-discovery-script "$HERE/discover_hosts.sh" ${INTERFACE:+--network-interface "$INTERFACE"} "$@"
