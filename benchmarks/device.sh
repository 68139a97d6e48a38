#!/usr/bin/env bash
# Run the checks and benchmarks that need GPUs, in about ten minutes:
#   bash benchmarks/device.sh [FOLDER]
# First come checks, each in a job (device_questions.py), then benchmarks. There is one
# rank per GPU. On a single GPU, two ranks share it under NVIDIA's MPS, which this
# script starts and stops (without MPS, the ranks run in turn, and their figures are
# labeled so), and a single rank tests NCCL. The output is written to FOLDER (default:
# benchmarks/results), as device_HOST_DATE.txt, with the figures of each benchmark for
# pictures. PYTHON and MPIRUN replace python and mpirun, with options:
#   MPIRUN="mpirun -x LD_LIBRARY_PATH --mca pml ucx" bash benchmarks/device.sh results
# A step that fails or times out does not stop the others, and is listed at the end.
# STEPS="questions fused" selects steps, and LIMIT=60 sets the timeout of each step in
# seconds. SMOKE=1 tests this script on the stand-in of the tests, and writes no files.
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
# Use one thread, because NumPy's threads would take the cores of other ranks.
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
    # NCCL 2.30 and later allow ranks to share a GPU.
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

# Try whether MPI accepts GPU memory; the result is cached for this kind of node.
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
    # Wait until the output file is complete.
    exec >&- 2>&-
    wait "$tee" || true
fi
exit $((${#failed[@]} > 0))
