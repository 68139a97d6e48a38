#!/usr/bin/env bash
# flux: --job-name=restart
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=logs/{{name}}-{{id}}.out
# flux: --signal=USR1@2m
# Run a program that goes on after its time limit; see docs/user-guide/preemption.md.
# A slot is a rank: with more cores for each, say --cores-per-slot.
# Flux signals the ranks two minutes before; the script submits itself again, as Flux does
# not requeue. The program keeps its checkpoints in RUN_FOLDER.
# Not run: @FLUX@
# From the folder that has jobs/:
#   . jobs/site.env && flux batch [--nodes=8 --nslots=32] jobs/flux/restart.flux PROGRAM [OPTIONS]
set -euo pipefail

: "${FLUX_URI:?expected a job of Flux; submit this file with flux batch}"
# shellcheck source=/dev/null
source jobs/site.env || {
    echo "expected jobs/site.env in $PWD, found none; submit from the folder that has it" >&2
    exit 1
}
site_environment
: "${1:?expected a program, found none; flux batch jobs/flux/restart.flux PROGRAM [OPTIONS]}"

# The jobs that follow are given the folder of the first, with this environment.
export RUN_FOLDER="${RUN_FOLDER:-runs/restart-$(flux job id --to=dec "$(flux getattr jobid)")}"
mkdir -p "$RUN_FOLDER"

# Signals are for the ranks, which save the step that they are at, and end with status 42.
trap '' TERM USR1 USR2
status=0
flux run --nslots python "$@" || status="$?"
if ((status == 42)); then
    echo "all is saved: submitting the job that follows"
    flux --parent batch jobs/flux/restart.flux "$@"
fi
exit "$status"
