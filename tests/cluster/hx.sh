#!/usr/bin/env bash
# Run a command on a pretend host, in this directory and environment: hx HOST COMMAND...
# hosts_up.sh puts it into the folder of the hosts as "hx".
set -euo pipefail
run="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
host="$1"
shift
if ! { read -r pid <"$run/$host.pid"; } 2>/dev/null ||
    ! grep -qx "$pid" "$run/groups/$host/cgroup.procs"; then
    echo "hx: no host $host is up in $run" >&2
    exit 255
fi
# Move this process into the host's cgroup, so that the command ends with its host.
echo $$ >"$run/groups/$host/cgroup.procs"
taskset --pid --cpu-list "$(<"$run/$host.cores")" $$ >/dev/null
exec nsenter --target "$pid" --net --uts --ipc --mount --wd="$PWD" -- "$@"
