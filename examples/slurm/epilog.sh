#!/bin/bash
# EpilogSlurmctld: the IPUs of a job that ended go back.
. "$(dirname -- "$(readlink -f -- "$0")")/partition.sh"

give_back "$(name_of "$SLURM_JOB_ID")"
reap
