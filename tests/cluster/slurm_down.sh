#!/usr/bin/env bash
# Remove the Slurm cluster of slurm_up.sh, with its hosts and all their processes.
set -euo pipefail
export HPCHOSTS_RUN="${HPCHOSTS_RUN:-/run/hpchosts-slurm}"
exec "$(dirname "${BASH_SOURCE[0]}")/hosts_down.sh"
