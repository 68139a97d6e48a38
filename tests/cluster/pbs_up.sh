#!/usr/bin/env bash
# Bring up a real OpenPBS, which must be installed in /opt/pbs, on pretend hosts of this
# machine (root):
#   pbs_up.sh [-n NODES] [-c CORES] [-o PID]
#   . /run/hpchosts-pbs/pbs/env && /run/hpchosts-pbs/hx node1 qstat
#
# The server, its database and the scheduler run on node1, from where jobs are submitted,
# and a pbs_mom on each node. All of them, and their jobs, are in the hosts' cgroups, so
# that hosts_down.sh, or the end of the owner, ends everything.
#
#   -n, -c          nodes (2), cores of each (2)
#   -o              owner of hosts_up.sh
#   PBS_EXEC        where OpenPBS is installed; default: /opt/pbs
#   HPCHOSTS_RUN    folder of the cluster; default: /run/hpchosts-pbs
#
# Exit status 77 means that this machine cannot have it, for the printed reason.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "$here/processes.sh"

nodes=2 cores=2 owner=()
while getopts n:c:o: option; do
    case "$option" in
        n) nodes="$OPTARG" ;;
        c) cores="$OPTARG" ;;
        o) owner=(-o "$OPTARG") ;;
        *) exit 2 ;;
    esac
done
export HPCHOSTS_RUN="${HPCHOSTS_RUN:-/run/hpchosts-pbs}"
run="$HPCHOSTS_RUN" state="$HPCHOSTS_RUN/pbs" exec="${PBS_EXEC:-/opt/pbs}"
[[ -x $exec/sbin/pbs_server.bin && -x $exec/libexec/pbs_habitat ]] || {
    echo "pbs_up.sh: expected OpenPBS, found none in $exec; no registry has it: build it" \
        "from its sources, or set PBS_EXEC" >&2
    exit 77
}

"$here/hosts_up.sh" "${owner[@]}" "$nodes" >/dev/null
trap 'status=$?; ((status == 0)) || "$here/hosts_down.sh"' EXIT
mkdir -p "$state"
cat >"$state/env" <<ENV
export PBS_CONF_FILE=$state/node1.conf
export PATH=$exec/bin:$exec/sbin:$PATH
ENV
# shellcheck source=/dev/null
source "$state/env"
for ((i = 1; i <= nodes; i++)); do
    first=$((i == 1)) home="$state/node$i"
    cat >"$state/node$i.conf" <<CONF
PBS_EXEC=$exec
PBS_SERVER=node1
PBS_HOME=$home
PBS_START_SERVER=$first
PBS_START_SCHED=$first
PBS_START_COMM=$first
PBS_START_MOM=1
PBS_CORE_LIMIT=unlimited
PBS_SCP=/bin/false
CONF
    made=""
    # Try again, because on a busy machine its database may not answer in time at first.
    for ((try = 0; try < 3 && !${#made}; try++)); do
        rm -rf "$home" && mkdir -p "$home"
        PBS_CONF_FILE="$state/node$i.conf" "$run/hx" "node$i" "$exec/libexec/pbs_habitat" \
            >"$state/node$i.log" 2>&1 && made=yes
    done
    [[ -n $made ]] || {
        echo "pbs_up.sh: expected pbs_habitat to end well, found:" >&2
        tail -n 5 "$state/node$i.log" >&2
        exit 1
    }
    # Files of jobs need no copies, because the hosts share their files.
    echo "\$usecp *:/ /" >>"$home/mom_priv/config"
    echo "PBS_CONF_FILE=$state/node1.conf" >>"$home/pbs_environment"
done

# start NODE PROGRAM: run a daemon, which detaches itself from the shell.
start() {
    PBS_CONF_FILE="$state/$1.conf" setsid "$run/hx" "$1" "$exec/sbin/$2" \
        </dev/null >>"$state/$1.log" 2>&1
}
for program in pbs_comm pbs_sched pbs_server; do start node1 "$program"; done
on_rank_0() { "$run/hx" node1 "$@"; }
answers() { on_rank_0 qstat -B >/dev/null 2>&1; }
wait_for 30 answers || {
    echo "pbs_up.sh: expected pbs_server to answer, found the logs:" >&2
    tail -n 5 "$state"/*.log "$state"/node1/server_logs/* >&2
    exit 1
}
settings=(acl_roots=root flatuid=true job_history_enable=true scheduling=true scheduler_iteration=3)
for setting in "${settings[@]}"; do on_rank_0 qmgr -c "set server $setting"; done
for ((i = 1; i <= nodes; i++)); do
    start "node$i" pbs_mom
    on_rank_0 qmgr -c "create node node$i" 2>/dev/null || true
    on_rank_0 qmgr -c "set node node$i resources_available.ncpus=$cores"
done
all_free() { [[ $(on_rank_0 pbsnodes -aS | grep -c ' free ') == "$nodes" ]]; }
wait_for 30 all_free || {
    echo "pbs_up.sh: expected $nodes free hosts, found the logs:" >&2
    on_rank_0 pbsnodes -aS >&2 || true
    tail -n 5 "$state"/*.log "$state"/*/mom_logs/* >&2
    exit 1
}
on_rank_0 pbsnodes -aS
