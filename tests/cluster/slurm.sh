#!/bin/bash
# slurm.sh up N | down | env
# A real slurmctld and N slurmd, one in each node of "net.sh up N". "env" prints the line that points SLURM's commands
# at it. No systemd, no cgroups; nothing is written outside the run folder. Needs slurmctld, slurmd, munge, psmisc.
set -e
D=$(dirname "$(readlink -f "$0")")
P=${CLU_PREFIX:-rgpt}
NET=${CLU_NET:-10.77.0}
R=${CLU_RUN:-/tmp/$P-cluster}/slurm
CPUS=${CLU_CPUS:-8}  # what each node claims to have, whatever there really is
GPUS=${CLU_GPUS:-8}  # fake: so that scripts that ask for --gpus-per-node are accepted
export SLURM_CONF=$R/slurm.conf

configure() {
  mkdir -p "$R/state" "$R/log" "$R/dev"
  chmod 755 "$R"
  cat >"$SLURM_CONF" <<X
ClusterName=testclu
SlurmctldHost=head($NET.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$R/munge/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$R/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=${CLU_SLURMDTIMEOUT:-10}
InactiveLimit=0
MinJobAge=300
KillWait=${CLU_KILLWAIT:-5}
WaitTime=0
UnkillableStepTimeout=20
StateSaveLocation=$R/state
SlurmctldPidFile=$R/slurmctld.pid
SlurmctldLogFile=$R/log/slurmctld.log
SlurmdPidFile=$R/slurmd.%n.pid
SlurmdSpoolDir=$R/spool.%n
SlurmdLogFile=$R/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
GresTypes=gpu
X
  for i in $(seq 1 "$1"); do
    echo "NodeName=node$i NodeHostname=node$i NodeAddr=$NET.$i CPUs=$CPUS RealMemory=4000 Gres=gpu:$GPUS State=UNKNOWN"
  done >>"$SLURM_CONF"
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO" >>"$SLURM_CONF"
  for g in $(seq 0 $((GPUS - 1))); do [ -e "$R/dev/gpu$g" ] || mknod "$R/dev/gpu$g" c 1 3; done
  printf 'AutoDetect=off\nName=gpu File=%s\n' "$R/dev/gpu[0-$((GPUS - 1))]" >"$R/gres.conf"
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n' \
    >"$R/cgroup.conf"
}

start_munge() {
  mkdir -p "$R/munge"
  chmod 755 "$R/munge"
  if [ ! -e "$R/munge/key" ]; then
    dd if=/dev/urandom of="$R/munge/key" bs=128 count=1 2>/dev/null
    chmod 400 "$R/munge/key"
  fi
  munged --force --key-file="$R/munge/key" --socket="$R/munge/munge.sock" --pid-file="$R/munge/pid" \
    --log-file="$R/munge/log" --seed-file="$R/munge/seed" --num-threads=2
}

wait_until_idle() {
  for _ in $(seq 1 150); do
    [ "$("$D/net.sh" exec head sinfo -h -N -o '%T' 2>/dev/null | sort | uniq -c | xargs)" = "$1 idle" ] && return 0
    sleep 0.1
  done
  "$D/net.sh" exec head sinfo -N
  echo "slurm not ready" >&2
  return 1
}

case $1 in
up)
  N=$2
  configure "$N"
  start_munge
  "$D/net.sh" exec head slurmctld -c
  for i in $(seq 1 "$N"); do "$D/net.sh" exec "node$i" slurmd; done
  wait_until_idle "$N"
  ;;
env)
  echo "export SLURM_CONF=$SLURM_CONF"
  ;;
down)
  # The daemons by their pid files, the steps by their sockets, what does not listen by force; then the folder.
  pids=$(cat "$R"/slurmctld.pid "$R"/slurmd.*.pid 2>/dev/null || :)
  for p in $pids; do kill "$p" 2>/dev/null || :; done
  for s in "$R"/spool.*/*_*.*; do
    if [ -S "$s" ]; then fuser -k -KILL "$s" >/dev/null 2>&1 || :; fi
  done
  for _ in $(seq 1 50); do
    alive=
    for p in $pids; do kill -0 "$p" 2>/dev/null && alive="$alive $p"; done
    [ -z "$alive" ] && break
    sleep 0.1
  done
  for p in $alive; do kill -9 "$p" 2>/dev/null || :; done
  kill "$(cat "$R/munge/pid" 2>/dev/null)" 2>/dev/null || :
  rm -rf "$R"
  ;;
*)
  echo "usage: slurm.sh up N | down | env" >&2
  exit 2
  ;;
esac
