#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8       # one process for each device
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue                 # a job that is preempted is queued again ...
#SBATCH --open-mode=append        # ... and goes on in the same log
#SBATCH --signal=USR1@120         # two minutes before the time is up: save and end
set -eu

output=${OUTPUT:-$SLURM_SUBMIT_DIR/runs/pretrain}  # on a file system that all hosts see
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# The ranks are the processes of srun: which host they meet on, and which device each takes, follows from SLURM_*.
srun --kill-on-bad-exit=1 python examples/pretrain.py --tp 8 --output "$output" "$@"

# The trained model is there when all steps are taken; until then there is more to do.
if [ ! -e "$output/model" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
