#!/usr/bin/env bash
# Bring up a real Slurm cluster on pretend hosts of this machine (Debian, root):
#   slurm_up.sh [-n NODES] [-c CPUS] [-g GPUS] [-r RATE] [-o PID] [-i]
#   . /run/hpchosts-slurm/slurm/env && sinfo
#
# One slurmd runs on each host that hosts_up.sh makes; munged and slurmctld run on this
# machine. All of them, and their jobs, are in the hosts' cgroups, so that slurm_down.sh,
# or the end of the owner, ends everything.
#
#   -n, -c, -g      nodes (2), CPUs of each (2), pretend GPUs of each (0)
#   -r, -o          RATE and owner of hosts_up.sh
#   -i              install missing packages
#   HPCHOSTS_RUN    folder of the cluster; default: /run/hpchosts-slurm
#   MPI             default of srun --mpi: pmix (default; Open MPI), pmi2 (MPICH), none
#
# Exit status 77 means that this machine cannot have it, for the printed reason.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "$here/processes.sh"

nodes=2 cpus=2 gpus=0 rate="" owner=() install=""
while getopts n:c:g:r:o:i option; do
    case "$option" in
        n) nodes="$OPTARG" ;;
        c) cpus="$OPTARG" ;;
        g) gpus="$OPTARG" ;;
        r) rate="$OPTARG" ;;
        o) owner=(-o "$OPTARG") ;;
        i) install=yes ;;
        *) exit 2 ;;
    esac
done
export HPCHOSTS_RUN="${HPCHOSTS_RUN:-/run/hpchosts-slurm}"
run="$HPCHOSTS_RUN" state="$HPCHOSTS_RUN/slurm"
packages=(slurmctld slurmd slurm-client munge libpmix2)

complete() {
    local command
    for command in slurmctld slurmd sinfo munged setpriv; do
        command -v "$command" >/dev/null || return 1
    done
    compgen -G "/usr/lib/*/pmix2/lib/libpmix.so.2" >/dev/null
}

if ((EUID == 0)) && [[ -n $install ]] && ! complete; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
fi
complete || {
    echo "slurm_up.sh: expected Slurm, found it missing or incomplete; apt-get install" \
        "--no-install-recommends ${packages[*]}, or use -i" >&2
    exit 77
}
# Slurm's plugin loads PMIx by a file name that only Debian's libpmix-dev has.
for library in /usr/lib/*/pmix2/lib/libpmix.so.2; do
    [[ -e ${library%.2} ]] || ln -s libpmix.so.2 "${library%.2}"
done

"$here/hosts_up.sh" "${owner[@]}" "$nodes" ${rate:+"$rate"} >/dev/null
trap 'status=$?; ((status == 0)) || "$here/hosts_down.sh"' EXIT
mkdir -p "$state/controller" "$state/log" "$state/munge" "$run/groups/login"
slot="$(<"$run/slot")"

# start NAME COMMAND...: run a daemon on this machine, in the cgroup of the cluster.
start() {
    local name="$1"
    shift
    (
        echo "$BASHPID" >"$run/groups/login/cgroup.procs"
        exec setsid "$@"
    ) </dev/null >"$state/log/$name.out" 2>&1 &
}

socket="$state/munge/socket"
head --bytes 1024 /dev/urandom >"$state/munge/key"
chmod 400 "$state/munge/key"
chown -R munge:munge "$state/munge"
start munged setpriv --reuid munge --regid munge --clear-groups \
    munged -F --key-file="$state/munge/key" -S "$socket" --pid-file="$state/munge/pid" \
    --log-file="$state/munge/log" --seed-file="$state/munge/seed"

memory="$(awk '/MemTotal/ { print int($2 / 1024 * 0.9) }' /proc/meminfo)"
# FirstJobId: processes must show which of two clusters on this machine their job
# belongs to. config_overrides: nodes may have more CPUs than this machine. TmpFS: the
# hosts share /tmp, in which the PMIx plugins of two nodes would use the same folder.
cat >"$state/slurm.conf" <<CONF
ClusterName=pretend$slot
SlurmctldHost=$(hostname -s)(10.77.$slot.254)
SlurmctldPort=$((6900 + slot))
FirstJobId=$((slot * 1000))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$socket
CredType=cred/munge
StateSaveLocation=$state/controller
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.%n.pid
SlurmdSpoolDir=$state/spool.%n
TmpFS=$state/tmp.%n
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=${MPI:-pmix}
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=10000,batch_sched_delay=0,defer_batch
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc=$state/jobcomp.txt
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/none
InactiveLimit=0
KillWait=3
KillOnBadExit=1
MinJobAge=300
SlurmctldTimeout=10
SlurmdTimeout=10
UnkillableStepTimeout=30
WaitTime=0
CONF
generic=""
if ((gpus > 0)); then
    # Slurm needs device files, and then sets CUDA_VISIBLE_DEVICES.
    for ((g = 0; g < gpus; g++)); do
        mknod "$state/gpu$g" c 1 3
        echo "Name=gpu File=$state/gpu$g"
    done >"$state/gres.conf"
    echo "GresTypes=gpu" >>"$state/slurm.conf"
    generic="Gres=gpu:$gpus"
fi
for ((i = 1; i <= nodes; i++)); do
    echo "NodeName=node$i NodeAddr=10.77.$slot.$i Port=6818 CPUs=$cpus" \
        "RealMemory=$memory $generic State=UNKNOWN"
    mkdir "$state/spool.node$i" "$state/tmp.node$i"
done >>"$state/slurm.conf"
shared="Nodes=ALL MaxTime=INFINITE State=UP"
cat >>"$state/slurm.conf" <<CONF
PartitionName=debug $shared Default=YES PriorityTier=10 OverSubscribe=NO
PartitionName=low   $shared PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high  $shared PriorityTier=50
CONF
echo "export SLURM_CONF=$state/slurm.conf MUNGE_SOCKET=$socket" >"$state/env"
# shellcheck source=/dev/null
source "$state/env"

wait_for 5 test -S "$socket" || true
start slurmctld slurmctld -D -c -f "$SLURM_CONF"
for ((i = 1; i <= nodes; i++)); do
    setsid "$run/hx" "node$i" slurmd -D -N "node$i" -f "$SLURM_CONF" \
        </dev/null >"$state/log/slurmd.node$i.out" 2>&1 &
done

all_idle() { [[ $(sinfo -h -p debug -t idle -o %D) == "$nodes" ]]; }
wait_for 30 all_idle || {
    echo "slurm_up.sh: expected $nodes idle nodes, found the logs:" >&2
    tail -n 5 "$state"/log/* >&2
    exit 1
}
sinfo
