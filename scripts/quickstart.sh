#!/usr/bin/env bash
# From nothing to charts: environment, corpus, tokens, a baseline run, a DeepSpeed run, the comparison.
#
# On CPU one core is one device: the baseline trains nano on 1 rank with 1 thread, then with as many threads as DeepSpeed has
# cores, and DeepSpeed on 2 ranks with 1 thread each: the second tells what the cores gain from what the strategy gains.
# With CUDA devices it trains GPT-2 124M on one, then on all of them. All runs do the same work. Safe to run again.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment -r requirements.txt
started=$SECONDS

devices=$(python -c 'import torch; print(torch.cuda.device_count())')
cores=1 # that one process could have in place of one
if [ "$devices" -gt 0 ]; then
    ranks=$devices
    work=(--model gpt2 --seq_length 1024 --max_train_steps 100 --epochs 100 --eval_every 25 --max_val_steps 8)
    one_device=(env CUDA_VISIBLE_DEVICES=0)
else
    ranks=2
    work=(--model nano --seq_length 128 --max_train_steps 80 --epochs 100 --learning_rate 3e-3 --warmup_steps 20
        --precision fp32 --eval_every 20 --max_val_steps 8)
    one_device=(env OMP_NUM_THREADS=1)
    export OMP_NUM_THREADS=1
    cores=$(python -c 'from testbed.distributed.launch import usable_cores; print(usable_cores())')
    [ "$cores" -ge 2 ] || echo "note: one core for two ranks, so no speed-up can be expected here"
fi
runs=(checkpoint/quickstart/baseline)
work+=(--sample_prompt "def " --overwrite)

step() { printf '\n== %s (%s s)\n' "$1" $((SECONDS - started)); }
step "corpus: Python's own library source"
python download_data.py --dataset stdlib --overwrite # a second, and whatever lay there before does not matter
step "tokens: a byte-level BPE trained on the corpus"
python preprocess_small.py --input dataset/stdlib --tokenizer bpe:8192
step "baseline: plain PyTorch on one device"
"${one_device[@]}" python src/gpt2.py --run_type baseline --checkpoint_path checkpoint/quickstart/baseline "${work[@]}"
if [ "$cores" -ge 2 ]; then
    step "baseline again: the same process with $ranks cores"
    OMP_NUM_THREADS=$ranks python src/gpt2.py --run_type baseline --checkpoint_path checkpoint/quickstart/baseline_all_cores \
        "${work[@]}"
    runs+=(checkpoint/quickstart/baseline_all_cores)
fi
step "optimized: DeepSpeed ZeRO-1 on $ranks devices, the same work"
# the `deepspeed` command by its module: pip writes that script in a way that breaks in a folder with a space in its name
python -m deepspeed.launcher.runner --num_gpus "$ranks" src/gpt2.py --run_type optimized \
    --checkpoint_path checkpoint/quickstart/optimized "${work[@]}"
step "charts"
python generate_charts.py --runs "${runs[@]}" checkpoint/quickstart/optimized
printf '\nquickstart finished: %s seconds after the installation; pictures in docs/charts/\n' $((SECONDS - started))
