#!/bin/bash
# The paper's recipe on 16 machines of 8 GPUs:  sbatch docs/cluster/slurm.sh [section.key=value …]
# Submit it from a checkout that all machines see: runs/ in it has to be the same folder everywhere.
#SBATCH --job-name=dapo
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900
#SBATCH --open-mode=append
set -euo pipefail

RECIPE=${RECIPE:-recipes/qwen2.5-32b.yaml}
PORT=${PORT:-29500}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
host=${hosts%%$'\n'*}

# --signal sends SIGTERM that long before the limit; torchrun passes it on, and kills what is left after the shutdown
# timeout. run.grace is how long a rank may count on: a step that would take longer is given up.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=840
# In the launcher's store, ranks that are restarted may find addresses of the attempt before. So rank 0 makes a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$host:$PORT" --rdzv-id "$SLURM_JOB_ID" \
    -m dapo_runner train "$RECIPE" run.grace=780 "$@"
