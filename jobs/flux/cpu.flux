#!/usr/bin/env bash
# flux: --job-name=cpu
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=logs/{{name}}-{{id}}.out
# Run a program of yours on CPUs, one replica for each slot.
# A slot is a rank: with more cores for each, say --cores-per-slot.
# Not run: @FLUX@
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

flux run --nslots python "$@"
