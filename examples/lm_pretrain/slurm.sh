#!/bin/bash
# One task per process of JAX; a job of which a task dies goes back into the queue, and
# resumes from its last checkpoint:
#   sbatch --nodes 4 --ntasks-per-node 1 --gpus-per-task 8 examples/lm_pretrain/slurm.sh \
#     python examples/lm_pretrain/train.py --run-dir /shared/runs/one --coordinator auto
#SBATCH --job-name=lm_pretrain
#SBATCH --requeue
#SBATCH --open-mode=append
# JAX finds the coordinator, the tasks and each one's number in what srun sets. Without
# --kill-on-bad-exit the others would wait for the one that died.
srun --kill-on-bad-exit=1 "$@" && exit
code=$?
if [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-3}" ]; then
  echo "a task ended with $code: goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # until SLURM ends this script
fi
exit "$code"
