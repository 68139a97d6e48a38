#!/usr/bin/env bash
# The first process of a pretend host, in separate namespaces: host_init.sh RUN HOST.
# hosts_up.sh starts it. It sets the host up, writes RUN/HOST.pid, and stays.
set -euo pipefail
run="$1" host="$2"

hostname "$host"
# Make mounts private, so that later mounts are visible only on this host.
mount --make-rprivate /
# Mount a /sys with this host's network, and with the former cgroups.
mkdir "$run/$host.cgroups"
mount --rbind /sys/fs/cgroup "$run/$host.cgroups"
mount -t sysfs sysfs /sys
mount --rbind "$run/$host.cgroups" /sys/fs/cgroup
umount -l "$run/$host.cgroups"
rmdir "$run/$host.cgroups"
mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm
mount --bind "$run/hosts" /etc/hosts
ip link set lo up
# Use this congestion control, which every kernel has. The machine's default may be BBR,
# which leaves a slow link idle when many connections share it.
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
echo $$ >"$run/$host.starting"
mv "$run/$host.starting" "$run/$host.pid"
exec -a "pretend host $host" sleep infinity
