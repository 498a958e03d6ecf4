#!/bin/bash
# ssh.sh up N | down
# An sshd on each node of "net.sh up N", and password-less root ssh between all of them. Leaves ~/.ssh and /etc/ssh
# alone: "ip netns exec" mounts /etc/netns/NAMESPACE/ssh over /etc/ssh. Needs openssh-server.
set -e
D=$(dirname "$(readlink -f "$0")")
P=${CLU_PREFIX:-rgpt}
K=${CLU_RUN:-/tmp/$P-cluster}/ssh  # keys and pid files
case $1 in
up)
  N=$2
  mkdir -p "$K" /run/sshd
  chmod 700 "$K"
  [ -e "$K/id" ] || ssh-keygen -q -t ed25519 -N '' -f "$K/id"
  [ -e "$K/host" ] || ssh-keygen -q -t ed25519 -N '' -f "$K/host"
  for n in head $(seq -f node%g 1 "$N"); do
    E=/etc/netns/$P-$n/ssh
    mkdir -p "$E"
    cat >"$E/ssh_config" <<X
Host *
  IdentityFile $K/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  BatchMode yes
X
    cat >"$E/sshd_config" <<X
Port 22
HostKey $K/host
AuthorizedKeysFile $K/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile $K/sshd.$n.pid
MaxStartups 200
PermitUserEnvironment no
PrintMotd no
PrintLastLog no
X
    touch "$E/moduli"
    [ "$n" = head ] || "$D/net.sh" exec "$n" /usr/sbin/sshd
  done
  ;;
down)
  for f in "$K"/sshd.*.pid; do
    if [ -e "$f" ]; then kill "$(cat "$f")" || :; fi
  done
  rm -rf "$K"
  ;;
*)
  echo "usage: ssh.sh up N | down" >&2
  exit 2
  ;;
esac
