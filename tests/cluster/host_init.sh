#!/usr/bin/env bash
# The first process of a pretend host, in namespaces of its own: host_init.sh RUN HOST
# Meant for hosts_up.sh. Sets the host up, says so in RUN/HOST.pid, and stays.
set -euo pipefail
run="$1" host="$2"

hostname "$host"
# What is mounted from here on is seen by this host alone.
mount --make-rprivate /
# A /sys of this host's network, with the cgroups of before.
mkdir "$run/$host.cgroups"
mount --rbind /sys/fs/cgroup "$run/$host.cgroups"
mount -t sysfs sysfs /sys
mount --rbind "$run/$host.cgroups" /sys/fs/cgroup
umount -l "$run/$host.cgroups"
rmdir "$run/$host.cgroups"
mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm
mount --bind "$run/hosts" /etc/hosts
ip link set lo up
echo $$ >"$run/$host.starting"
mv "$run/$host.starting" "$run/$host.pid"
exec -a "pretend host $host" sleep infinity
