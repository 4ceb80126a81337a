# shellcheck shell=bash disable=SC2034  # the arrays are read by whoever sources this
# Evidence of how a run of several ranks communicates, switched on by variables; docs/evidence.md says what each gives.
#
#   . scripts/slurm/evidence.sh
#   evidence_prepare RUN_DIR || exit
#   torchrun ... --no-python "${EVIDENCE_TORCHRUN_FLAGS[@]}" \
#       "${EVIDENCE_RANK_PREFIX[@]}" python src/gpt2.py ... "${EVIDENCE_GPT2_FLAGS[@]}"
#   evidence_finish
#
# NCCL_LOGS=1, TORCHRUN_LOGS=1, DIST_DEBUG=1, NSYS=1: each is 0 unless it is set. With all of them 0 nothing is exported,
# no file is written and the three arrays are empty: the run is a plain one. With any of them the run is marked as
# instrumented, because EVIDENCE_TOGGLES names it (src/testbed/config/environment_variables.py).
# EVIDENCE_VARIABLES and EVIDENCE_FOLDERS tell what was exported and made, so that a dry run can show it.
# The prefix may stand before every rank, or before the first of each node alone: it does nothing on the others.
# Every start has a folder of its own, RUN_DIR/evidence/start_K: logs of two starts in one folder would be read as one.

_EVIDENCE_SCRIPT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
EVIDENCE_TORCHRUN_FLAGS=()
EVIDENCE_RANK_PREFIX=()
EVIDENCE_GPT2_FLAGS=()
EVIDENCE_VARIABLES=()
EVIDENCE_FOLDERS=()

# evidence_prepare RUN_DIR: make the folder of this start, export what the toggles ask for, fill the three arrays.
# With is_dry=yes in the calling shell it writes nothing, and exports and fills in the same.
# Returns 2 where a variable is wrong or nsys is missing, 1 where the folder cannot be written.
evidence_prepare() {
    local run_dir=${1:?evidence_prepare needs the folder of the run} name toggles=()
    EVIDENCE_TORCHRUN_FLAGS=() EVIDENCE_RANK_PREFIX=() EVIDENCE_GPT2_FLAGS=() EVIDENCE_VARIABLES=() EVIDENCE_FOLDERS=()
    unset EVIDENCE_DIR EVIDENCE_TOGGLES # of an earlier call, or of the job that submitted this one
    for name in NCCL_LOGS TORCHRUN_LOGS DIST_DEBUG NSYS; do
        case ${!name:-0} in
        0) ;;
        1) toggles+=("$name") ;;
        *)
            echo "evidence.sh: error: $name=${!name} is neither 0 nor 1; set $name=1 to collect it or leave it out" >&2
            return 2
            ;;
        esac
    done
    [ "${NSYS:-0}" = 1 ] || _evidence_forget_profiles "$run_dir"
    [ "${#toggles[@]}" -gt 0 ] || return 0
    if [ "${NSYS:-0}" = 1 ] && ! command -v "${NSYS_BIN:-nsys}" >/dev/null; then
        echo "evidence.sh: error: NSYS=1 needs Nsight Systems, and ${NSYS_BIN:-nsys} is not on PATH; load its module," \
            "set NSYS_BIN to the program, or set NSYS=0" >&2
        return 2
    fi
    _evidence_make_folder "$run_dir" || return
    EVIDENCE_FOLDERS+=("$EVIDENCE_DIR")
    _evidence_export EVIDENCE_DIR="$EVIDENCE_DIR" EVIDENCE_TOGGLES="${toggles[*]}"
    if ! _evidence_is_dry; then
        _evidence_note_start "$run_dir"
        _evidence_topology
    fi
    [ "${NCCL_LOGS:-0}" = 0 ] || _evidence_nccl_logs
    [ "${TORCHRUN_LOGS:-0}" = 0 ] || _evidence_torchrun_logs
    [ "${DIST_DEBUG:-0}" = 0 ] || _evidence_dist_debug
    [ "${NSYS:-0}" = 0 ] || _evidence_nsys "$run_dir"
    echo "evidence.sh: ${toggles[*]} into $EVIDENCE_DIR; the run is marked as instrumented" >&2 # stdout is a dry run's commands
}

_evidence_export() { # NAME=VALUE...
    # shellcheck disable=SC2163  # each word has its name in it
    export "$@"
    EVIDENCE_VARIABLES+=("$@")
}

_evidence_folder() { # FOLDER
    _evidence_is_dry || mkdir "$1"
    EVIDENCE_FOLDERS+=("$1")
}

# The link that an earlier start with NSYS=1 left: it says of whoever reads the folder that this start was profiled.
_evidence_forget_profiles() {
    _evidence_is_dry || [[ ! -L $1/profiles || ! $(readlink "$1/profiles") =~ ^evidence/start_[0-9]+/profiles$ ]] ||
        rm "$1/profiles"
}

_evidence_is_dry() { [ "${is_dry:-no}" = yes ]; }

# Its number is above every earlier start's, and above the requeues that Slurm counts, so that numbers are in the order of
# time. mkdir decides between two that begin at once.
_evidence_make_folder() {
    local number=${SLURM_RESTART_COUNT:-0} earlier
    _evidence_is_dry || mkdir -p "$1/evidence" || _evidence_not_written "$1" || return
    for earlier in "$1"/evidence/start_*; do
        earlier=${earlier##*_}
        [[ $earlier =~ ^[0-9]+$ ]] && ((earlier > number)) && number=$earlier
    done
    number=$((number + 1))
    if _evidence_is_dry; then
        EVIDENCE_DIR=$1/evidence/start_$number
        return
    fi
    while ! mkdir "$1/evidence/start_$number" 2>/dev/null; do
        [ -e "$1/evidence/start_$number" ] || _evidence_not_written "$1" || return
        number=$((number + 1))
    done
    EVIDENCE_DIR=$(cd "$1/evidence/start_$number" && pwd) # ranks may have another working folder
}

_evidence_not_written() {
    echo "evidence.sh: error: $1/evidence cannot be written; set RUN_DIR to a folder that every node can write" >&2
    return 1
}

_evidence_note_start() {
    {
        echo "started_utc=$(date -u +%Y-%m-%dT%H:%M:%SZ)"
        echo "run_dir=$1"
        echo "toggles=$EVIDENCE_TOGGLES"
        echo "host=$(hostname)"
        echo "slurm_job_id=${SLURM_JOB_ID:-none}"
        echo "slurm_restart_count=${SLURM_RESTART_COUNT:-none}"
        echo "slurm_nodelist=${SLURM_JOB_NODELIST:-none}"
    } >"$EVIDENCE_DIR/start.txt"
}

# topo.txt and ibstat.txt of every node: from a batch script by srun, else of this machine alone.
_evidence_topology() {
    local hosts=$EVIDENCE_DIR/hosts kind
    mkdir "$hosts"
    if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ] && [ -z "${SLURM_STEP_ID:-}" ]; then
        timeout -k 5 60 srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
            --ntasks-per-node=1 bash "$_EVIDENCE_SCRIPT" host "$hosts" </dev/null ||
            echo "evidence.sh: srun did not reach every node: topo.txt and ibstat.txt lack some" >&2
    else
        bash "$_EVIDENCE_SCRIPT" host "$hosts"
    fi
    for kind in topo ibstat; do
        cat "$hosts"/*".$kind" >"$EVIDENCE_DIR/$kind.txt" 2>/dev/null || true
    done
    rm -r "$hosts"
}

# Logging alone: nothing here chooses a network, an interface, a topology or an algorithm. COLL, which writes a line for
# every collective of every rank, is left out; TUNING writes one on the communicator's first rank, and names the algorithm.
_evidence_nccl_logs() {
    case ${NCCL_DEBUG:-} in
    INFO | TRACE) _evidence_export NCCL_DEBUG="$NCCL_DEBUG" ;;
    *) _evidence_export NCCL_DEBUG=INFO ;;
    esac
    _evidence_export NCCL_DEBUG_SUBSYS="${NCCL_DEBUG_SUBSYS:-INIT,ENV,GRAPH,NET,P2P,SHM,NVLS,TUNING}" \
        NCCL_DEBUG_FILE="$EVIDENCE_DIR/nccl_rank_%h_%p.log" NCCL_TOPO_DUMP_FILE="$EVIDENCE_DIR/nccl_topo.xml"
}

_evidence_torchrun_logs() {
    _evidence_folder "$EVIDENCE_DIR/torchrun"
    EVIDENCE_TORCHRUN_FLAGS+=(--log-dir "$EVIDENCE_DIR/torchrun" --redirects 3 --tee 3)
}

# Never DETAIL: it wraps every process group, and DDP on gloo dies of that (segmentation fault, torch 2.13). INFO logs
# what DDP was built with. Only NCCL's groups write the flight recorder to a file; new and old names of its variables.
_evidence_dist_debug() {
    _evidence_export TORCH_DISTRIBUTED_DEBUG="${TORCH_DISTRIBUTED_DEBUG:-INFO}"
    if [ "$TORCH_DISTRIBUTED_DEBUG" = DETAIL ]; then
        echo "evidence.sh: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo; INFO, or unset, is safe" >&2
    fi
    _evidence_export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1 TORCH_SHOW_CPP_STACKTRACES=1 # where a rank was when it crashed
    local entries=${TORCH_FR_BUFFER_SIZE:-${TORCH_NCCL_TRACE_BUFFER_SIZE:-20000}}
    _evidence_export TORCH_FR_BUFFER_SIZE="$entries" TORCH_NCCL_TRACE_BUFFER_SIZE="$entries" TORCH_NCCL_DUMP_ON_TIMEOUT=1 \
        TORCH_FR_DUMP_TEMP_FILE="$EVIDENCE_DIR/flight_recorder_rank_" \
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$EVIDENCE_DIR/flight_recorder_rank_"
    EVIDENCE_GPT2_FLAGS+=(--log_collectives)
    _evidence_is_dry || cat >"$EVIDENCE_DIR/flight_recorder.txt" <<'TEXT'
flight_recorder_rank_N appears here when NCCL's own timeout ends a run on GPUs, and `torchfrtrace` reads it. A run on gloo
(CPU) leaves no such file, whatever happens to it; its collectives stand in collectives_rank*.jsonl. With either, the reason
in RUN_FAILED.txt names the collective that a rank was in.
TEXT
}

_evidence_nsys() {
    EVIDENCE_RANK_PREFIX=(bash "$_EVIDENCE_SCRIPT" rank)
    EVIDENCE_GPT2_FLAGS+=(--profile_mode)
    _evidence_folder "$EVIDENCE_DIR/profiles"
    if _evidence_is_dry; then
        return
    fi
    # where parse_nsys_stats.py looks: the profiles of the newest start, and of no other
    if [ -L "$1/profiles" ] || [ ! -e "$1/profiles" ]; then
        ln -sfn "evidence/$(basename "$EVIDENCE_DIR")/profiles" "$1/profiles"
    else
        echo "evidence.sh: $1/profiles is not a link of an earlier start and stays; this start's are in $EVIDENCE_DIR/profiles" >&2
    fi
}

# evidence_finish: after the run, whatever became of it, read what was collected. What cannot be read is said, and is no
# failure of the run: it always returns 0.
evidence_finish() {
    [ -n "${EVIDENCE_DIR:-}" ] || return 0
    local scripts report run_dir python=${PYTHON:-python}
    scripts=$(dirname "$_EVIDENCE_SCRIPT")/../profiling
    run_dir=$(cd "$EVIDENCE_DIR/../.." && pwd)
    if [ "${NCCL_LOGS:-0}" = 1 ]; then
        "$python" "$scripts/parse_nccl_logs.py" "$EVIDENCE_DIR" --json "$EVIDENCE_DIR/nccl_summary.json" \
            >"$EVIDENCE_DIR/nccl_summary.txt" || echo "evidence.sh: no summary of NCCL logs" >&2
    fi
    if [ "${NSYS:-0}" = 1 ]; then
        for report in "$EVIDENCE_DIR"/profiles/*.nsys-rep; do
            [ -e "$report" ] || { echo "evidence.sh: nsys left no report in $EVIDENCE_DIR/profiles" >&2; return 0; }
            "${NSYS_BIN:-nsys}" stats "$report" \
                >"$EVIDENCE_DIR/profiles/nsys_stats_$(basename "$report" .nsys-rep).txt" ||
                echo "evidence.sh: nsys stats failed on $report" >&2
        done
        if [ "$(readlink "$run_dir/profiles")" = "evidence/$(basename "$EVIDENCE_DIR")/profiles" ]; then
            "$python" "$scripts/parse_nsys_stats.py" --run_dir "$run_dir" || echo "evidence.sh: no summary of nsys" >&2
        fi
    fi
    return 0
}

_evidence_node() { echo "${SLURMD_NODENAME:-$(hostname)}"; } # several of Slurm's nodes may be one host

# host FOLDER, on each node: how its devices and its network cards are connected, or which tool is missing.
_evidence_host() {
    local host
    host=$(_evidence_node)
    _evidence_say "$host" nvidia-smi topo -m >"$1/$host.topo"
    _evidence_say "$host" ibstat >"$1/$host.ibstat"
}

_evidence_say() {
    local host=$1
    shift
    echo "== $host: $*"
    if ! command -v "$1" >/dev/null; then
        echo "$1 is not installed on $host: nothing is known here"
    elif ! timeout -k 2 25 "$@" 2>&1 </dev/null; then # a driver that hangs must not hold the run up
        echo "$* failed on $host, or took longer than 25 s"
    fi
    echo
}

# rank PROGRAM..., in place of each rank: the first of a node under nsys, the others as they are.
_evidence_rank() {
    if [ "${LOCAL_RANK:?the launcher sets it}" != 0 ]; then
        exec "$@"
    fi
    local options=(
        --trace="${NSYS_TRACE:-cuda,nvtx,osrt}" --sample="${NSYS_SAMPLE:-none}" --cpuctxsw="${NSYS_CPUCTXSW:-none}"
        --trace-fork-before-exec=true --force-overwrite="${NSYS_FORCE_OVERWRITE:-true}"
        --output="$EVIDENCE_DIR/profiles/nsys_${SLURM_JOB_ID:-0}_$(_evidence_node)_attempt_${TORCHELASTIC_RESTART_COUNT:-0}"
    )
    # older releases of nsys do not know these, so they are given only where they are asked for
    [ -z "${NSYS_CUDA_EVENT_TRACE:-}" ] || options+=(--cuda-event-trace="$NSYS_CUDA_EVENT_TRACE")
    [ -z "${NSYS_DELAY:-}" ] || options+=(--delay="$NSYS_DELAY")
    [ -z "${NSYS_DURATION:-}" ] || options+=(--duration="$NSYS_DURATION" --kill=none)
    # Slurm sends the signal before the time limit to every process of the step. nsys would die of it, and its rank with it;
    # the rank itself takes it again (signal handlers of its own replace what it inherits).
    trap '' USR1
    exec "${NSYS_BIN:-nsys}" profile "${options[@]}" "$@"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    case ${1:-} in
    host) shift && _evidence_host "$@" ;;
    rank) shift && _evidence_rank "$@" ;;
    finish) # FOLDER OF A START, "TOGGLE...": evidence_finish in a process of its own, which can be ended, or run later
        EVIDENCE_DIR=${2:?} NCCL_LOGS=0 NSYS=0
        for toggle in ${3:-}; do printf -v "$toggle" 1; done
        evidence_finish
        ;;
    *)
        echo "evidence.sh is sourced: . scripts/slurm/evidence.sh; evidence_prepare RUN_DIR" >&2
        exit 2
        ;;
    esac
fi
