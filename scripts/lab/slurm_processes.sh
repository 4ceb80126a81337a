#!/usr/bin/env bash
# Sourced by slurm_up.sh and slurm_down.sh: which processes are the lab's. A number alone proves nothing, since numbers are
# used again, so the lab writes down with each daemon when it started; what its jobs started is known by its surroundings.

start_time() { # of process $1, in ticks since boot; nothing where there is none
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 0
    stat=${stat##*) } # the name in the brackets may hold anything
    # shellcheck disable=SC2086
    set -- $stat
    [ "$1" = Z ] || echo "${20}" # a zombie runs no more; who should reap it is not the lab's business
}

note_process() { # DIR NAME PID: it is the lab's from now on
    printf '%s %s %s\n' "$3" "$(start_time "$3")" "$2" >>"$1/processes"
}

noted() { # DIR [NAME]: the processes that were noted and still run, one number per line
    local pid started name
    [ -e "$1/processes" ] || return 0
    while read -r pid started name; do
        [ -z "${2:-}" ] || [ "$name" = "$2" ] || continue
        if [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ]; then echo "$pid"; fi
    done <"$1/processes"
}

ancestors() { # of this process, with itself: whoever asks for the end of a lab must live to see it
    local pid=$$ stat
    while [ "$pid" -gt 0 ]; do
        echo "$pid"
        { read -r stat <"/proc/$pid/stat"; } 2>/dev/null || break
        stat=${stat##*) }
        # shellcheck disable=SC2086
        set -- $stat
        pid=$2
    done
}

of_jobs() { # DIR [NODE]: slurmstepd's and what they started, here or on NODE alone
    local found pid name token own
    token=$(cat "$1/etc/token" 2>/dev/null) || true
    own=" $(ancestors | tr '\n' ' ')"
    # SLURM_CONF is the lab's in a user's shell too, and SLURMD_NODENAME is set in any job of a real cluster, which may be where
    # that shell runs. The token is in the lab's own jobs alone. What ends meanwhile is no error.
    for found in $([ -z "$token" ] || grep -slzxF "SLURM_LAB_TOKEN=$token" /proc/[0-9]*/environ || true); do
        name=$(grep -szoP '^SLURMD_NODENAME=\K.*' "$found" | tr -d '\0') || true
        pid=${found#/proc/} pid=${pid%/environ}
        if [[ $own = *" $pid "* ]] || ! grep -q "^NodeName=${name:-none} " "$1/etc/slurm.conf"; then continue; fi
        if [ "${2:-$name}" = "$name" ] && [ -n "$(start_time "$pid")" ]; then echo "$pid"; fi
    done
    # slurmstepd writes its title over its environment; where it is and what it has open tell whose it is
    for found in $(grep -slx slurmstepd /proc/[0-9]*/comm || true); do
        pid=${found#/proc/} pid=${pid%/comm}
        [ "$(readlink "/proc/$pid/cwd")" = "$1/log" ] || continue
        if [ -z "${2:-}" ] || [ -n "$(find "/proc/$pid/fd" -lname "$1/log/slurmd-$2.log" 2>/dev/null)" ]; then echo "$pid"; fi
    done
}
