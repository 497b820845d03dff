#!/bin/bash
# TaskProlog: tells each task of a job its partition. What it prints as "export NAME=VALUE" Slurm adds to the environment.
. "$(dirname -- "$(readlink -f -- "$0")")/partition.sh"

if [ -n "$(ipus_of "$SLURM_JOB_ID")" ]; then
    echo "export IPUOF_VIPU_API_HOST=$VIPU_CLI_API_HOST"
    echo "export IPUOF_VIPU_API_PORT=$VIPU_CLI_API_PORT"
    echo "export IPUOF_VIPU_API_PARTITION_ID=$(name_of "$SLURM_JOB_ID")"
fi
