#!/usr/bin/env bash
# Remove the pretend hosts of hosts_up.sh, or act on one of them:
#
#   hosts_down.sh                remove the hosts of HPCHOSTS_RUN (/run/hpchosts), with
#                                all their processes; does nothing without hosts
#   hosts_down.sh HOST [off]     switch a host off: all its processes get SIGKILL at once
#   hosts_down.sh HOST freeze    stop a host's processes
#   hosts_down.sh HOST thaw      continue these processes
#   hosts_down.sh HOST cut       disconnect the host from the network; not with DELAY_US
#   hosts_down.sh HOST join      connect the host again
#   hosts_down.sh --stale        remove all hosts whose owner has ended
#   hosts_down.sh --after-owner  wait for the end of the owner first
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "$here/processes.sh"
run="${HPCHOSTS_RUN:-/run/hpchosts}"

# take_down FOLDER: end all processes that were started there, and no others.
take_down() {
    local folder="$1" slot="" group link lock
    [[ -d $folder ]] || return 0
    # After the owner's end, two of these scripts may run at the same time.
    exec {lock}<"$folder" || return 0
    flock "$lock"
    if [[ -e $folder/slot ]]; then slot="$(<"$folder/slot")"; fi
    if mountpoint -q "$folder/cgroup2"; then
        group="$folder/cgroup2/hpchosts.$slot"
        if [[ -n $slot && -d $group ]]; then
            echo 1 >"$group/cgroup.kill"
            wait_for 10 grep -q "populated 0" "$group/cgroup.events" || {
                echo "hosts_down.sh: processes of $folder do not end" >&2
                return 1
            }
            rmdir "$group"/*/ "$group"
        fi
        umount -l "$folder/cgroup2" || return 1
    fi
    if [[ -n $slot ]]; then
        # The kernel, too, removes the links of a dead host, but only later.
        for link in "/sys/class/net/hpc$slot."* "/sys/class/net/hpcsw$slot"; do
            [[ ! -e $link ]] || ip link del "${link##*/}" 2>/dev/null || true
        done
    fi
    rm -rf --one-file-system "$folder"
    exec {lock}<&-
}

take_stale_down() {
    local folder
    for folder in /run/hpchosts*/; do
        folder="${folder%/}"
        [[ ! -s $folder/owner ]] || runs "$folder/owner" || take_down "$folder"
    done
}

after_owner() {
    while runs "$run/owner"; do sleep 1; done
    [[ ! -e $run/owner ]] || take_down "$run"
}

# act HOST ACTION
act() {
    local group="$run/groups/$1" link
    [[ -d $group ]] || {
        echo "hosts_down.sh: no host $1 is up in $run" >&2
        return 1
    }
    link="hpc$(<"$run/slot").${1#node}"
    case "$2" in
        off)
            # The processes are stopped first, so that none sees the end of another one,
            # and reports it to other hosts.
            echo 1 >"$group/cgroup.freeze"
            wait_for 10 grep -q "frozen 1" "$group/cgroup.events"
            echo 1 >"$group/cgroup.kill"
            ;;
        freeze) echo 1 >"$group/cgroup.freeze" ;;
        thaw) echo 0 >"$group/cgroup.freeze" ;;
        cut) ip link set "$link" down ;;
        join) ip link set "$link" up ;;
        *)
            echo "hosts_down.sh: expected off, freeze, thaw, cut or join, found $2" >&2
            return 2
            ;;
    esac
}

case "${1:-}" in
    "") take_down "$run" ;;
    --stale) take_stale_down ;;
    --after-owner) after_owner ;;
    *) act "$1" "${2:-off}" ;;
esac
