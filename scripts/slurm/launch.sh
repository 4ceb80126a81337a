#!/usr/bin/env bash
# The launcher behind every .sbatch and .slurm file here: the ranks of src/gpt2.py on the nodes that Slurm gave.
#
#   launch.sh SCRIPT [--dry_run] [flags of src/gpt2.py ...]
#
# SCRIPT is the batch script that calls it; its #SBATCH lines stand in for the allocation in a --dry_run outside of one.
# The variables that it reads, and what it does about preemption: docs/clusters.md. Exits 2 for what was asked wrongly, 0 for
# a run that is complete, 143 for one that was told to end and saved, else 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
repository=$(cd "$here/../.." && pwd -P)
say() { printf 'launch.sh: %s\n' "$1"; }
refuse() {
    printf 'launch.sh: %s\n' "$1" >&2
    exit 2
}
[ $# -ge 1 ] || refuse "the batch scripts call it: sbatch scripts/slurm/run_2node_8gpu.sbatch"
script=$1
shift
is_dry=no words=()
for word in "$@"; do
    if [ "${word/-run/_run}" = --dry_run ]; then is_dry=yes; else words+=("$word"); fi
done

# --- what the site, the user and the allocation say
site=${SITE_ENV:-$here/site.env}
if [ -e "$site" ]; then
    set +eu # the files of module systems seldom bear these
    # shellcheck disable=SC1090
    . "$site"
    set -eu
elif [ -n "${SITE_ENV:-}" ]; then
    refuse "SITE_ENV=$SITE_ENV is not a file; leave it out, or copy $here/site.env.example there"
fi

asked_for() { # the value of the script's own line "#SBATCH ... --$1=VALUE"; nothing where it has none
    { sed -n 's/^#SBATCH//p' "$script" | grep -oP -- "(?<=--$1=)\S+" | tail -n 1; } 2>/dev/null || true
}
count() { # NAME VALUE FROM: VALUE, if it is a number from FROM on
    if [[ ! $2 =~ ^[0-9]{1,6}$ ]] || [ "$2" -lt "$3" ]; then refuse "$1=$2: give a number from $3 on"; fi
    echo $((10#$2))
}
number_of_slurm() { # NAME VALUE: VALUE. bash would carry out the commands in a word that it takes for a number
    [[ $2 =~ ^(0|[1-9][0-9]{0,17})$ ]] || refuse "$1=$2 is not a number as Slurm sets it: start the script with sbatch, and set no SLURM_ variable by hand"
    echo "$2"
}
gpus_in() { # NAME VALUE: how many "4", "a100:4" or "a100:2,h100:2" are
    local part sum=0
    for part in ${2//,/ }; do
        [[ ${part##*[:=]} =~ ^[0-9]{1,4}$ ]] || refuse "$1=$2: give a number of GPUs, or one after a type as in a100:4"
        sum=$((sum + 10#${part##*[:=]}))
    done
    echo $sum
}
if [ -n "${SLURM_JOB_ID:-}" ]; then
    job=$(number_of_slurm SLURM_JOB_ID "$SLURM_JOB_ID")
    job_name=${SLURM_JOB_NAME:-job} assumed=
    # the number of an array's last task is the whole array's too, and would end or requeue all of it
    reference=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-$job}_$SLURM_ARRAY_TASK_ID}
    reference=${reference:-$job}
    nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
    # nodes may differ; what all of them have counts. --gpus-per-node=0 stands, though --exclusive hands out the GPUs too
    cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-1}}" | sed 's/(.*//' | sort -n | head -n 1)
    cpus=$(number_of_slurm SLURM_JOB_CPUS_PER_NODE "$cpus")
    gpus=$(number_of_slurm SLURM_GPUS_ON_NODE "${SLURM_GPUS_ON_NODE:-0}")
    [ -z "${SLURM_GPUS_PER_NODE:-}" ] || asked_gpus=$(gpus_in SLURM_GPUS_PER_NODE "$SLURM_GPUS_PER_NODE")
    [ "${asked_gpus:-1}" != 0 ] || gpus=0
else
    [ $is_dry = yes ] || refuse "there is no Slurm job here: sbatch $script (or bash $script --dry_run, to see what it would do)"
    job=1 reference=1 job_name=$(asked_for job-name) nodes=$(asked_for nodes) gpus=$(asked_for gpus-per-node)
    job_name=${job_name:-job} nodes=${nodes:-1} gpus=$(gpus_in SBATCH_GPUS_PER_NODE "${SBATCH_GPUS_PER_NODE:-${gpus:-0}}")
    cpus=$(asked_for cpus-per-task)
    cpus=${cpus:-$(env -u OMP_NUM_THREADS nproc)}
    assumed="outside of a job, so as $(basename "$script") asks: job 1 on $nodes nodes (node1 first) with $gpus GPUs, and $cpus CPUs on each"
fi
nodes=$(count nodes "$nodes" 1)
run_type=${RUN_TYPE:-ddp}
case $run_type in
baseline | dp) default_ranks=1 ;; # one process, whatever it may use
*) default_ranks=$gpus && [ "$gpus" -gt 0 ] || default_ranks=$cpus ;;
esac
ranks=$(count RANKS_PER_NODE "${RANKS_PER_NODE:-$default_ranks}" 1)
world=$((nodes * ranks))
max_restarts=$(count MAX_RESTARTS "${MAX_RESTARTS:-0}" 0)
max_requeues=$(count MAX_REQUEUES "${MAX_REQUEUES:-50}" 0)
evidence_seconds=$(count EVIDENCE_SECONDS "${EVIDENCE_SECONDS:-300}" 1)
launcher=${LAUNCHER:-torchrun}
[[ $launcher =~ ^(torchrun|srun)$ ]] || refuse "LAUNCHER=$launcher: give torchrun (the default) or srun (a task per rank)"
[[ $run_type =~ ^(baseline|dp)$ ]] && [ "$world" -gt 1 ] &&
    refuse "RUN_TYPE=$run_type is one process, not $nodes x $ranks: ask for --nodes=1 and leave RANKS_PER_NODE out, or take RUN_TYPE=ddp"

# --- the program's flags, the last of which win
read_words() { # of GPT2_EXTRA_ARGS, with quotes as a shell has them and nothing else of a shell
    local file status=0
    file=$(mktemp)
    xargs -r printf '%s\0' <<<"${GPT2_EXTRA_ARGS:-}" >"$file" 2>/dev/null || status=1
    mapfile -d '' -t extra <"$file"
    rm -f "$file"
    [ $status = 0 ] || refuse "GPT2_EXTRA_ARGS=$GPT2_EXTRA_ARGS: a quote is not closed"
}
flag() { # NAME: the last value that the words give it; nothing where they do not
    local value='' i
    for ((i = 0; i < ${#words[@]}; i++)); do
        case ${words[i]//-/_} in # the program takes dashes for underscores
        "__$1") value=${words[i + 1]:-} ;;
        "__$1="*) value=${words[i]#*=} ;;
        esac
    done
    echo "$value"
}
has_flag() { # NAME...
    local name word
    for name in "$@"; do
        for word in "${words[@]//-/_}"; do [[ $word != "__$name" && $word != "__$name="* ]] || return 0; done
    done
    return 1
}
read_words
words+=("${extra[@]}")
if has_flag checkpoint_path; then refuse "--checkpoint_path $(flag checkpoint_path): give RUN_DIR=$(flag checkpoint_path), which this script reads too"; fi
run_dir=${RUN_DIR:-checkpoint/slurm/${job_name//[^A-Za-z0-9_.-]/_}-$job} # the same after a requeue, another for another job
[[ $run_dir = /* ]] || run_dir=$repository/$run_dir
restarts=$(number_of_slurm SLURM_RESTART_COUNT "${SLURM_RESTART_COUNT:-0}")
if [ "$restarts" -gt 0 ]; then # what --overwrite meant was done by the first start
    for i in "${!words[@]}"; do [ "${words[i]}" != --overwrite ] || unset 'words[i]'; done
    words=("${words[@]}")
fi
has_flag overwrite resume eval_only skip_gradient_sync || words=(--resume auto "${words[@]}")
[ -z "${GRAD_ACCUM_STEPS:-}" ] || words=(--grad_accum_steps "$GRAD_ACCUM_STEPS" "${words[@]}")
[ -z "${MICRO_BATCH_SIZE_PER_GPU:-}" ] || words=(--micro_batch_size_per_gpu "$MICRO_BATCH_SIZE_PER_GPU" "${words[@]}")

# --- what observes the run, where it is asked for
# shellcheck source=scripts/slurm/evidence.sh
. "$here/evidence.sh"
[ "$launcher ${TORCHRUN_LOGS:-0}" != "srun 1" ] ||
    refuse "TORCHRUN_LOGS=1 is collected by torchrun, and LAUNCHER=srun has none: leave one of the two out"

# --- one look at everything that must be there, before any rank starts
cd "$repository" # relative paths in flags are the repository's, wherever sbatch was called
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    [ -n "${VIRTUAL_ENV:-}" ] || [ ! -x .venv/bin/python ] || PYTHON=$repository/.venv/bin/python
fi
found_python=$(command -v "$PYTHON") || refuse \
    "there is no $PYTHON on $(hostname): set PYTHON, or activate an environment or load a module in $here/site.env (site.env.example shows how)"
if [ $is_dry = no ]; then
    for program in srun scontrol; do
        command -v "$program" >/dev/null || refuse "there is no $program on $(hostname): put Slurm's commands on PATH in $here/site.env"
    done
    { mkdir -p "$run_dir" && : >"$run_dir/.writable" && rm "$run_dir/.writable"; } 2>/dev/null || refuse \
        "RUN_DIR=$run_dir cannot be written from $(hostname): give one on a file system that the nodes share and may write, such as your scratch folder"
fi
torch_is_older_than_2_12() {
    "$found_python" -c 'from importlib.metadata import version
exit([*map(int, version("torch").split(".")[:2])] >= [2, 12])' 2>/dev/null
}
address_of() { # the first node's: by its name, or where that means nothing here, as Slurm itself reaches it
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    if getent hosts "$first" >/dev/null; then
        echo "$first"
    else
        scontrol -o show node "$first" | grep -oP '(?<=NodeAddr=)\S+'
    fi
}
if [ -z "${MASTER_ADDR:-}" ]; then
    if [ -n "$assumed" ]; then MASTER_ADDR=node1; else MASTER_ADDR=$(address_of); fi
fi
# one per job, below the ports that the kernel hands out itself; two jobs on one node must not meet
MASTER_PORT=$(count MASTER_PORT "${MASTER_PORT:-$((20000 + job % 10000))}" 1)
GIT_COMMIT=${GIT_COMMIT:-$(git rev-parse HEAD 2>/dev/null || true)}
threads=$((cpus / ranks > 0 ? cpus / ranks : 1))
variables=(MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$MASTER_PORT" OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}" GIT_COMMIT="$GIT_COMMIT")
if [ "$max_restarts" -gt 0 ] && [ "$nodes" -gt 1 ]; then
    variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) # else ranks that start again may meet the addresses of those that died
fi
export "${variables[@]}"
[ "$ranks" -le "$cpus" ] || say "WARNING: $ranks ranks on each node share $cpus CPUs; ask for more with --cpus-per-task=$ranks, or --exclusive" >&2

# --- the commands
evidence_prepare "$run_dir" # in a dry run too, so that its flags are seen; with is_dry=yes it writes nothing
gpt2=("$found_python" src/gpt2.py --run_type "$run_type" --checkpoint_path "$run_dir" "${words[@]}" "${EVIDENCE_GPT2_FLAGS[@]}")
# --export=ALL: a user's SBATCH_EXPORT or --export=NIL would else leave the ranks without what was just set
step=(srun --export=ALL --nodes="$nodes" --wait=60 --kill-on-bad-exit=0)
one_per_node=("${step[@]}" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cpus")
check=("${one_per_node[@]}" bash "$here/with_python.sh" "$found_python" scripts/slurm/check_node.py --ranks "$ranks" --gpus "$gpus" -- "${gpt2[@]:2}")
if [ "$launcher" = srun ]; then
    step+=(--ntasks="$world" --ntasks-per-node="$ranks" --cpus-per-task="$threads")
    [ "$ranks" -le "$cpus" ] || step+=(--overcommit)
    step+=(bash "$here/rank.sh" "${EVIDENCE_RANK_PREFIX[@]}" -- "${gpt2[@]}")
else
    grace=$(flag grace_seconds)
    [[ $grace =~ ^[0-9]+ ]] && grace=${BASH_REMATCH[0]} || grace=20
    # shellcheck disable=SC2054
    torchrun=("$found_python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$ranks" --rdzv-id="$job.$restarts"
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --max-restarts="$max_restarts"
        --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "${EVIDENCE_TORCHRUN_FLAGS[@]}")
    patience=$((10#$grace + 10)) # a rank that saves needs longer than its own --grace_seconds
    if torch_is_older_than_2_12; then # whose torchrun has no flag for it
        [ "$patience" -le 30 ] || say "WARNING: PyTorch before 2.12 kills ranks after 30 s, so --grace_seconds $grace has no effect above 20" >&2
    else
        torchrun+=(--shutdown-timeout="$patience")
    fi
    if [ ${#EVIDENCE_RANK_PREFIX[@]} -gt 0 ]; then
        torchrun+=(--no-python bash "$here/rank.sh" "${EVIDENCE_RANK_PREFIX[@]}" -- "${gpt2[@]}")
    else
        torchrun+=("${gpt2[@]:1}")
    fi
    step=("${one_per_node[@]}" "${torchrun[@]}")
fi
in_a_shell() { printf '%q ' "$@" | sed 's/ $/\n/'; }
evidence_finish=() # what reads the evidence when the run has ended
[ ! -v EVIDENCE_DIR ] || evidence_finish=(env PYTHON="$found_python" bash "$here/evidence.sh" finish "$EVIDENCE_DIR" "$EVIDENCE_TOGGLES")

if [ $is_dry = yes ]; then
    [ -z "$assumed" ] || echo "# $assumed"
    echo "# $run_type: $nodes x $ranks = $world ranks by $launcher, run directory $run_dir"
    in_a_shell cd "$repository"
    in_a_shell export "${variables[@]}" "${EVIDENCE_VARIABLES[@]}"
    in_a_shell mkdir -p "$run_dir" "${EVIDENCE_FOLDERS[@]}"
    in_a_shell "${check[@]}"
    in_a_shell "${step[@]}"
    [ ${#evidence_finish[@]} -eq 0 ] || in_a_shell "${evidence_finish[@]}"
    echo "# then, where RUN_PREEMPTED.txt is new and the job was not cancelled: scontrol requeue $reference"
    exit 0
fi
# shellcheck source=scripts/slurm/carry_out.sh
. "$here/carry_out.sh"
