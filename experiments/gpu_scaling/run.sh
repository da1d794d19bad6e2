#!/usr/bin/env bash
# Strong and weak scaling of every stage and engine on the GPUs of one host, its collectives measured first.
# experiments/gpu_scaling/run.sh [WORLDS, default 1,2,4,8] [OVERRIDE …]
# Started again it does what is missing. Reports: runs/gpu_*/report/index.html.
set -euo pipefail
cd "$(dirname "$0")/../.."
worlds=${1:-1,2,4,8}
shift || true

python -m harness.calibrate "launch.world_size=${worlds##*,}"

sweep() { # STUDY OVERRIDE…: synthetic tokens, and nothing beside the updates
    local study=$1
    shift
    python harness/main.py -m "study=$study" "launch.world_size=$worlds" data=synthetic data.eval_samples=0 \
        lr.base=1e-4 train.steps=22 wandb.mode=disabled "$@"
}

engines() { # STUDY OVERRIDE…
    sweep "$@" zero=stage0,stage1,stage2,stage3
    sweep "$@" engine=ddp,fsdp
}

for model in "llama_1b data.seq_len=2048" "gpt2 data.seq_len=1024"; do
    read -r name length <<<"$model"
    engines "gpu_weak_$name" "model=$name" "$length" batch=weak batch.per_rank_size=16 "$@"
    engines "gpu_strong_$name" "model=$name" "$length" batch=strong batch.global_size=128 batch.micro_size=16 "$@"
done
# The fastest path, three times.
sweep gpu_weak_fast +exp=fast model=llama_1b data.seq_len=2048 batch=weak batch.per_rank_size=16 seed=0,1,2 "$@"
sweep gpu_strong_fast +exp=fast model=llama_1b data.seq_len=2048 batch=strong batch.global_size=128 batch.micro_size=16 seed=0,1,2 "$@"
