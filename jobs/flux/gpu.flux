#!/usr/bin/env bash
# flux: --job-name=gpu
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --gpus-per-slot=1
# flux: --time-limit=1h
# flux: --output=logs/{{name}}-{{id}}.out
# Run a program with one rank for each GPU, as docs/gpu.md explains. Each rank sees all
# GPUs of its node; the strategy assigns one GPU to each rank.
# Not run: the Flux at hand had no GPUs.
# From the folder that has jobs/:
#   . jobs/site.env && flux batch [--nodes=8 --nslots=32] jobs/flux/gpu.flux PROGRAM [OPTIONS]
set -euo pipefail

: "${FLUX_URI:?expected a job of Flux; submit this file with flux batch}"
# shellcheck source=/dev/null
source jobs/site.env || {
    echo "expected jobs/site.env in $PWD, found none; submit from the folder that has it" >&2
    exit 1
}
site_environment
: "${1:?expected a program, found none; flux batch jobs/flux/gpu.flux PROGRAM [OPTIONS]}"

ranks="$(flux resource list -s all -no '{ngpus}')"
run=(flux run -n "$ranks" -g 1 -o gpu-affinity=off)

# The exit status reports problems that would stop the program.
hpcstrat doctor

# Require GPUs on all hosts: without this line, a job without GPUs would silently be
# slow.
HPCSTRAT_DEVICE=gpu "${run[@]}" hpcstrat doctor

"${run[@]}" python "$@"
