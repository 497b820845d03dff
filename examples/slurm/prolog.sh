#!/bin/bash
# PrologSlurmctld: a partition for a job that asks for IPUs (--gres=ipu:N). If it fails, Slurm queues the job again.
. "$(dirname -- "$(readlink -f -- "$0")")/partition.sh"

ipus=$(ipus_of "$SLURM_JOB_ID")
[ -n "$ipus" ] || exit 0
partition=$(name_of "$SLURM_JOB_ID")
reap
state=$(state_of "$partition") || exit 1
if [ "$state" = ACTIVE ]; then
    say "partition $partition is there already" # Slurm started the job twice, or started again itself.
    exit 0
fi
if [ -n "$state" ]; then
    give_back "$partition" || exit 1 # A start that failed has left it.
fi
if ! answer=$(vipu --timeout "$PODRUN_SLURM_TIMEOUT" create partition "$partition" --size "$ipus" --no-ipuof-files 2>&1); then
    say "no partition of $ipus IPUs: $answer"
    give_back "$partition"
    exit 1
fi
say "partition $partition of $ipus IPUs"
