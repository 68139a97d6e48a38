#!/usr/bin/env bash
# Replaces ssh between the pretend hosts: rsh [OPTION...] HOST COMMAND... hosts_up.sh
# puts it into the folder of the hosts as "rsh".
set -euo pipefail
while [[ $1 == -* ]]; do
    case "$1" in
        -o | -l | -p) shift 2 ;;
        *) shift ;;
    esac
done
host="$1"
shift
# As with ssh, the arguments are joined to one line for the remote shell.
exec "$(dirname "${BASH_SOURCE[0]}")/hx" "$host" /bin/sh -c "$*"
