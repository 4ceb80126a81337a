#!/usr/bin/env bash
# End the cluster that slurm_up.sh started in DIR, with every process of its jobs, and remove DIR.
#
#   bash scripts/lab/slurm_down.sh --dir DIR                 (or SLURM_LAB_DIR)
#   bash scripts/lab/slurm_down.sh --dir DIR --node node2    node2 alone, at once, as if it had lost its power
set -euo pipefail
[ -z "${SLURM_LAB_TOKEN:-}" ] || exec env -u SLURM_LAB_TOKEN bash "$0" "$@" # called in a job of the lab: not one of its processes
# shellcheck source=scripts/lab/slurm_processes.sh
. "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/slurm_processes.sh"

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
    *) refuse "$1 is no option; there are --dir DIR and --node NAME" ;;
    esac
done
[ -n "$dir" ] || refuse "which lab? give --dir DIR, as slurm_up.sh printed it"
[ -d "$dir" ] || refuse "--dir $dir is no folder"
dir=$(cd "$dir" && pwd -P)
is_lab() { [ -f "$dir/lab" ] && [ -f "$dir/processes" ]; }
is_lab || refuse "--dir $dir is no lab of slurm_up.sh: nothing was touched"
[ "$(id -u)" = 0 ] || refuse "only root can end it"

end() { # SIGNAL, then process numbers on stdin
    local pids
    mapfile -t pids
    [ ${#pids[@]} -eq 0 ] || kill "-$1" "${pids[@]}" 2>/dev/null || true
}
if [ -n "$node" ]; then
    [ -n "$(noted "$dir" "$node")" ] || refuse "--node $node does not run in the lab in $dir"
    { noted "$dir" "$node" && of_jobs "$dir" "$node"; } | end KILL
    exit 0
fi

daemons() { noted "$dir" | { grep -vx "$$" || true; }; } # the keeper becomes this very process
all() { daemons && of_jobs "$dir"; }
daemons | end TERM
for ((left = 30; left > 0; left--)); do # again and again: a daemon may have started something while it ended
    of_jobs "$dir" | end KILL
    [ "$left" -gt 15 ] || daemons | end KILL
    [ -n "$(all)" ] || break
    sleep 0.2
done
remaining=$(all | tr '\n' ' ')
if [ -n "$remaining" ]; then
    echo "slurm_down.sh: these processes do not end: $remaining; $dir is left as it is" >&2
    exit 1
fi
rm -rf "$dir"
