#!/usr/bin/env bash
# End the cluster that slurm_up.sh started in DIR, with every process of its jobs, and remove DIR.
#
#   bash scripts/lab/slurm_down.sh --dir DIR                 (or SLURM_LAB_DIR)
#   bash scripts/lab/slurm_down.sh --dir DIR --node node2    node2 alone, at once, as if it had lost its power
set -euo pipefail

refuse() {
    echo "slurm_down.sh: $1" >&2
    exit 2
}
dir=${SLURM_LAB_DIR:-} node=
while [ $# -gt 0 ]; do
    case $1 in
    --dir | --node)
        [ $# -ge 2 ] || refuse "$1 needs a value"
        printf -v "${1#--}" '%s' "$2"
        shift 2
        ;;
    *) refuse "$1 is not an option; there are --dir DIR and --node NAME" ;;
    esac
done
[ -n "$dir" ] || refuse "which lab? give --dir DIR, as slurm_up.sh printed it"
[ -d "$dir" ] || refuse "--dir $dir is not a folder"
dir=$(cd "$dir" && pwd -P)
[ -f "$dir/lab" ] || refuse "--dir $dir is not a lab of slurm_up.sh: nothing was touched"
[ "$(id -u)" = 0 ] || refuse "only root can end it"
[ "$(readlink /proc/self/ns/pid)" = "$(cat "$dir/lab")" ] || refuse "call it where slurm_up.sh was called, not in a job of the lab"

running() { # [NAME]: the processes of slurm_up.sh that still run. A number may be another's by now; the folder tells
    local pid name
    [ -e "$dir/processes" ] || return 0
    while read -r pid name; do
        if [ "${1:-$name}" = "$name" ] && grep -qszxF -- "$dir" "/proc/$pid/cmdline"; then echo "$pid"; fi
    done <"$dir/processes"
}
children() { cat "/proc/$1/task/$1/children" 2>/dev/null || true; }
end() { # [NAME]: kill the first process of each namespace, and the kernel ends the others
    local pid shell first
    for pid in $(running "$@"); do
        for shell in $(children "$pid"); do
            for first in $(children "$shell"); do kill -KILL "$first" 2>/dev/null || true; done
        done
    done
}
[ -z "$node" ] || [ -n "$(running "$node")" ] || refuse "--node $node does not run in the lab in $dir"
for ((left = 100; left > 0; left--)); do
    end ${node:+"$node"}
    [ -n "$(running ${node:+"$node"})" ] || break
    sleep 0.1
done
if [ "$left" = 0 ]; then
    echo "slurm_down.sh: these processes do not end: $(running | tr '\n' ' '); $dir is left as it is" >&2
    exit 1
fi
[ -n "$node" ] || rm -rf "$dir"
