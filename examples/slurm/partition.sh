# Functions of prolog and epilog. Read by them; runs nothing by itself.

here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
. "$here/settings.env"

say() { echo "$(date -Is) job ${SLURM_JOB_ID:-?}: $*" >> "$here/podrun-slurm.log" 2>/dev/null || true; }

# The partition of a job. Nothing else has such a name, so what is left of a job can be told.
name_of() { echo "slurm_$1"; }

# IPUs that a job asked for (sbatch --gres=ipu:8); nothing if none.
ipus_of() {
    scontrol show job "$1" -o | grep -oE 'gres[:/]ipu[:=][0-9]+' | head -n 1 | grep -oE '[0-9]+$'
}

# State of a partition; empty if there is none. Fails if the server does not answer.
state_of() {
    local answer
    if answer=$(vipu get partition "$1" 2>&1); then
        echo "$answer" | sed -n 's/^ *State *| *//p'
    elif ! echo "$answer" | grep -q "there is no partition"; then
        say "$answer"
        return 1
    fi
}

# Remove a partition, whoever uses it; one that is gone is no error. Tries again while the server does not answer.
give_back() {
    local attempt answer
    for attempt in 1 2 3; do
        if answer=$(vipu remove partition "$1" --force 2>&1) || echo "$answer" | grep -q "there is no partition"; then
            return 0
        fi
        say "partition $1 is not removed (attempt $attempt): $answer"
        sleep 1
    done
    return 1
}

# Remove partitions of jobs that do not run any more: an epilog may have been lost with its host.
reap() {
    local partition running
    running=$(squeue --noheader --format=%A --states=running,configuring,completing,suspended) || return 0
    for partition in $(vipu list partitions 2> /dev/null | grep -oE '^ slurm_[0-9]+ '); do
        if ! echo "$running" | grep -qx "${partition#slurm_}" && [ "$partition" != "$(name_of "${SLURM_JOB_ID:-0}")" ]; then
            say "partition $partition belongs to no job that runs"
            give_back "$partition"
        fi
    done
}
