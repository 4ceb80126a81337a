#!/usr/bin/env bash
# rank.sh [PREFIX...] -- COMMAND...: COMMAND as one rank; on the first rank of each node PREFIX COMMAND, which observes it.
# Without torchrun the rank's place comes from Slurm.
prefix=()
while [ "$1" != -- ]; do
    prefix+=("$1")
    shift
done
shift
if [ -z "${RANK:-}" ]; then
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE%%(*}
fi
[ "$LOCAL_RANK" = 0 ] || prefix=()
exec "${prefix[@]}" "$@"
