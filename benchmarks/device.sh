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

gpus="$("$python" -c \
    'import cupy; print(cupy.cuda.runtime.getDeviceCount())' 2>/dev/null || true)"
if ! ((gpus)); then
    echo "expected a GPU and CuPy, found none; run nvidia-smi and hpcstrat doctor" >&2
    exit 2
fi
options=(--smoke)
questions=(--smoke)
if [[ -z "${SMOKE:-}" ]]; then
    mkdir -p "$folder"
    options=(--results "$folder")
    questions=()
    exec > >(tee "$folder/device_$(hostname)_$(date +%Y%m%d-%H%M).txt") 2>&1
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

# Whether MPI takes the memory of GPUs: a trial, kept for this kind of node.
timeout 300 "$python" -m hpcstrat.engine.gpu.probe.probe || failed+=(probe)
timeout 120 "$python" -m hpcstrat doctor || failed+=(doctor)
timeout 600 "$python" benchmarks/device_questions.py --ranks "$ranks" \
    ${questions[@]+"${questions[@]}"} || failed+=(questions)

bench() {
    local count="$1" name="$2"
    shift 2
    echo "== $name, $count ranks"
    timeout 400 "${mpirun[@]}" -n "$count" "$python" "benchmarks/bench_$name.py" \
        --device "${options[@]}" "$@" || failed+=("$name on $count ranks")
}

bench 1 allreduce --sizes 1MiB,64MiB,256MiB
bench "$ranks" allreduce
bench "$ranks" fused
bench 1 step --gradients 1MiB
bench "$ranks" step
bench "$ranks" checkpoint --size 512MiB --rounds 3 --folder "${TMPDIR:-/tmp}"

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
