#!/usr/bin/env bash
# All figures of a machine with GPUs, in about five minutes:
#   bash benchmarks/device.sh [FOLDER]
# One rank for each GPU; where there is one GPU, two ranks share it, and one rank alone
# shows NCCL. FOLDER (default: benchmarks/results) gets a file for each benchmark, named
# by the hardware. PYTHON and MPIRUN replace python and mpirun, with options:
#   MPIRUN="mpirun -x LD_LIBRARY_PATH --mca pml ucx" bash benchmarks/device.sh results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-benchmarks/results}"
python="${PYTHON:-python}"
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
ranks="$gpus"
if ((gpus == 1)); then
    ranks=2
    export HPCSTRAT_SHARE_GPUS=1
fi

# Whether MPI takes the memory of GPUs: a trial, kept for this kind of node.
timeout 300 "$python" -m hpcstrat.engine.gpu.probe.probe || failed+=(probe)

bench() {
    local count="$1" name="$2"
    shift 2
    echo "== $name, $count ranks"
    timeout 400 "${mpirun[@]}" -n "$count" "$python" "benchmarks/bench_$name.py" \
        --device --results "$folder" "$@" || failed+=("$name on $count ranks")
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
