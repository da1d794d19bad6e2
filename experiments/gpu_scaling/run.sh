#!/usr/bin/env bash
# Strong and weak scaling of every stage and engine on the GPUs of one host, its collectives measured first.
# experiments/gpu_scaling/run.sh [WORLDS, default 1,2,4,8] [OVERRIDE …]
# Started again it does what is missing. Reports: runs/gpu_*/report/index.html.
set -euo pipefail
cd "$(dirname "$0")/../.."
worlds=${1:-1,2,4,8}
shift || true

largest=${worlds##*,}
compgen -G "${XDG_CACHE_HOME:-$HOME/.cache}/harness/calibration/*-w$largest.json" ||
    python -m harness.calibrate "launch.world_size=$largest"

sweep() { # STUDY OVERRIDE…: synthetic tokens, and nothing beside the updates
    local study=$1
    shift
    python harness/main.py -m "study=$study" "launch.world_size=$worlds" data=synthetic data.eval_samples=0 \
        lr.base=1e-4 wandb.mode=disabled "$@"
}
weak=(batch=weak batch.per_rank_size=16 train.steps=22)
strong=(batch=strong batch.global_size=128 batch.micro_size=16 train.steps=10)

# The fastest path, three times.
llama=(model=llama_1b data.seq_len=2048)
sweep gpu_weak_fast +exp=fast "${llama[@]}" "${weak[@]}" seed=0,1,2 "$@"
sweep gpu_strong_fast +exp=fast "${llama[@]}" "${strong[@]}" seed=0,1,2 "$@"

for name in llama_1b gpt2; do
    model=("model=$name" "data.seq_len=$([[ $name == gpt2 ]] && echo 1024 || echo 2048)")
    for engines in zero=stage0,stage1,stage2,stage3 engine=ddp,fsdp; do
        sweep "gpu_weak_$name" "${model[@]}" "${weak[@]}" "$engines" "$@"
        sweep "gpu_strong_$name" "${model[@]}" "${strong[@]}" "$engines" "$@"
    done
done
