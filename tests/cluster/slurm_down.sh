#!/usr/bin/env bash
# Take the Slurm cluster of slurm_up.sh down, with its hosts and all that runs on them.
set -euo pipefail
export HPCHOSTS_RUN="${HPCHOSTS_RUN:-/run/hpchosts-slurm}"
exec "$(dirname "${BASH_SOURCE[0]}")/hosts_down.sh"
