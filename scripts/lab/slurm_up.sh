#!/usr/bin/env bash
# A Slurm cluster of several virtual nodes on this machine, without systemd, for trying launchers and tests of them.
#
#   bash scripts/lab/slurm_up.sh [--nodes N] [--cpus N] [--gpus N] [--dir DIR]
#   export SLURM_CONF=DIR/etc/slurm.conf       # as it prints: now sbatch, squeue and scancel talk to it
#   bash scripts/lab/slurm_down.sh --dir DIR
#
# The nodes are daemons on ports of their own; all share this machine's cores, files and loopback. Each daemon, with all
# that it starts, is in namespaces of its own: the kernel ends them whole. They end themselves after LAB_MINUTES (30). Root only.
# --gpus gives each node devices that Slurm counts and that compute nothing.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

refuse() {
    echo "slurm_up.sh: $1" >&2
    exit 2
}
is_count() { # VALUE FROM TO
    [[ $1 =~ ^[0-9]{1,3}$ ]] && [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]
}

nodes=2 cpus=$(env -u OMP_NUM_THREADS nproc) gpus=0 dir=${SLURM_LAB_DIR:-} minutes=${LAB_MINUTES:-30}
while [ $# -gt 0 ]; do
    case $1 in
    --nodes | --cpus | --gpus | --dir)
        [ $# -ge 2 ] || refuse "$1 needs a value"
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
    *) refuse "$1 is not an option; there are --nodes N, --cpus N, --gpus N (on each node) and --dir DIR" ;;
    esac
done
is_count "$nodes" 1 16 || refuse "--nodes $nodes: give 1 to 16"
is_count "$cpus" 1 512 || refuse "--cpus $cpus: give 1 to 512"
is_count "$gpus" 0 64 || refuse "--gpus $gpus: give 0 to 64"
is_count "$minutes" 1 600 || refuse "LAB_MINUTES=$minutes: give 1 to 600 minutes"
[ "$(id -u)" = 0 ] || refuse "only root can start Slurm's daemons; run it as root"
for program in slurmctld slurmd munged scontrol unshare; do
    command -v "$program" >/dev/null || refuse "there is no $program: bash scripts/lab/install_slurm.sh"
done

dir=${dir:-$(mktemp -d /tmp/slurm_lab.XXXXXX)}
[[ $dir =~ ^[A-Za-z0-9_./-]+$ ]] || refuse "--dir $dir: Slurm's files know only letters, digits and _ . / - in a name"
mkdir -p "$dir"
dir=$(cd "$dir" && pwd -P)
[ ${#dir} -le 70 ] || refuse "--dir $dir: the names of sockets below it would be too long; give one of 70 characters at most"
[ -z "$(ls -A "$dir")" ] || refuse "--dir $dir is not empty; end the lab that it holds (slurm_down.sh --dir $dir), or give another"
mkdir -p "$dir"/{etc,state,log,munge,run}
chmod 755 "$dir" "$dir/munge" # munge refuses a folder that others may write into, and clients must get at its socket

free_port() { # a port with $1 - 1 free ones behind it, outside of what the kernel hands out by itself
    python3 - "$1" <<'PYTHON'
import random, socket, sys

count = int(sys.argv[1])
for first in random.sample(range(17000, 19900), 200):
    held = []
    try:
        for port in range(first, first + count):
            held.append(socket.socket())
            held[-1].bind(("127.0.0.1", port))
        print(first)
        break
    except OSError:
        continue
    finally:
        for one in held:
            one.close()
PYTHON
}
port=$(free_port $((nodes + 1)))
[ -n "$port" ] || refuse "no free ports on the loopback between 17000 and 20000"

host=$(hostname -s)
gres='' devices=''
if [ "$gpus" -gt 0 ]; then
    gres="Gres=gpu:$gpus"
    mkdir "$dir/dev"
    for ((gpu = 0; gpu < gpus; gpu++)); do mknod "$dir/dev/gpu$gpu" c 1 3; done # Slurm takes only character devices: /dev/null's
    devices="$dir/dev/gpu[0-$((gpus - 1))]"
    [ "$gpus" -gt 1 ] || devices="$dir/dev/gpu0"
fi
{
    cat <<CONFIGURATION
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket=$dir/munge/munge.sock
CredType=cred/munge
SlurmctldPort=$port
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=30
MessageTimeout=30
MailProg=/bin/true
CONFIGURATION
    [ -z "$gres" ] || echo "GresTypes=gpu"
    for ((node = 1; node <= nodes; node++)); do
        echo "NodeName=node$node NodeHostname=node$node NodeAddr=127.0.0.1 Port=$((port + node)) CPUs=$cpus RealMemory=4000 $gres State=UNKNOWN"
        [ -z "$gres" ] || echo "NodeName=node$node Name=gpu File=$devices" >>"$dir/etc/gres.list"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
} >"$dir/etc/slurm.conf"
[ -z "$gres" ] || { echo "AutoDetect=off" && cat "$dir/etc/gres.list" && rm "$dir/etc/gres.list"; } >"$dir/etc/gres.conf"
echo "CgroupPlugin=autodetect" >"$dir/etc/cgroup.conf"
chmod 755 "$dir/etc"
(umask 077 && head -c 128 /dev/urandom >"$dir/munge/munge.key")

trap 'echo "slurm_up.sh: the cluster did not come up; its logs were:" >&2; tail -n 5 "$dir"/log/* >&2 || true
    bash "$here/slurm_down.sh" --dir "$dir" || true' EXIT
readlink /proc/self/ns/pid >"$dir/lab" # slurm_down.sh touches no folder without this file

printf '127.0.0.1 %s\n' localhost "$host" $(seq -f node%g "$nodes") >"$dir/etc/hosts"
# NAME COMMAND...: in namespaces of its own with all that it starts; a node has its own host name too. The first process
# is a shell that knows the lab's folder.
start() {
    local name=$1 named=$1
    shift
    [[ $name = node* ]] || named=$host
    # shellcheck disable=SC2016
    setsid timeout --signal=KILL "${minutes}m" unshare --pid --uts --fork --kill-child --mount-proc bash -c \
        'hostname "$1" && mount --bind "$0/etc/hosts" /etc/hosts && shift && { "$@" & wait; }' \
        "$dir" "$named" "$@" </dev/null >"$dir/log/$name.start" 2>&1 &
    echo "$! $name" >>"$dir/processes"
}
for name in $(compgen -e | grep '^SLURM'); do unset "$name"; done # of a job that this runs in, say
unset SBATCH_EXPORT
export SLURM_CONF=$dir/etc/slurm.conf
start munged munged --foreground --force --key-file="$dir/munge/munge.key" --socket="$dir/munge/munge.sock" \
    --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
for ((left = 100; left > 0; left--)); do
    [ ! -S "$dir/munge/munge.sock" ] || break
    sleep 0.05
done
start slurmctld slurmctld -D -c
for ((node = 1; node <= nodes; node++)); do
    mkdir "$dir/spool-node$node"
    start "node$node" slurmd -D -N "node$node"
done
for ((left = 300; left > 0; left--)); do
    idle=$(sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$') || true
    [ "$idle" != "$nodes" ] || break
    sleep 0.1
done
[ "$idle" = "$nodes" ] || exit 1
trap - EXIT
echo "$nodes nodes with $cpus CPUs and $gpus GPU devices each are up for $minutes minutes; now:"
echo "export SLURM_CONF=$dir/etc/slurm.conf"
