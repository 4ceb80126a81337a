#!/usr/bin/env bash
# Slurm's daemons and commands from the distribution's packages, for scripts/lab/slurm_up.sh. Starts nothing.
# Exits 0 where they are there in the end; else 1, and says why they are not.
set -euo pipefail
NEEDED=(slurmctld slurmd munged sbatch srun scontrol)

missing() {
    local program
    for program in "${NEEDED[@]}"; do command -v "$program" >/dev/null || echo "$program"; done
}
give_up() {
    echo "Slurm is not installed: $1" >&2
    exit 1
}

[ -n "$(missing)" ] || exit 0
[ "$(id -u)" = 0 ] || give_up "only root can install packages; run it as root, or: sudo bash scripts/lab/install_slurm.sh"
command -v apt-get >/dev/null || give_up "there is no apt-get here; install slurmctld, slurmd and munge by other means"

export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d # asked by the packages whether they may start their services: the lab starts its own
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
packages=(slurmctld slurmd slurm-client munge)
install=(timeout 240 apt-get install -y -q --no-install-recommends "${packages[@]}")
said=$("${install[@]}" 2>&1) || {
    timeout 120 apt-get update -q >/dev/null 2>&1 || true # the list of packages may be missing or old
    said=$("${install[@]}" 2>&1) || give_up "apt-get install ${packages[*]}: $(tail -n 1 <<<"$said")"
}
left=$(missing | tr '\n' ' ')
[ -z "$left" ] || give_up "the packages brought no $left"
echo "installed $(slurmd -V)"
