#!/usr/bin/env bash
# What only a machine with GPUs can answer, in about ten minutes:
#   bash benchmarks/device.sh [FOLDER]
# First questions, each a job (device_questions.py), then figures. One rank for each GPU;
# where there is one GPU, two ranks share it under NVIDIA's MPS, which is started here and
# ended again (without MPS they run in turns: their figures are labeled so), and one rank
# alone shows NCCL. FOLDER (default: benchmarks/results) gets one file with all that was
# said, device_HOST_DATE.txt, and beside it the figures of each benchmark for pictures.
# PYTHON and MPIRUN replace python and mpirun, with options:
#   MPIRUN="mpirun -x LD_LIBRARY_PATH --mca pml ucx" bash benchmarks/device.sh results
# A step that fails, or is not done in time, does not stop the others; the end names it.
# STEPS="questions fused" makes some of them only, LIMIT=60 gives each so many seconds.
# SMOKE=1 tries it all on the stand-in of the tests, and writes nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-benchmarks/results}"
python="${PYTHON:-python}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
read -r -a mpirun <<<"${MPIRUN:-mpirun}"
if [[ "$("${mpirun[0]}" --version 2>&1 || true)" =~ "Open MPI"|PRRTE ]]; then
    mpirun+=(--oversubscribe --bind-to none)
    if ((EUID == 0)); then
        mpirun+=(--allow-run-as-root)
    fi
fi
# Threads of NumPy would take the cores of the other ranks.
export OMP_NUM_THREADS=1
failed=()
made=0

gpus="$("$python" -c \
    'import cupy; print(cupy.cuda.runtime.getDeviceCount())' 2>/dev/null || true)"
if ! ((gpus)); then
    echo "expected a GPU and CuPy, found none; run nvidia-smi and hpcstrat doctor" >&2
    exit 2
fi
options=(--smoke)
questions=(--smoke)
alone=(--sizes 1MiB)
together=(--sizes "4KiB,1MiB")
gradients=(--gradients 64KiB)
if [[ -z "${SMOKE:-}" ]]; then
    mkdir -p "$folder"
    options=(--results "$folder")
    questions=()
    alone=(--sizes "1MiB,64MiB,256MiB")
    together=()
    gradients=()
    exec > >(tee "$folder/device_$(hostname)_$(date +%Y%m%d-%H%M).txt") 2>&1
    tee=$!
    nvidia-smi || true
    df -h /dev/shm || true
    git log -1 --format="hpcstrat %h" 2>/dev/null || true
fi
ranks="$gpus"
if ((gpus == 1)); then
    ranks=2
    # NCCL lets ranks share a GPU from 2.30 on.
    export HPCSTRAT_SHARE_GPUS=1 NCCL_MULTI_RANK_GPU_ENABLE=1
    export GPU_SHARING="time slices"
    mps="$(mktemp -d)"
    if [[ -z "${SMOKE:-}" ]] && command -v nvidia-cuda-mps-control >/dev/null &&
        CUDA_MPS_PIPE_DIRECTORY="$mps" CUDA_MPS_LOG_DIRECTORY="$mps" \
            nvidia-cuda-mps-control -d; then
        export CUDA_MPS_PIPE_DIRECTORY="$mps" CUDA_MPS_LOG_DIRECTORY="$mps"
        export GPU_SHARING=MPS
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    fi
    echo "two ranks share the GPU by $GPU_SHARING"
fi

# step NAME SECONDS COMMAND...: runs a command within a limit of time.
step() {
    local name="$1" seconds="${LIMIT:-$2}" status=0
    shift 2
    if [[ -n "${STEPS:-}" && " $STEPS " != *" ${name%% *} "* ]]; then
        return
    fi
    echo "== $name"
    timeout --kill-after=10 "$seconds" "$@" || status=$?
    made=$((made + 1))
    case $status in
    0) ;;
    124 | 137) failed+=("$name: not done after $seconds seconds") ;;
    *) failed+=("$name: status $status") ;;
    esac
}

bench() {
    local count="$1" name="$2"
    shift 2
    step "$name on $count ranks" 400 "${mpirun[@]}" -n "$count" \
        "$python" "benchmarks/bench_$name.py" --device "${options[@]}" "$@"
}

# Whether MPI takes the memory of GPUs: a trial, kept for this kind of node.
step probe 300 "$python" -m hpcstrat.engine.gpu.probe.probe
step doctor 120 "$python" -c "from hpcstrat.cli import main; main()" doctor
step questions 600 "$python" benchmarks/device_questions.py --ranks "$ranks" \
    ${questions[@]+"${questions[@]}"}
bench 1 allreduce "${alone[@]}"
bench "$ranks" allreduce ${together[@]+"${together[@]}"}
bench "$ranks" fused
bench 1 step --gradients 1MiB
bench "$ranks" step ${gradients[@]+"${gradients[@]}"}
bench "$ranks" checkpoint --size 512MiB --rounds 3 --folder "${TMPDIR:-/tmp}"

echo "$((made - ${#failed[@]})) of $made steps done"
if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
fi
if [[ -n "${tee:-}" ]]; then
    # The file is whole before the job ends.
    exec >&- 2>&-
    wait "$tee" || true
fi
exit $((${#failed[@]} > 0))
