#!/usr/bin/env bash
# Trains the model of a TOML file, from any directory:
#
#     [NGPU=8] [...] ./run_train.sh CONFIG.toml [--section.key value ...]
#     ./run_train.sh CONFIG.toml --help                     every option with its meaning and value
#
# Checks the configuration once, then starts the ranks. The exit code is the run's: 0 done, 2 a fault in the configuration or
# data, 75 stopped and to be started again, 128 + n ended by signal n, anything else a failed rank.
#
# SIGTERM, SIGUSR1 or SIGUSR2, to this process or to any rank, stops the run: the step is finished, a checkpoint saved, and the
# exit code is 75. So does job.time_limit_minutes, counted from here. A second signal to this process ends the run at once, and
# so do SIGINT and, without nohup, the end of the terminal (SIGHUP).
#
# From the environment:
#   NGPU           ranks on this node; default: its visible GPUs, or 1. Without a GPU they run on the CPU over gloo
#   NNODES         nodes (default 1); start the same command on each
#   NODE_RANK      this node's number, from 0. Node 0 hosts the rendezvous and has rank 0. All nodes must share the
#                  disk of job.dump_folder
#   RDZV_ENDPOINT  host:port of node 0; needed when NNODES > 1
#   RDZV_TIMEOUT   seconds for which the nodes wait for each other at a start (default 600); after 60 the log names the
#                  missing ones
#   LOG_RANK       ranks that log, such as 0 or 0,3 (default 0); warnings come from all
#   MAX_RESTARTS   how often the ranks are restarted after a failure (default 0)
#   PYTHON         the interpreter; default: .venv beside this script, else python3
#   OMP_NUM_THREADS  CPU threads a rank; default: the cores that this process may use, shared among its ranks
#   PYTORCH_ALLOC_CONF  PyTorch's allocator on GPUs; default expandable_segments:True
#   MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_  glibc's on CPUs; default: freed memory is kept
set -euo pipefail

trap 'exit 75' TERM USR1 USR2 # until the launcher takes over: there is nothing to save

script=${BASH_SOURCE[0]}
while [[ -L "$script" ]]; do # a link to this script finds what is beside the script
    link=$(readlink "$script")
    [[ "$link" == /* ]] && script=$link || script=$(dirname "$script")/$link
done
here=$(cd "$(dirname "$script")" && pwd)

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x "$here/.venv/bin/python" ]] && PYTHON="$here/.venv/bin/python"
fi
# titanlite and models from here; titanlite appends the current folder itself, for your own modules
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # a queue.py in the current folder does not replace Python's own (Python 3.11)

count_gpus() {
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        awk -F, 'NR == 1 { print ($0 == "" || $0 == "-1") ? 0 : NF }' <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}
gpus=$(count_gpus)
export NGPU=${NGPU:-$((gpus > 0 ? gpus : 1))}
if ((gpus > 0)); then
    # blocks of any size consist of pages that are mapped as needed, so that memory freed by other sizes can be used again
    [[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ]] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
elif [[ "$(getconf GNU_LIBC_VERSION 2>/dev/null)" =~ ^glibc\ 2\.(3[6-9]|[4-9][0-9])$ ]]; then # measured with 2.36
    # glibc returns large blocks when they are freed, and the kernel clears every page of the next one: keep them
    # ("keep" of benchmarks/allocators.py; results in benchmarks/NOTES.md)
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-4294967296}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}
    export MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-67108864}
fi

exec "$PYTHON" -m titanlite launch "$@"
