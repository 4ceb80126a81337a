#!/usr/bin/env bash
# The lab, once through: two namespaced hosts train nano with ddp and agree with one process, one Slurm job runs where
# Slurm is installed, and nothing is left behind. Root; about two minutes on two cores; exit code 0 when all of it holds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

STEPS=6
scratch=$(mktemp -d)
slurm_is_up=no
started=$SECONDS
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

say() { echo "selftest: $*"; }
fail() {
    say "FAILED: $*" >&2
    exit 1
}
clean_up() {
    if [ "$slurm_is_up" = yes ]; then bash scripts/lab/slurm_down.sh --dir "$scratch/slurm" || true; fi
    rm -rf "$scratch"
}
trap clean_up EXIT

[ "$(id -u)" -eq 0 ] || fail "namespaces are made by root only; run it with sudo env PATH=\"\$PATH\", or in a container of your own"

say "token files, and $STEPS steps of nano in one process"
python - "$scratch" <<'PYTHON'
import sys
from pathlib import Path

sys.path.insert(0, "src")
from testbed.experiments.fault_drill.work import write_made_up_tokens

write_made_up_tokens(Path(sys.argv[1]), 8192)
PYTHON
work=(--model nano --seq_length 64 --max_position_embeddings 64 --global_batch_size 8 --precision fp32 --device cpu
    --max_train_steps "$STEPS" --epochs 100 --timing_warmup_steps 1 --max_val_steps 0 --sample_tokens 0
    --train_data_path "$scratch/train.bin" --val_data_path "$scratch/val.bin")
python src/gpt2.py --run_type baseline "${work[@]}" --checkpoint_path "$scratch/baseline" >"$scratch/baseline.log" 2>&1 ||
    { cat "$scratch/baseline.log"; fail "the single process ended with an error"; }

say "the same over two hosts, 1 Gbit/s between them"
python scripts/lab/network.py run --hosts 2 --rate 1gbit -- \
    python -m torch.distributed.run --nproc-per-node 1 src/gpt2.py --run_type ddp "${work[@]}" \
    --checkpoint_path "$scratch/ddp" >"$scratch/ddp.log" 2>&1 ||
    { cat "$scratch/ddp.log"; fail "two hosts ended with an error"; }
lab=$(sed -n 's/^network.py: lab \(testbed-[0-9a-f]*\).*/\1/p' "$scratch/ddp.log")
[ -n "$lab" ] || fail "network.py did not say which lab it made"

python - "$scratch" <<'PYTHON' || fail "two hosts do not train as one process does"
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
runs = [json.loads((folder / name / "training_metrics.json").read_text()) for name in ("baseline", "ddp")]
alone, hosts = ([row["loss"] for row in run["steps"]] for run in runs)
apart = max(abs(a - b) for a, b in zip(alone, hosts, strict=True))
print(f"selftest: losses of {len(alone)} steps differ by {apart:.1e} at most, on {runs[1]['hardware']['num_nodes']} nodes")
sys.exit(not (apart <= 5e-6 and runs[1]["hardware"]["num_nodes"] == 2))
PYTHON

if [ ! -e scripts/lab/slurm_up.sh ]; then
    say "LEFT OUT: the Slurm job, because scripts/lab/slurm_up.sh is not here"
elif ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    say "LEFT OUT: the Slurm job, because Slurm is not installed (bash scripts/lab/install_slurm.sh)"
else
    say "a Slurm cluster, and one job on two of its nodes"
    slurm_is_up=yes
    bash scripts/lab/slurm_up.sh --nodes 2 --dir "$scratch/slurm" >"$scratch/slurm_up.log" 2>&1 ||
        { cat "$scratch/slurm_up.log"; fail "no Slurm cluster"; }
    export SLURM_CONF=$scratch/slurm/etc/slurm.conf
    job=$(sbatch --parsable --nodes=2 --ntasks-per-node=1 --output="$scratch/job.log" --wrap 'srun hostname')
    state=unknown # an answer that does not come is no answer: the job may still run
    for _ in $(seq 300); do
        state=$(scontrol --oneliner show job "$job" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p') || state=unknown
        case $state in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL) break ;; esac
        sleep 0.1
    done
    if [ "$state" != COMPLETED ] || [ "$(grep -c . "$scratch/job.log")" != 2 ]; then
        cat "$scratch/job.log" || true
        fail "job $job did not run on two nodes, its state is $state"
    fi
    say "job $job ran on two nodes"
    bash scripts/lab/slurm_down.sh --dir "$scratch/slurm" >"$scratch/slurm_down.log" 2>&1 ||
        { cat "$scratch/slurm_down.log"; fail "Slurm did not go"; }
    slurm_is_up=no
fi

# By the names of the lab that was made here: others may come and go meanwhile. Its links were born inside.
left=$(ip netns list | awk -v lab="$lab" 'index($1, lab "-") == 1 { print $1 }')
[ -z "$left" ] || fail "namespaces are left: $left"
[ -z "$(ls "/run/testbed-lab/$lab".* 2>/dev/null)" ] || fail "the lab $lab is still on record"
say "nothing is left; all of it took $((SECONDS - started)) s"
