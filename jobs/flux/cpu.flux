#!/usr/bin/env bash
# flux: --job-name=cpu
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=logs/{{name}}-{{id}}.out
# Run a program of yours on CPUs, one replica for each slot. For ranks with several
# cores, set OMP_NUM_THREADS to --cores-per-slot.
# Ran on flux-core 0.88, with MPICH and two brokers on one host.
# From the folder that has jobs/:
#   . jobs/site.env && flux batch [--nodes=8 --nslots=32] jobs/flux/cpu.flux PROGRAM [OPTIONS]
set -euo pipefail

: "${FLUX_URI:?expected a job of Flux; submit this file with flux batch}"
# shellcheck source=/dev/null
source jobs/site.env || {
    echo "expected jobs/site.env in $PWD, found none; submit from the folder that has it" >&2
    exit 1
}
site_environment
: "${1:?expected a program, found none; flux batch jobs/flux/cpu.flux PROGRAM [OPTIONS]}"

ranks=$(($(flux resource list -s all -no '{ncores}') / OMP_NUM_THREADS))
flux run -n "$ranks" -c "$OMP_NUM_THREADS" python "$@"
