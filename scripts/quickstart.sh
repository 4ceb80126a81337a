#!/usr/bin/env bash
# From nothing to charts: environment, corpus, tokens, a baseline run, a DeepSpeed run, the comparison.
#
#   bash scripts/quickstart.sh               # one run of each: a table without a verdict
#   bash scripts/quickstart.sh --repeats 5   # five interleaved runs of each: a verdict with its interval
#
# On a CPU one core is one device. The baseline trains nano on 1 rank with 1 thread, then with as many threads as DeepSpeed
# has cores; DeepSpeed trains on 2 ranks with 1 thread each. The second run separates the gain of the cores from the gain of
# the strategy. With CUDA devices it trains GPT-2 small on one, then on all (92M parameters, as the vocabulary has 8,192 tokens).
# All runs do the same work. Safe to run again.
repeats=1
if [ "$*" = --help ] || [ "$*" = -h ]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
if [ $# -gt 0 ]; then
    if [ "$1" != --repeats ] || [ $# -ne 2 ] || ! [[ "$2" =~ ^[1-9][0-9]?$ ]]; then
        echo "quickstart.sh: error: '$*' is not --repeats N with N from 1 to 99; without it each run is made once" >&2
        exit 2
    fi
    repeats=$2
fi
. "$(dirname "${BASH_SOURCE[0]}")/maintain/environment.sh"
use_environment -r requirements.txt
started=$SECONDS

devices=$(python -c 'import torch; print(torch.cuda.device_count())')
arms=(baseline optimized)
if [ "$devices" -gt 0 ]; then
    ranks=$devices
    work=(--model gpt2 --seq_length 1024 --max_train_steps 100 --eval_every 25 --max_val_steps 8)
    visible=${CUDA_VISIBLE_DEVICES:-0} # numbers, or names of GPUs or MIG parts
    one_device=(env CUDA_VISIBLE_DEVICES="${visible%%,*}")
else
    ranks=2
    work=(--model nano --seq_length 128 --max_train_steps 80 --learning_rate 2e-3 --warmup_steps 40
        --precision fp32 --eval_every 20 --max_val_steps 8)
    one_device=(env OMP_NUM_THREADS=1)
    export OMP_NUM_THREADS=1
    cores=$(python -c 'from testbed.distributed.launch import usable_cores; print(usable_cores())')
    if [ "$cores" -ge 2 ]; then
        arms=(baseline baseline_all_cores optimized)
    else
        echo "note: one core for two ranks, so no speed-up can be expected here"
    fi
fi
work+=(--sample_prompt "def " --overwrite)

step() { printf '\n== %s (%s s)\n' "$1" $((SECONDS - started)); }
train() { # arm, folder
    case $1 in
        baseline)
            step "baseline: plain PyTorch on one device"
            "${one_device[@]}" python src/gpt2.py --run_type baseline --checkpoint_path "$2" "${work[@]}"
            ;;
        baseline_all_cores)
            step "baseline again: the same process with $ranks cores"
            OMP_NUM_THREADS=$ranks python src/gpt2.py --run_type baseline --checkpoint_path "$2" "${work[@]}"
            ;;
        optimized)
            step "optimized: DeepSpeed ZeRO-1 on $ranks devices, the same work"
            # the `deepspeed` command by its module: pip writes that script in a way that breaks in a folder with a space in its name
            launcher=(deepspeed.launcher.runner --num_gpus "$ranks")
            if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then # which that launcher overrides
                launcher=(torch.distributed.run --standalone --nproc-per-node "$ranks")
            fi
            python -m "${launcher[@]}" src/gpt2.py --run_type optimized --checkpoint_path "$2" "${work[@]}"
            ;;
    esac
}

step "corpus: Python's own library source"
python download_data.py --dataset stdlib --overwrite # whatever lay there before does not matter
step "tokens: a byte-level BPE trained on the corpus"
python preprocess_small.py --input dataset/stdlib --tokenizer bpe:8192
if [ "$repeats" -eq 1 ]; then
    root=checkpoint/quickstart
    for arm in "${arms[@]}"; do train "$arm" "$root/$arm"; done
else
    root=checkpoint/quickstart_repeats
    rm -rf "$root" # an earlier call may have made more repeats
    for ((repeat = 1; repeat <= repeats; repeat++)); do
        for ((place = 0; place < ${#arms[@]}; place++)); do # each arm is first, second and third in turn
            arm=${arms[(place + repeat - 1) % ${#arms[@]}]}
            train "$arm" "$root/$arm/run_$repeat"
        done
    done
fi
step "charts"
python generate_charts.py --runs "${arms[@]/#/$root/}"
if [ "$repeats" -gt 1 ]; then
    for arm in "${arms[@]}"; do
        [ "$arm" = optimized ] && continue
        step "verdict: A is optimized, B is $arm"
        python scripts/compare_runs.py "$root/optimized" --against "$root/$arm"
    done
fi
printf '\nquickstart finished: %s seconds after the installation; pictures in docs/charts/\n' $((SECONDS - started))
