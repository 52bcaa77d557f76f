# Sourced by run.slurm, compile.slurm and prepare.slurm in the repository root: environment variables for a cluster, and
# the srun step. Variables that are set before sbatch are kept.

# SIGUSR1 comes before the time limit, SIGTERM on cancellation and preemption. srun kills the ranks on SIGTERM, so both
# are forwarded as SIGUSR1.
stop_requested=0 step=''
trap 'stop_requested=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1 TERM

default() { [ -n "${!1+set}" ] || export "$1=$2"; }

# srun takes over `sbatch --export=NONE`, but the ranks need the variables below.
export SLURM_EXPORT_ENV=ALL

# --- The environment ------------------------------------------------------------------------------------------------
default PYTHON "$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)"
command -v "$PYTHON" >/dev/null || {    # srun's status would be 2, and the job would be requeued
    echo "PYTHON=$PYTHON is not a program on $(hostname). Run \`make venv\` in $PWD, or set PYTHON before sbatch" >&2
    exit 2
}
case ${MAX_RESTARTS:-0} in *[!0-9]*)
    echo "MAX_RESTARTS=$MAX_RESTARTS must be a whole number" >&2
    exit 2 ;;
esac
default PYTHONUNBUFFERED 1       # write logs at once
default PYTHONFAULTHANDLER 1     # print the Python stack after a crash in C++
# MASTER_ADDR and MASTER_PORT   derived by the launcher: the first node, and a port from the job id.
# Secret of the job's processes, which authenticates them at the rendezvous. Never on a command line.
default MEGATRON_LLAMA_SECRET "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
# GLOO_SOCKET_IFNAME            derived by the launcher: the interface with a route to the first node.
default NCCL_DEBUG WARN          # errors; INFO also logs the network
default NCCL_SOCKET_IFNAME "^lo,docker,virbr,cni"   # exclude these; a name such as eth0 uses only that
# Elastic Fabric Adapter (AWS), if present. NCCL also needs the aws-ofi-nccl plugin in LD_LIBRARY_PATH.
if readlink /sys/class/infiniband/*/device/driver 2>/dev/null | grep -q '/efa$'; then
    default FI_PROVIDER efa
    default FI_EFA_USE_DEVICE_RDMA 1
    default FI_EFA_FORK_SAFE 1   # ranks fork processes (compilers) while memory is registered
fi
# Trainium: rendezvous of the runtimes of all nodes. Not tested on hardware.
if [ -e /dev/neuron0 ]; then
    default NEURON_RT_ROOT_COMM_ID "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):62182"
fi

# --- The step -------------------------------------------------------------------------------------------------------
# One task per GPU. Without GPUs one task per node, which starts the ranks of the node: one per Trainium or Gaudi
# device, or tp * pp * dp ranks on CPUs. `sbatch --ntasks-per-node=K` overrides this.
tasks_per_node() {
    local devices=(/dev/nvidia[0-9]*)
    if [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then echo "$SLURM_NTASKS_PER_NODE"
    elif [[ " $* " == *" device=cpu "* ]] || [ ! -e /dev/nvidiactl ]; then echo 1
    else echo "${SLURM_GPUS_ON_NODE:-${#devices[@]}}"; fi
}

# check_nodes ARGUMENT...: run scripts/doctor.py --quick on all nodes. Returns 2 for a fatal problem; other results are
# ignored. DOCTOR=0 skips it.
check_nodes() {
    [ "${DOCTOR:-1}" = 0 ] || [ "$stop_requested" = 1 ] && return 0
    timeout 180 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        "$PYTHON" "${root:-}scripts/doctor.py" --quick "$@"
}

# run_step PROGRAM ARGUMENT...: run PROGRAM on all nodes and wait. Sets
#   status          exit status of srun
#   run_status      exit status of rank 0, or "running", or empty
#   stop_requested  1 after a stop signal, which is forwarded to the ranks
#   logs            folder of the tasks' output
run_step() {
    local shown tasks
    tasks=$(tasks_per_node "$@")
    logs=logs/$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}-$(date +%Y%m%d-%H%M%S)
    mkdir -p "$logs" || { echo "== cannot write to $PWD/logs: the end, with status 2"; exit 2; }
    export MEGATRON_LLAMA_STATUS=$PWD/$logs/status
    printf '\n== %s: job %s, restart %s, on %s, %s tasks per node\n== logs in %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" \
        "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" "$tasks" "$logs"
    : >"$logs/task_0.txt"
    if [ "$stop_requested" = 1 ]; then    # before the start
        trap '' USR1 TERM
        status=143 run_status=''
        return
    fi
    # A failed task ends all tasks; a lost task ends 60 s after the others.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" --ntasks-per-node="$tasks" \
        --cpu-bind=none --kill-on-bad-exit=1 --wait=60 --open-mode=append --output="$logs/task_%t.txt" \
        "$PYTHON" "$@" &
    step=$!
    [ "$stop_requested" = 0 ] || kill -USR1 "$step" 2>/dev/null    # the signal came between the two lines above
    tail -n +1 -F --pid="$step" "$logs/task_0.txt" 2>/dev/null &
    shown=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"; status=$?
    while kill -0 "$shown" 2>/dev/null; do wait "$shown"; done
    trap '' USR1 TERM
    run_status=$(head -n 1 "$MEGATRON_LLAMA_STATUS" 2>/dev/null)
    if [ "$status" != 0 ] && [ "$run_status" != 75 ] && [ "$run_status" != 2 ]; then show_failures; fi
}

# Print the last lines of failed tasks except task 0; the first failure comes last.
show_failures() {
    local file failure="Traceback|Fatal|failed|rror|can't work"
    # shellcheck disable=SC2046
    for file in $(grep -lE "$failure" $(ls -t "$logs"/task_*.txt) | grep -v /task_0.txt | tail -n 3)
    do
        printf '\n== last lines of %s\n' "$file"
        tail -n 40 "$file"
    done
}
