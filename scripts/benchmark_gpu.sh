#!/usr/bin/env bash
# Everything that a machine with a CUDA device should measure, in one command, in under 9 minutes, without a network.
#
#   bash scripts/benchmark_gpu.sh [--dry_run] [OUT_DIR]     default: checkpoint/benchmark_gpu
#
# OUT_DIR/summary.json says what ran, failed, was left out or no longer fitted, with the numbers of each run; every run's
# files lie in OUT_DIR/runs, what it said in OUT_DIR/logs. OUT_DIR/results.tar.gz holds all of it but data and weights.
# Exit code 1 when something failed, does not agree or no longer fitted, 2 when it was called wrong, 130 or 143 when it
# was interrupted (what runs is ended at once, and what was measured is summarised).
#
#   DEVICE=cpu        a tiny variant that shows that everything runs, not how fast (3 minutes on 2 cores)
#   NANOGPT_DIR=DIR   a copy of nanoGPT's repository, to be measured too
#   WHEELS=DIR        wheels to install into OUT_DIR/site first, without a network and without what they depend on: name
#                     every one that is missing (jsonschema attrs referencing rpds-py jsonschema-specifications, torchao)
#   ONLY='peers|fp8'  measure these steps alone (a regular expression; the data is always made)
#   PEER_ROUNDS=2     rounds of the comparison with other trainers; ONLY=peers PEER_ROUNDS=5 fits alone, and makes a claim
#   DEADLINE_S=520    no step begins that its estimate would carry past this, and none runs on beyond it
#   PYTHON=python     the interpreter; where it has no torch, python3
#
# What it should take on one H200, in seconds, at about 8 per start of a process and 250,000 tokens/s of GPT-2 124M that
# is not compiled: estimates until summary.json says what it took (the first number of each step below; --dry_run adds
# them up): data 30, agreement of the device 26, other trainers 174, matrix rate 10, compiler 44, largest micro batch 28,
# three attention kernels 45, time to a loss 32, agreement of the run types 74, fp32 20, fp8 35: 518. What matters most
# comes first, since what no longer fits is not begun.
set -uo pipefail
{ # read to the end before anything runs, so that a change to this file cannot reach a benchmark under way
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

is_dry=no
out=checkpoint/benchmark_gpu
for argument in "$@"; do
    case $argument in
        --dry_run) is_dry=yes ;;
        -*)
            echo "benchmark_gpu.sh: there is no $argument; --dry_run prints the plan, anything else is the output folder" >&2
            exit 2
            ;;
        *) out=$argument ;;
    esac
done
device=${DEVICE:-cuda}
deadline_s=${DEADLINE_S:-520}
peer_rounds=${PEER_ROUNDS:-2}
if [ "$device" != cuda ] && [ "$device" != cpu ]; then
    echo "benchmark_gpu.sh: DEVICE=$device is not cuda or cpu" >&2
    exit 2
fi
if ! [[ $deadline_s =~ ^[1-9][0-9]*$ && $peer_rounds =~ ^[1-9][0-9]*$ ]]; then
    echo "benchmark_gpu.sh: DEADLINE_S=$deadline_s and PEER_ROUNDS=$peer_rounds must be whole numbers above 0" >&2
    exit 2
fi
case $out in /*) there=$out ;; *) there=$PWD/$out ;; esac
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
# one cache for all processes: what one of them compiled, the next ones read
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$there/compiled/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$there/compiled/triton}

has() { "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" 2>/dev/null; }
has_package() { has "$python" "$1"; }

python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || has python torch || python=python3

if [ "$is_dry" = no ]; then
    if [ -e "$out/summary.json" ]; then
        echo "benchmark_gpu.sh: $out holds a finished benchmark; remove it or name another folder" >&2
        exit 2
    fi
    mkdir -p "$out/logs" "$out/runs"
    if [ -n "${WHEELS:-}" ]; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$there/site" "$WHEELS"/*.whl || {
            echo "benchmark_gpu.sh: the wheels in WHEELS=$WHEELS cannot be installed for $python" >&2
            exit 2
        }
        export PYTHONPATH="$PYTHONPATH:$there/site"
    fi
    for package in torch numpy tqdm psutil safetensors tokenizers tiktoken; do
        has_package "$package" || {
            echo "benchmark_gpu.sh: $python has no package $package; use an environment with requirements.txt, name" \
                "another interpreter with PYTHON=, or carry the wheel in a folder and name that with WHEELS=" >&2
            exit 2
        }
    done
    has_package jsonschema || echo "benchmark_gpu.sh: WARNING: $python has no jsonschema. Runs are written unchecked," \
        "nothing is compared with other trainers and no summary is made here; unpack results.tar.gz where jsonschema" \
        "is and run scripts/summarise_benchmark.py, or give WHEELS=" >&2
    if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "benchmark_gpu.sh: PyTorch finds no CUDA device here; DEVICE=cpu shows that everything runs" >&2
        exit 2
    fi
    : >"$out/steps.tsv"
    : >"$out/checks.tsv"
fi

total=0  # of the estimates
child=   # what runs in the background, so that a signal is heard at once
current=()

record() { # name status seconds exit_code reason command...
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" "${*:6}" >>"$out/steps.tsv"
    printf '%-28s %-11s %4s s  %s\n' "$1" "$2" "$3" "$5"
}

is_wanted() { # name
    [[ -z "${ONLY:-}" || $1 == corpus || $1 == tokens || $1 =~ $ONLY ]]
}

measure() { # name estimate_s command...: run it if its estimate still fits, and note what became of it
    local name=$1 estimate_s=$2 code=0 started=$SECONDS
    shift 2
    is_wanted "$name" || return 1
    total=$((total + estimate_s))
    if [ "$is_dry" = yes ]; then
        printf '%-28s %4s s  %s\n' "$name" "$estimate_s" "$*"
        return 0
    fi
    local left=$((deadline_s - SECONDS)) limit=$((2 * estimate_s + 30))
    if [ "$estimate_s" -gt "$left" ]; then
        record "$name" late 0 - "its $estimate_s s no longer fit before the deadline of $deadline_s s" "$@"
        return 1
    fi
    [ "$limit" -le "$left" ] || limit=$left
    current=("$name" "$started" "$@")
    timeout --kill-after=10 "$limit" "$@" >"$out/logs/$name.log" 2>&1 &
    child=$!
    wait "$child" || code=$?
    child=
    case $code in
        0) record "$name" done $((SECONDS - started)) 0 "" "$@" ;;
        124 | 137) record "$name" failed $((SECONDS - started)) $code "ended at its limit of $limit s" "$@" ;;
        *) record "$name" failed $((SECONDS - started)) $code "see logs/$name.log" "$@" ;;
    esac
    return $code
}

skip() { # name reason
    is_wanted "$1" || return 0
    if [ "$is_dry" = yes ]; then printf '%-28s skipped  %s\n' "$1" "$2"; else record "$1" skipped 0 - "$2"; fi
}

train() { # name estimate_s flags of gpt2.py...
    measure "$1" "$2" "$python" src/gpt2.py "${work[@]}" "${@:3}" --checkpoint_path "$out/runs/$1" --overwrite
}

train_on_ranks() { # name estimate_s flags of gpt2.py...
    measure "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" src/gpt2.py \
        "${work[@]}" "${@:3}" --checkpoint_path "$out/runs/$1" --overwrite
}

check() { # reference run tolerance: the losses of every step must lie so close together
    [ "$is_dry" = yes ] || ! is_wanted "$2" || printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$out/checks.tsv"
}

summarise() {
    "$python" scripts/summarise_benchmark.py "$out" --device "$device" --seconds "$SECONDS" --deadline_s "$deadline_s"
}

pack() { # what a person reads, in one file; without data, weights and what was compiled or installed
    (cd "$out" && find . \( -path ./data -o -path ./compiled -o -path ./site \) -prune -o -type f \
        \( -name '*.json' -o -name '*.tsv' -o -name '*.log' -o -name '*.png' -o -name '*.txt' \) -print0 |
        tar --null -czf results.part -T - && mv results.part results.tar.gz) && echo "everything in one file: $out/results.tar.gz"
}

finish() {
    local code=0
    if [ "$is_dry" = yes ]; then
        echo "estimated: $total s of $deadline_s s"
        exit 0
    fi
    summarise || code=$?
    pack || code=1
    exit "$code"
}

interrupted() { # exit_code
    trap '' INT TERM
    echo "benchmark_gpu.sh: interrupted" >&2
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null # timeout hands it on to all that it started
        wait "$child" 2>/dev/null
        record "${current[0]}" interrupted $((SECONDS - current[1])) - "interrupted" "${current[@]:2}"
    fi
    [ "$is_dry" = yes ] || { summarise; pack; }
    exit "$1"
}
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

# --- the data: the source of Python's own library, tokenized here
limits=()
[ "$device" = cpu ] && limits=(--max_docs 60)
tokens=$out/data
measure corpus 6 "$python" download_data.py --dataset stdlib --output_dir "$tokens" --overwrite "${limits[@]}" &&
    measure tokens 24 "$python" preprocess_small.py --input "$tokens/stdlib" --tokenizer bpe:8192 --output_dir "$tokens" ||
    finish
data=(--train_data_path "$tokens/train_small.bin" --val_data_path "$tokens/val_small.bin" --epochs 1000 --sample_tokens 0)

if [ "$device" = cuda ]; then
    ranks=1
    [ "$is_dry" = no ] && ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    small=(--model nano --seq_length 128 --global_batch_size 16 --micro_batch_size_per_gpu 2)
    small+=(--max_train_steps 20 --max_val_steps 1)
    large=(--model gpt2 --vocab_size 50257 --seq_length 1024 --global_batch_size 64 --max_train_steps 24 --max_val_steps 0)
    large+=(--precision bf16)
    # not compiled: the first step would wait for the compiler, and a time to a loss counts every step
    learning=(--model nano --seq_length 256 --global_batch_size 64 --micro_batch_size_per_gpu 64 --max_train_steps 600)
    learning+=(--eval_every 50 --max_val_steps 4 --warmup_steps 60 --precision bf16 --compile off)
    largest=(--micro_batch_size_per_gpu auto --global_batch_size 128 --max_train_steps 12 --compile off)
    peers=(--model gpt2 --batch_size 32 --seq_length 1024 --precision bf16 --steps 40 --warmup_steps 10)
    peers+=(--repeats "$peer_rounds")
    rate_precisions='"bf16", "fp32"'
else
    ranks=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    tiny=(--num_layers 2 --num_heads 2 --embedding_size 64 --max_position_embeddings 64 --seq_length 64)
    small=("${tiny[@]}" --global_batch_size 4 --micro_batch_size_per_gpu 2 --max_train_steps 6 --max_val_steps 1)
    large=("${tiny[@]}" --global_batch_size 8 --max_train_steps 8 --max_val_steps 0 --precision fp32)
    learning=("${tiny[@]}" --global_batch_size 8 --max_train_steps 20 --eval_every 5 --max_val_steps 2 --precision fp32)
    largest=(--micro_batch_size_per_gpu auto)
    peers=(--quick --precision fp32 --repeats 1)
    rate_precisions='"fp32"'
fi

# --- the device computes what the CPU computes in fp32; if not, nothing below is worth reading
work=("${data[@]}" "${small[@]}")
train agree_cpu_fp32 14 --run_type baseline --device cpu --precision fp32
train agree_fp32 12 --run_type baseline --device "$device" --precision fp32 --compile off
check agree_cpu_fp32 agree_fp32 1e-3

# --- other programs, all in one precision; two rounds, so that the rest fits too: no claim before five
names=ours
[ -n "${NANOGPT_DIR:-}" ] && names+=,nanogpt && peers+=(--nanogpt_dir "$NANOGPT_DIR")
if has_package transformers && has_package accelerate; then
    [ -z "${NANOGPT_DIR:-}" ] && names+=,transformers
    [ "$device" = cuda ] && names+=,transformers-compiled
else
    skip peers_transformers "the packages transformers and accelerate are not both installed"
fi
if [ "$names" = ours ]; then
    skip peers "there is no other trainer: neither transformers with accelerate nor NANOGPT_DIR"
elif ! has_package jsonschema; then
    skip peers "the package jsonschema is not installed"
else
    commas=${names//[^,]/}
    peers+=(--peers "$names" --train_data_path "$tokens/train_small.bin" --val_data_path "$tokens/val_small.bin")
    # per trainer and round 24 s, for the matrix product 9, for starting and drawing 12
    measure peers $((peer_rounds * (24 * (${#commas} + 1) + 9) + 12)) \
        "$python" scripts/compare_peers.py "${peers[@]}" --device "$device" --run_timeout_s 100 --out_dir "$out/peers"
fi

# --- the rate of a large matrix product, which the summary has next to the data sheet's
if [ "$is_dry" = no ] && is_wanted matrix_rate; then
    printf '{"kind": "ceilings", "precisions": [%s], "repeats": 10, "threads": %s, "device": "%s", "out": "%s"}\n' \
        "$rate_precisions" "${OMP_NUM_THREADS:-$(nproc)}" "$device" "$out/matrix_rate.json" >"$out/matrix_rate_work.json"
fi
measure matrix_rate 10 "$python" scripts/compare_peers.py --worker "$out/matrix_rate_work.json"

# --- what makes a step faster: the compiler, the largest micro batch, the attention kernel
work=("${data[@]}" "${large[@]}" --run_type baseline --device "$device")
if [ "$device" = cuda ]; then
    train compile_off 16 --micro_batch_size_per_gpu 32 --compile off
    train compile_on 28 --micro_batch_size_per_gpu 32 --compile on
    check compile_off compile_on 0.05
    train largest 28 "${largest[@]}"
    for backend in flash cudnn efficient; do
        train "attention_$backend" 15 --micro_batch_size_per_gpu 32 --compile off --attention "$backend"
        check compile_off "attention_$backend" 0.05
    done
else
    train largest 28 "${largest[@]}"
    for backend in flash math; do train "attention_$backend" 15 --attention "$backend"; done
    check attention_flash attention_math 1e-4
    skip compile_on "nothing is gained by it on a CPU (docs/automatic_choices.md)"
fi

# --- time to a loss
work=("${data[@]}" "${learning[@]}" --run_type baseline --device "$device")
train time_to_loss_adamw 16 --optimizer adamw
train time_to_loss_muon 16 --optimizer muon

# --- the same mathematics in bf16 and by every run type that the devices allow
work=("${data[@]}" "${small[@]}")
if [ "$device" = cuda ]; then
    train agree_bf16 12 --run_type baseline --device cuda --precision bf16 --compile off
    check agree_cpu_fp32 agree_bf16 0.02
fi
for run_type in ddp fsdp allreduce optimized pipeline tensor; do
    estimate_s=14
    [ "$run_type" = optimized ] && estimate_s=20
    if [ "$device" = cpu ] && [ "$run_type" != ddp ]; then
        skip "agree_$run_type" "left out on the CPU, where the test suite compares every run type"
    elif [ "$run_type" = optimized ] && ! has_package deepspeed; then
        skip agree_optimized "the package deepspeed is not installed"
    elif [ "$ranks" -lt 2 ] && { [ "$run_type" = pipeline ] || [ "$run_type" = tensor ]; }; then
        skip "agree_$run_type" "it cuts the model over devices, and there is one"
    else
        train_on_ranks "agree_$run_type" $estimate_s --run_type "$run_type" --device "$device" --precision fp32 --compile off
        check agree_fp32 "agree_$run_type" 1e-4
    fi
done

# --- the precision, and 8 bits
work=("${data[@]}" "${large[@]}" --run_type baseline --device "$device")
if [ "$device" = cpu ]; then
    skip fp8 "no CPU multiplies in 8 bits"
else
    train fp32 20 --micro_batch_size_per_gpu 16 --compile off --precision fp32 --max_train_steps 8
    if has_package torchao; then
        train fp8 35 --micro_batch_size_per_gpu 32 --compile on --matmul fp8
    else
        skip fp8 "the package torchao is not installed"
    fi
fi
finish
}
