#!/usr/bin/env bash
# Bring up a real Grid Engine on pretend hosts of this machine (Debian, root):
#   sge_up.sh [-n NODES] [-c SLOTS] [-o PID]
#   . /run/hpchosts-sge/sge/env && /run/hpchosts-sge/hx node1 qhost
#
# sge_qmaster runs on node1, from where jobs are submitted, and an sge_execd on each
# node. All of them, and their jobs, are in the hosts' cgroups, so that hosts_down.sh, or
# the end of the owner, ends everything.
#
#   -n, -c          nodes (2), slots of each (2)
#   -o              owner of hosts_up.sh
#   HPCHOSTS_RUN    folder of the cluster; default: /run/hpchosts-sge
#
# Exit status 77 means that this machine cannot have it, for the printed reason.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "$here/processes.sh"

nodes=2 slots=2 owner=()
while getopts n:c:o: option; do
    case "$option" in
        n) nodes="$OPTARG" ;;
        c) slots="$OPTARG" ;;
        o) owner=(-o "$OPTARG") ;;
        *) exit 2 ;;
    esac
done
export HPCHOSTS_RUN="${HPCHOSTS_RUN:-/run/hpchosts-sge}"
run="$HPCHOSTS_RUN" root="$HPCHOSTS_RUN/sge"
packages=(gridengine-master gridengine-exec gridengine-client)
programs=/usr/lib/gridengine
for program in "$programs"/{sge_qmaster,sge_execd,spoolinit} /usr/bin/{qsub,qconf}; do
    [[ -x $program ]] || {
        echo "sge_up.sh: expected Grid Engine, found no $program; apt-get install" \
            "--no-install-recommends ${packages[*]}" >&2
        exit 77
    }
done

"$here/hosts_up.sh" "${owner[@]}" "$nodes" >/dev/null
trap 'status=$?; ((status == 0)) || "$here/hosts_down.sh"' EXIT
common="$root/default/common" spool="$root/spool"
mkdir -p "$common" "$spool"/{qmaster,execd} "$root/log"
for folder in bin lib util utilbin; do ln -s "/var/lib/gridengine/$folder" "$root/"; done
slot="$(<"$run/slot")"
cat >"$root/env" <<ENV
export SGE_ROOT=$root SGE_CELL=default
export SGE_QMASTER_PORT=$((7400 + slot)) SGE_EXECD_PORT=$((7500 + slot))
ENV
# shellcheck source=/dev/null
source "$root/env"
echo node1 >"$common/act_qmaster"
sed -e 's/^admin_user .*/admin_user none/' -e 's/^spooling_method .*/spooling_method classic/' \
    -e 's/^spooling_lib .*/spooling_lib libspoolc/' \
    -e "s|^spooling_params .*|spooling_params $common;$spool/qmaster|" \
    -e "s|^qmaster_spool_dir .*|qmaster_spool_dir $spool/qmaster|" \
    /usr/share/gridengine/default-bootstrap >"$common/bootstrap"
# Allow jobs of root; check reports of nodes, and due events, every second.
sed -e "s|^execd_spool_dir .*|execd_spool_dir $spool/execd|" -e 's/^min_[ug]id .*/&/' \
    -e 's/^\(min_[ug]id \+\).*/\10/' -e 's/^\(load_report_time \+\).*/\100:00:02/' \
    -e 's|^\(mailer \+\).*|\1/bin/true|' -e 's/^\(administrator_mail \+\).*/\1none/' \
    /usr/share/gridengine/default-configuration >"$root/configuration"

on_rank_0() { "$run/hx" node1 "$@"; }
on_rank_0 "$programs/spoolinit" classic libspoolc "$common;$spool/qmaster" init >/dev/null
on_rank_0 "$programs/spooldefaults" configuration "$root/configuration" >/dev/null
on_rank_0 "$programs/spooldefaults" complexes /usr/share/gridengine/util/resources/centry >/dev/null
on_rank_0 "$programs/spooldefaults" usersets /usr/share/gridengine/util/resources/usersets >/dev/null
on_rank_0 "$programs/spooldefaults" managers root >/dev/null
start() {
    local node="$1" program="$2"
    SGE_ND=1 setsid "$run/hx" "$node" "$programs/$program" \
        </dev/null >"$root/log/$program.$node" 2>&1 &
}
start node1 sge_qmaster
answers() { on_rank_0 qconf -sh >/dev/null 2>&1; }
wait_for 20 answers || {
    echo "sge_up.sh: expected sge_qmaster to answer, found the logs:" >&2
    tail -n 5 "$root"/log/* "$spool/qmaster/messages" >&2
    exit 1
}
{
    cat /usr/share/gridengine/util/resources/schedd/normal 2>/dev/null || on_rank_0 qconf -ssconf
} | sed -e 's/^\(schedule_interval \+\).*/\10:0:1/' \
    -e 's/^\(flush_\(submit\|finish\)_sec \+\).*/\11/' >"$root/scheduler"
on_rank_0 qconf -Msconf "$root/scheduler" >/dev/null
hosts=()
for ((i = 1; i <= nodes; i++)); do
    hosts+=("node$i")
    ((i == 1)) || on_rank_0 qconf -ah "node$i" >/dev/null
    on_rank_0 qconf -as "node$i" >/dev/null
done
# With control_slaves, ranks that mpirun starts belong to the job.
cat >"$root/pe" <<PE
pe_name            mpi
slots              999
user_lists         NONE
xuser_lists        NONE
start_proc_args    /bin/true
stop_proc_args     /bin/true
allocation_rule    $slots
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
PE
on_rank_0 qconf -Ap "$root/pe" >/dev/null
on_rank_0 qconf -sq 2>/dev/null | sed -e 's/^qname .*/qname all.q/' \
    -e "s/^hostlist .*/hostlist ${hosts[*]}/" -e "s/^slots .*/slots $slots/" \
    -e 's/^pe_list .*/pe_list mpi/' -e 's/^rerun .*/rerun TRUE/' \
    -e 's|^shell .*|shell /bin/bash|' -e 's/^shell_start_mode .*/shell_start_mode unix_behavior/' \
    -e 's/^load_thresholds .*/load_thresholds NONE/' -e 's/^notify .*/notify 00:00:20/' \
    >"$root/queue"
for node in "${hosts[@]}"; do start "$node" sge_execd; done
# Fake GPUs, one for each slot.
{
    on_rank_0 qconf -sc
    echo "gpu gpu INT <= YES YES 0 0"
} >"$root/complexes"
on_rank_0 qconf -Mc "$root/complexes" >/dev/null
on_rank_0 qconf -Aq "$root/queue" >/dev/null
all_there() { [[ $(on_rank_0 qhost -q | grep -c "BIP *0/0/$slots *$") == "$nodes" ]]; }
wait_for 30 all_there || {
    echo "sge_up.sh: expected $nodes hosts with queues, found the logs:" >&2
    on_rank_0 qhost -q >&2 || true
    tail -n 5 "$root"/log/* "$spool"/*/messages "$spool"/execd/*/messages >&2
    exit 1
}
for node in "${hosts[@]}"; do
    on_rank_0 qconf -rattr exechost complex_values "gpu=$slots" "$node" >/dev/null
done
on_rank_0 qhost -q
