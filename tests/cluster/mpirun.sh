#!/usr/bin/env bash
# Start an MPI job from node1 on the pretend hosts, with Open MPI 5 or MPICH:
#   mpirun --host node1:2,node2:2 -n 4 python train.py
# hosts_up.sh puts it into the folder of the hosts as "mpirun". HPCHOSTS_MPIRUN is the
# launcher to use; default: mpirun of the PATH.
set -euo pipefail
run="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# Settings of Open MPI are variables, because it refuses an option given twice. It must
# not ask Slurm for hosts, and its component "han" is many times slower than others
# here. The launcher does not know that the hosts share this machine's cores, so that a
# setting makes waiting ranks yield the processor.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_plm=ssh PRTE_MCA_plm_ssh_agent="$run/rsh" PRTE_MCA_ras=^slurm
export PRTE_MCA_hwloc_default_binding_policy=none
export OMPI_MCA_coll="${OMPI_MCA_coll:-^han}"
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
# Settings of MPICH, for the same reasons.
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC="$run/rsh"
throttle=MPIR_CVAR_CH4_PROGRESS_THROTTLE
export "$throttle=${!throttle:-1}" "${throttle}_NO_PROGRESS_COUNT=64"
exec "$run/hx" node1 "${HPCHOSTS_MPIRUN:-mpirun}" "$@"
