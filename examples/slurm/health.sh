#!/bin/bash
# HealthCheckProgram: drain this node while the POD has something broken that the next job's start does not clear.
. "$(dirname -- "$(readlink -f -- "$0")")/settings.env"

podrun health --slurm-node "$(hostname -s)" >/dev/null
exit 0
