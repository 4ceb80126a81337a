#!/usr/bin/env bash
# Everything that a machine with a CUDA device should measure, in one command, in under 9 minutes, without a network.
#
#   bash scripts/benchmark_gpu.sh [--dry_run] [OUT_DIR]     default: checkpoint/benchmark_gpu
#
# It installs nothing: run it in an environment that has the requirements. OUT_DIR/summary.json says what ran, failed and
# was skipped, with the numbers of each run; every run's files lie in OUT_DIR/runs, what it said in OUT_DIR/logs.
# Exit code 1 when something failed or does not agree, 2 when it was called wrong.
#
#   DEVICE=cpu        a tiny variant that shows that everything runs, not how fast (under 2 minutes on 2 cores)
#   NANOGPT_DIR=DIR   a copy of nanoGPT's repository, to be measured beside ours
#   ONLY='peers|fp8'  measure these steps alone (a regular expression; the data is always made)
#   DEADLINE_S=520    no step begins that its budget would carry past this
#   PYTHON=python     the interpreter
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
python=${PYTHON:-python}
if [ "$device" != cuda ] && [ "$device" != cpu ]; then
    echo "benchmark_gpu.sh: DEVICE=$device is not cuda or cpu" >&2
    exit 2
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

has_package() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

if [ "$is_dry" = no ]; then
    for package in torch numpy transformers tiktoken tqdm tokenizers safetensors jsonschema psutil requests; do
        has_package "$package" || {
            echo "benchmark_gpu.sh: $python has no package $package; use an environment with requirements.txt" >&2
            exit 2
        }
    done
    if [ -e "$out/summary.json" ]; then
        echo "benchmark_gpu.sh: $out holds a finished benchmark; remove it or name another folder" >&2
        exit 2
    fi
    if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "benchmark_gpu.sh: PyTorch finds no CUDA device here; DEVICE=cpu shows that everything runs" >&2
        exit 2
    fi
    mkdir -p "$out/logs" "$out/runs"
    : >"$out/steps.tsv"
    : >"$out/checks.tsv"
fi

record() { # name status seconds exit_code reason command...
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" "${*:6}" >>"$out/steps.tsv"
    printf '%-28s %-8s %4s s  %s\n' "$1" "$2" "$3" "$5"
}

is_wanted() { # name
    [[ -z "${ONLY:-}" || $1 == corpus || $1 == tokens || $1 =~ $ONLY ]]
}

measure() { # name budget_s command...: run it if its budget still fits, and note what became of it
    local name=$1 budget_s=$2 code=0 started=$SECONDS
    shift 2
    is_wanted "$name" || return 1
    if [ "$is_dry" = yes ]; then
        printf '%-28s %4s s  %s\n' "$name" "$budget_s" "$*"
        return 0
    fi
    if [ $((SECONDS + budget_s)) -gt "$deadline_s" ]; then
        record "$name" skipped 0 - "its $budget_s s no longer fit before the deadline of $deadline_s s" "$@"
        return 1
    fi
    timeout --kill-after=10 "$budget_s" "$@" >"$out/logs/$name.log" 2>&1 || code=$?
    case $code in
        0) record "$name" done $((SECONDS - started)) 0 "" "$@" ;;
        124 | 137) record "$name" failed $((SECONDS - started)) $code "longer than its $budget_s s" "$@" ;;
        *) record "$name" failed $((SECONDS - started)) $code "see logs/$name.log" "$@" ;;
    esac
    return $code
}

skip() { # name reason
    is_wanted "$1" || return 0
    if [ "$is_dry" = yes ]; then printf '%-28s skipped  %s\n' "$1" "$2"; else record "$1" skipped 0 - "$2"; fi
}

train() { # name budget_s flags of gpt2.py...
    measure "$1" "$2" "$python" src/gpt2.py "${work[@]}" "${@:3}" --checkpoint_path "$out/runs/$1" --overwrite
}

train_on_ranks() { # name budget_s flags of gpt2.py...
    measure "$1" "$2" "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" src/gpt2.py \
        "${work[@]}" "${@:3}" --checkpoint_path "$out/runs/$1" --overwrite
}

check() { # reference run tolerance: the losses of every step must lie so close together
    [ "$is_dry" = yes ] || ! is_wanted "$2" || printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$out/checks.tsv"
}

finish() {
    [ "$is_dry" = yes ] && exit 0
    "$python" scripts/summarise_benchmark.py "$out" --device "$device" --seconds "$SECONDS" --deadline_s "$deadline_s"
    exit $?
}
trap 'echo "benchmark_gpu.sh: interrupted" >&2; finish' INT TERM

# --- the data: the source of Python's own library, tokenized here
limits=()
[ "$device" = cpu ] && limits=(--max_docs 60)
tokens=$out/data
measure corpus 60 "$python" download_data.py --dataset stdlib --output_dir "$tokens" --overwrite "${limits[@]}" &&
    measure tokens 90 "$python" preprocess_small.py --input "$tokens/stdlib" --tokenizer bpe:8192 --output_dir "$tokens" ||
    finish
data=(--train_data_path "$tokens/train_small.bin" --val_data_path "$tokens/val_small.bin" --epochs 1000 --sample_tokens 0)

if [ "$device" = cuda ]; then
    ranks=1
    [ "$is_dry" = no ] && ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    small=(--model nano --seq_length 128 --global_batch_size 16 --micro_batch_size_per_gpu 2)
    small+=(--max_train_steps 20 --max_val_steps 1)
    large=(--model gpt2 --vocab_size 50257 --seq_length 1024 --global_batch_size 128 --max_train_steps 30 --max_val_steps 0)
    learning=(--model nano --seq_length 256 --global_batch_size 64 --micro_batch_size_per_gpu 64 --max_train_steps 600)
    learning+=(--eval_every 50 --max_val_steps 4 --warmup_steps 60 --precision bf16)
    largest=(--micro_batch_size_per_gpu auto)
    peers=(--model gpt2 --batch_size 32 --seq_length 1024 --precision own --steps 40 --repeats 2)
else
    ranks=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    tiny=(--num_layers 2 --num_heads 2 --embedding_size 64 --max_position_embeddings 64 --seq_length 64)
    small=("${tiny[@]}" --global_batch_size 4 --micro_batch_size_per_gpu 2 --max_train_steps 6 --max_val_steps 1)
    large=("${tiny[@]}" --global_batch_size 8 --max_train_steps 8 --max_val_steps 0 --precision fp32)
    learning=("${tiny[@]}" --global_batch_size 8 --max_train_steps 20 --eval_every 5 --max_val_steps 2 --precision fp32)
    largest=(--micro_batch_size_per_gpu auto)
    peers=(--quick --precision fp32 --repeats 1)
fi

# --- the same mathematics: one process on the CPU in fp32, the device, and every run type that its devices allow
work=("${data[@]}" "${small[@]}")
train agree_cpu_fp32 60 --run_type baseline --device cpu --precision fp32
train agree_fp32 60 --run_type baseline --device "$device" --precision fp32 --compile off
check agree_cpu_fp32 agree_fp32 1e-3
if [ "$device" = cuda ]; then
    train agree_bf16 60 --run_type baseline --device cuda --precision bf16
    check agree_cpu_fp32 agree_bf16 0.02
fi
for run_type in allreduce ddp fsdp optimized pipeline tensor; do
    if [ "$device" = cpu ] && [ "$run_type" != ddp ]; then
        skip "agree_$run_type" "left out on the CPU, where the test suite compares every run type"
    elif [ "$run_type" = optimized ] && ! has_package deepspeed; then
        skip agree_optimized "the package deepspeed is not installed"
    elif [ "$ranks" -lt 2 ] && { [ "$run_type" = pipeline ] || [ "$run_type" = tensor ]; }; then
        skip "agree_$run_type" "it cuts the model over devices, and there is one"
    else
        train_on_ranks "agree_$run_type" 60 --run_type "$run_type" --device "$device" --precision fp32 --compile off
        check agree_fp32 "agree_$run_type" 1e-4
    fi
done

# --- what makes a step faster: the largest micro batch, the compiler, the attention kernel, the precision, 8 bits
work=("${data[@]}" "${large[@]}" --run_type baseline --device "$device")
train largest 75 "${largest[@]}"
if [ "$device" = cuda ]; then
    train compile_off 45 --micro_batch_size_per_gpu 32 --compile off
    train compile_on 75 --micro_batch_size_per_gpu 32 --compile on
    for backend in flash cudnn efficient; do
        train "attention_$backend" 45 --micro_batch_size_per_gpu 32 --compile off --attention "$backend"
    done
    train fp32 45 --micro_batch_size_per_gpu 16 --compile off --precision fp32 --max_train_steps 10
    if has_package torchao; then
        train fp8 90 --micro_batch_size_per_gpu 32 --compile on --matmul fp8
    else
        skip fp8 "the package torchao is not installed"
    fi
else
    for backend in flash math; do train "attention_$backend" 45 --attention "$backend"; done
    skip compile_on "nothing is gained by it on a CPU (docs/automatic_choices.md)"
    skip fp8 "no CPU multiplies in 8 bits"
fi

# --- time to a loss
work=("${data[@]}" "${learning[@]}" --run_type baseline --device "$device")
train time_to_loss_adamw 60 --optimizer adamw --learning_rate 3e-3
train time_to_loss_muon 60 --optimizer muon --learning_rate 3e-3

# --- beside other programs; two rounds, so that it ends in time (scripts/compare_peers.py by itself makes the five of a claim)
if [ ! -f scripts/compare_peers.py ]; then
    skip peers "scripts/compare_peers.py is not there"
else
    peers+=(--train_data_path "$tokens/train_small.bin" --val_data_path "$tokens/val_small.bin")
    if [ -n "${NANOGPT_DIR:-}" ]; then
        peers+=(--peers ours,transformers,nanogpt --nanogpt_dir "$NANOGPT_DIR")
    else
        peers+=(--peers ours,transformers)
    fi
    measure peers 150 "$python" scripts/compare_peers.py "${peers[@]}" --device "$device" --out_dir "$out/peers"
fi
finish
}
