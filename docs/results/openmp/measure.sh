#!/usr/bin/env bash
# Interleaved runs of two threads under several values of GOMP_SPINCOUNT: bash measure.sh ROUNDS STEPS COUNT...
rounds=$1 steps=$2; shift 2
out=$(mktemp -d)
for round in $(seq "$rounds"); do for count in "$@"; do
    OMP_NUM_THREADS=2 GOMP_SPINCOUNT=$count python src/gpt2.py --run_type baseline --model nano --seq_length 128 --max_train_steps "$steps" \
        --epochs 100 --precision fp32 --max_val_steps 1 --sample_tokens 0 --global_batch_size 8 --device cpu --overwrite \
        --checkpoint_path "$out/$count" >"$out/log" 2>&1
    python -c "
import json, os
t = json.load(open('$out/$count/training_metrics.json'))['timing']
print('round $round, GOMP_SPINCOUNT=$count: median step', round(t['step_time_median_s'] * 1e3, 1), 'ms, p95 / median', round(1 + t['step_time_p95_above_median'], 2), 'load', os.getloadavg()[0])"
done; done
rm -r "$out"
