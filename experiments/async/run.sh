#!/usr/bin/env bash
# The study of asynchrony: 9 arms x 2 optimizers x 3 seeds into runs/async, then its report. Started again it goes on.
# experiments/async/run.sh [OVERRIDE …], e.g. train.samples=640 study=async_small seed=0
set -euo pipefail
cd "$(dirname "$0")/../.."
arm() { python harness/main.py -m +exp=async_study wandb.mode=disabled "$@"; }

arm parallel=sync parallel.workers=8 "$@"
arm parallel.workers=2,4,8,16 "$@"
arm parallel.clock=exponential "$@"
arm parallel.clock=stragglers parallel.clock_cv=1 "$@"
arm parallel.remedy=lr_over_staleness,dc_asgd "$@"
