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
# A machine may have chosen BBR, which paces what shares a slow wire with much else so
# that the wire idles. Every kernel has this one.
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
echo $$ >"$run/$host.starting"
mv "$run/$host.starting" "$run/$host.pid"
exec -a "pretend host $host" sleep infinity
