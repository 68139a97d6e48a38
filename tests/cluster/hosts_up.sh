#!/usr/bin/env bash
# Make pretend hosts node1, node2, ... on this machine:  hosts_up.sh [-o PID] [N [RATE]]
#
# Each host has a separate network (eth0 on a common switch), host name, System V IPC,
# /dev/shm, /sys and /etc/hosts. Therefore programs on two hosts communicate only over
# the network, and MPI treats the hosts as different nodes. All other files are shared,
# as on a parallel file system. Each host has separate cores, if there are enough. Its
# processes are in one cgroup, so that hosts_down.sh can switch off, freeze or remove
# the whole host.
#
#   N               number of hosts; default: 2
#   RATE            limit of each host's send rate, such as 100mbit; default: none
#   -o PID          owner: the hosts are removed when this process has ended
#   HPCHOSTS_RUN    folder of these hosts; default: /run/hpchosts. Former hosts of this
#                   folder are removed first, unless their owner is alive. Hosts in other
#                   folders, all named /run/hpchosts*, are independent.
#   DELAY_US        latency of frames between hosts in microseconds; needs gcc
#
# It writes into that folder: hx (run a command on a host), rsh (for MPI's launchers)
# and mpirun (start a job on the hosts). Exit status 77 means that this machine cannot
# have hosts, for the printed reason.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=processes.sh
source "$here/processes.sh"

owner=""
while getopts o: option; do
    case "$option" in
        o) owner="$OPTARG" ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
num_hosts="${1:-2}" rate="${2:-}"
run="${HPCHOSTS_RUN:-/run/hpchosts}"
export HPCHOSTS_RUN="$run"

cannot() {
    echo "hosts_up.sh: $*" >&2
    exit 77
}

needed() {
    local command missing=()
    for command in "$@"; do
        command -v "$command" >/dev/null || missing+=("$command")
    done
    ((${#missing[@]} == 0)) || cannot "expected the commands of iproute2, util-linux" \
        "and hostname, found no ${missing[*]}; apt-get install the package"
}

((EUID == 0)) || cannot "expected root, found user $(id -un); run it as root"
needed ip unshare nsenter mount umount mountpoint setsid flock taskset hostname ${rate:+tc} \
    ${DELAY_US:+gcc}
unshare --net --uts --ipc --mount true 2>/dev/null ||
    cannot "expected to be allowed namespaces, found that unshare fails;" \
        "a container needs CAP_SYS_ADMIN"

# Remove hosts of dead owners, then those of an earlier use of this folder.
"$here/hosts_down.sh" --stale
if runs "$run/owner" && [[ $(cut -d ' ' -f 1 "$run/owner") != "$owner" ]]; then
    echo "hosts_up.sh: the hosts of $run belong to process $(cut -d ' ' -f 1 \
        "$run/owner"), which runs; set HPCHOSTS_RUN to another folder" >&2
    exit 1
fi
"$here/hosts_down.sh"

# Lock the folder, because two simultaneous starts would mix their hosts.
mkdir "$run"
trap 'status=$?; ((status == 0)) || "$here/hosts_down.sh"' EXIT
if [[ -n $owner ]]; then
    echo "$owner $(start_time "$owner")" >"$run/owner"
    # Use a separate session, so that the watcher survives a kill of the owner's
    # session. It also ends when another script has removed the hosts.
    setsid "$here/hosts_down.sh" --after-owner </dev/null >/dev/null 2>&1 &
fi
cp "$here/hx.sh" "$run/hx"
cp "$here/rsh.sh" "$run/rsh"
cp "$here/mpirun.sh" "$run/mpirun"

# Creating the switch also reserves its number, because link names are unique.
slot=""
for number in {1..99}; do
    [[ -e /sys/class/net/hpcsw$number ]] && continue
    if said="$(ip link add "hpcsw$number" type bridge 2>&1)"; then
        slot="$number"
        break
    fi
    [[ -e /sys/class/net/hpcsw$number ]] ||
        cannot "expected to be able to make a bridge, found: $said"
done
[[ -n $slot ]] || cannot "expected a free number for a switch, found 99 in use"
echo "$slot" >"$run/slot"
network="10.77.$slot"
{
    echo "127.0.0.1 localhost"
    echo "$network.254 $(hostname) login"
    for ((i = 1; i <= num_hosts; i++)); do echo "$network.$i node$i"; done
} >"$run/hosts"

mkdir "$run/cgroup2"
mount -t cgroup2 none "$run/cgroup2" 2>/dev/null ||
    cannot "expected cgroup2, found that it cannot be mounted"
mkdir "$run/cgroup2/hpchosts.$slot"
ln -s "cgroup2/hpchosts.$slot" "$run/groups"
[[ -e $run/groups/cgroup.kill ]] ||
    cannot "expected Linux 5.14 or newer (cgroup.kill), found $(uname -r)"

if [[ -n ${DELAY_US:-} ]]; then
    gcc -O2 -Wall -o "$run/tapswitch" "$here/tapswitch.c"
    mkdir "$run/groups/switch"
    (
        echo "$BASHPID" >"$run/groups/switch/cgroup.procs"
        exec setsid "$run/tapswitch" "hpc$slot." "$num_hosts" "$DELAY_US"
    ) </dev/null >"$run/switch.log" 2>&1 &
    wait_for 5 grep -q ready "$run/switch.log" ||
        cannot "expected TAP devices, found: $(<"$run/switch.log")"
    # Device 0 connects this machine to the hosts.
    ip link set "hpc$slot.0" mtu 9000 master "hpcsw$slot" up
fi
ip addr add "$network.254/24" dev "hpcsw$slot"
ip link set "hpcsw$slot" up

# List the cores that this process may use.
cores=()
list="$(sed -n 's/^Cpus_allowed_list:\s*//p' /proc/self/status)"
for range in ${list//,/ }; do
    for ((core = ${range%-*}; core <= ${range#*-}; core++)); do cores+=("$core"); done
done
for ((i = 1; i <= num_hosts; i++)); do
    first=$(((i - 1) * ${#cores[@]} / num_hosts))
    end=$((i * ${#cores[@]} / num_hosts))
    # Give each host its own cores only if there are enough, because programs change how
    # they wait when cores are scarce.
    if ((${#cores[@]} < num_hosts)); then first=0 end=${#cores[@]}; fi
    own=("${cores[@]:first:end - first}")
    (IFS=, && echo "${own[*]}") >"$run/node$i.cores"
    mkdir "$run/groups/node$i"
    (
        echo "$BASHPID" >"$run/groups/node$i/cgroup.procs"
        exec setsid unshare --net --uts --ipc --mount \
            bash "$here/host_init.sh" "$run" "node$i"
    ) </dev/null >"$run/node$i.log" 2>&1 &
done
for ((i = 1; i <= num_hosts; i++)); do
    host="node$i"
    wait_for 10 test -e "$run/$host.pid" ||
        cannot "expected $host to start, found: $(<"$run/$host.log")"
    pid="$(<"$run/$host.pid")"
    if [[ -n ${DELAY_US:-} ]]; then
        ip link set "hpc$slot.$i" netns "$pid" name eth0 mtu 9000
    else
        said="$(ip link add "hpc$slot.$i" type veth peer name eth0 netns "$pid" 2>&1)" ||
            cannot "expected to be able to make a veth pair, found: $said"
        ip link set "hpc$slot.$i" master "hpcsw$slot" up
    fi
    "$run/hx" "$host" ip addr add "$network.$i/24" dev eth0
    "$run/hx" "$host" ip link set eth0 up
    if [[ -n $rate ]]; then
        "$run/hx" "$host" tc qdisc add dev eth0 root tbf \
            rate "$rate" burst 256kb latency 20ms ||
            cannot "expected a limit of $rate, found that tc cannot set it"
    fi
done
echo "$num_hosts hosts are up, for example: $run/hx node1 hostname"
