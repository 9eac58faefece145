#!/bin/bash
# The same line on each host. node0 is one of them, and all reach it at the port; --output is a folder that all see:
#
#     bash examples/launch/torchrun.sh node0 examples/pretrain.py --tp 8 --output /shared/runs/pretrain
set -eu

first=$1
shift
# As many ranks on each host as it has devices; when one dies, all start again, and go on from the newest checkpoint.
exec torchrun --nnodes "${HOSTS:-2}" --nproc-per-node "${DEVICES:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "${JOB:-train}" --max-restarts 10 "$@"
