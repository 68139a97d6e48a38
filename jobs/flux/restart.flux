#!/usr/bin/env bash
# flux: --job-name=restart
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=1h
# flux: --output=logs/{{name}}-{{id}}.out
# Run a program that continues after its time limit, and after the loss of a node; see
# docs/user-guide/preemption.md. For ranks with several cores, set OMP_NUM_THREADS to
# --cores-per-slot. The ranks ask flux when the job ends. Flux does not requeue: if the
# ranks end with a status other than 0, this script submits itself again, up to three
# times in a row without a new checkpoint in RUN_FOLDER. (--signal=USR1 ends the brokers
# on other nodes.)
# Ran on flux-core 0.88, with MPICH and two brokers on one host.
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

# Later jobs inherit the folder of the first job with this environment.
export RUN_FOLDER="${RUN_FOLDER:-runs/restart-$(flux job id --to=dec "$(flux getattr jobid)")}"
site_begin_run

ranks=$(($(flux resource list -s all -no '{ncores}') / OMP_NUM_THREADS))

# This script ignores signals, because the ranks handle them: they save, and exit with
# status 42.
trap '' TERM USR1 USR2
status=0
flux run -n "$ranks" -c "$OMP_NUM_THREADS" python "$@" || status="$?"
site_end_run "$status" "submitting the job that follows"
nodes="$(flux resource list -s all -no '{nnodes}')"
flux --parent batch --nodes="$nodes" --nslots="$ranks" jobs/flux/restart.flux "$@"
exit "$status"
