#!/usr/bin/env bash
# Trains on the nodes of a Slurm job, and puts the job back into the queue until the run is done:
#
#     sbatch --nodes=4 run_slurm.sh train_configs/llama_8b.toml [--section.key value ...]
#
# Slurm starts run_train.sh once on every node, with all GPUs of the node. Edit the lines below, or pass sbatch their options
# before the name of the script: partition and account, nodes, GPUs per node, time limit. Slurm provides everything else.
#
# The disk: titanlite with its .venv, the data and job.dump_folder must be at the same path on every node, and the cache of
# tokens too ($TITANLITE_CACHE, default ~/.cache/titanlite) where it is to be made only once. Relative paths are relative to
# the folder that sbatch is called in.
#
# Before the time limit, or when a job of higher priority takes the nodes, the ranks finish their step and save, and the run ends
# with exit code 75. Then the job is requeued, with the same number and the same log, and resumes from the checkpoint.
# Any other exit code is the job's.
#     scancel --signal=USR1 JOB    saves, ends, and restarts when nodes are free, as at the time limit
#     scancel JOB                  ends the job at once, without saving: at this signal, srun kills the ranks. To save first,
#                                  send USR1, and cancel the job when its log says that it is requeued
#
# From the environment, as in run_train.sh: NGPU, RDZV_TIMEOUT, LOG_RANK, MAX_RESTARTS, PYTHON, OMP_NUM_THREADS.

#SBATCH --job-name=titanlite
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

# One launcher a node, which gets the whole node.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0

# The seconds that a step and a checkpoint need, twice; Slurm may send the signal up to a minute early. Without "B:", which
# would signal this script alone, it goes to every process that srun has started. A preempted job receives it only if
# its partition has a GraceTime.
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    echo "this is for sbatch: sbatch --nodes=2 $0 CONFIG.toml; without Slurm use run_train.sh" >&2
    exit 2
fi
# What runs here is a copy in Slurm's spool folder; Slurm knows where the original is.
original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
here=$(dirname "$(readlink -f "$original" || true)")
[[ -x "$here/run_train.sh" ]] || here=$SLURM_SUBMIT_DIR

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES=$SLURM_JOB_NUM_NODES
# below the ports that Linux gives out by itself (32768 and up), and another one for another job on the same node
export RDZV_ENDPOINT=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))
export NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-}}

# In the background, since bash runs a trap only after a command in the foreground has ended. A node whose launcher ends does
# not take the others down at once: they may be saving, and srun's exit code is the highest of all. They get --wait seconds.
# shellcheck disable=SC2016 # SLURM_NODEID differs on every node
srun --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=0 --wait=180 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$here/run_train.sh" "$@" &
run=$!

# Slurm sends SIGTERM to this shell, and not only to what srun has started, where it ends the job itself: scancel, or time
# that is over. Such a job is not put back.
ended_by_slurm=""
trap 'ended_by_slurm=yes' TERM
trap 'kill -USR1 "$run"' USR1 # from scancel --batch; srun passes it on

while kill -0 "$run" 2>/dev/null; do
    wait "$run" || true # a trap ends it early
done
code=0
wait "$run" || code=$? # bash remembers it

if ((code == 75)) && [[ -z "$ended_by_slurm" ]]; then
    echo "run_slurm.sh: stopped after saving; job $SLURM_JOB_ID is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID" || echo "run_slurm.sh: it could not be requeued; submit it again to continue" >&2
fi
exit "$code"
