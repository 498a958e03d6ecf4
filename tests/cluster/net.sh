#!/bin/bash
# net.sh up N | down | exec NODE command...
# N "machines" (node1..nodeN and head) on this one: each a network namespace with its own host name, address and
# /etc/hosts, on a bridge that lives in head's namespace, so that this machine's own network is not touched.
# Needs root and iproute2.
set -e
P=${CLU_PREFIX:-rgpt}  # what the namespaces' names start with: two clusters may stand side by side
NET=${CLU_NET:-10.77.0}
case $1 in
up)
  N=$2
  hosts=$(printf '127.0.0.1 localhost\n%s.254 head\n' "$NET"; for i in $(seq 1 "$N"); do echo "$NET.$i node$i"; done)
  for n in head $(seq -f node%g 1 "$N"); do
    ip netns add "$P-$n"
    ip -n "$P-$n" link set lo up
    # "ip netns exec" mounts these over the files of the same name in /etc.
    mkdir -p "/etc/netns/$P-$n"
    echo "$hosts" >"/etc/netns/$P-$n/hosts"
    echo "$n" >"/etc/netns/$P-$n/hostname"
    : >"/etc/netns/$P-$n/resolv.conf"
    printf 'passwd: files\ngroup: files\nshadow: files\nhosts: files\n' >"/etc/netns/$P-$n/nsswitch.conf"
  done
  ip -n "$P-head" link add br0 type bridge
  ip -n "$P-head" addr add "$NET.254/24" dev br0
  ip -n "$P-head" link set br0 up
  for i in $(seq 1 "$N"); do
    ip -n "$P-head" link add "v$i" type veth peer name eth0 netns "$P-node$i"
    ip -n "$P-head" link set "v$i" master br0 up
    ip -n "$P-node$i" addr add "$NET.$i/24" dev eth0
    ip -n "$P-node$i" link set eth0 up
  done
  ;;
exec)
  n=$2
  shift 2
  # The single quotes are meant: $0 and $@ are the inner shell's.
  # shellcheck disable=SC2016
  exec ip netns exec "$P-$n" unshare --uts -- sh -c 'hostname "$0" && exec "$@"' "$n" "$@"
  ;;
down)
  for ns in $(ip netns list | awk '{print $1}' | grep "^$P-"); do
    for p in $(ip netns pids "$ns"); do kill -9 "$p" 2>/dev/null || :; done
    ip netns del "$ns"
    rm -rf "/etc/netns/$ns"
  done
  ;;
*)
  echo "usage: net.sh up N | down | exec NODE command..." >&2
  exit 2
  ;;
esac
