# Environment variables and functions of run.slurm, compile.slurm and prepare.slurm; sourced in the repository root.
# Variables set by the user before sbatch take precedence.

# SIGUSR1 arrives before the time limit, SIGTERM on cancellation or preemption. Both are forwarded to srun as SIGUSR1,
# because srun kills the ranks on SIGTERM.
asked=0 step=''
trap 'asked=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1 TERM

default() { [ -n "${!1+set}" ] || export "$1=$2"; }

# --- Environment ----------------------------------------------------------------------------------------------------
default PYTHON "$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)"
default PYTHONUNBUFFERED 1       # write logs immediately
default PYTHONFAULTHANDLER 1     # print the Python stack after a crash in C++
# MASTER_ADDR and MASTER_PORT   the launcher derives them: the job's first node, and a port from the job's number.
# Secret of the job's processes, which authenticates them at the rendezvous. srun passes it on; it is in no command line.
default MEGATRON_LLAMA_SECRET "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
# GLOO_SOCKET_IFNAME            the launcher selects the interface that reaches the first node.
default NCCL_DEBUG WARN          # errors only; INFO also logs the network
default NCCL_SOCKET_IFNAME "^lo,docker,virbr,cni"   # exclude these; a name (eth0) selects only it
# Elastic Fabric Adapter (AWS), if present. NCCL also needs the aws-ofi-nccl plugin in LD_LIBRARY_PATH.
if readlink /sys/class/infiniband/*/device/driver 2>/dev/null | grep -q '/efa$'; then
    default FI_PROVIDER efa
    default FI_EFA_USE_DEVICE_RDMA 1
    default FI_EFA_FORK_SAFE 1   # ranks start processes (compilers) while memory is registered
fi
# Trainium: rendezvous of the runtimes of all nodes. Not tested on hardware.
if [ -e /dev/neuron0 ]; then
    default NEURON_RT_ROOT_COMM_ID "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):62182"
fi

# --- Step -----------------------------------------------------------------------------------------------------------
# With GPUs one task per GPU. Otherwise one task per node, which starts its ranks: one per Trainium or Gaudi device, or
# tp * pp * dp ranks on CPU. `sbatch --ntasks-per-node=K` overrides this.
tasks_per_node() {
    local devices=(/dev/nvidia[0-9]*)
    if [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then echo "$SLURM_NTASKS_PER_NODE"
    elif [[ " $* " == *" device=cpu "* ]] || [ ! -e /dev/nvidiactl ]; then echo 1
    else echo "${SLURM_GPUS_ON_NODE:-${#devices[@]}}"; fi
}

# examine ARGUMENT...: run scripts/doctor.py --quick on all nodes. Returns 2 for a fatal problem; other failures do not
# stop the job. DOCTOR=0 skips it.
examine() {
    [ "${DOCTOR:-1}" = 0 ] || [ "$asked" = 1 ] && return 0
    timeout 180 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        "$PYTHON" scripts/doctor.py --quick "$@"
}

# run_step PROGRAM ARGUMENT...: run PROGRAM on all nodes and wait for it. Sets
#   status  exit status of srun
#   said    exit status of the first rank, "running", or empty
#   asked   1 after a stop signal, which the ranks also received
#   logs    folder of the ranks' output
run_step() {
    local shown tasks
    tasks=$(tasks_per_node "$@")
    logs=logs/$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}-$(date +%Y%m%d-%H%M%S)
    mkdir -p "$logs"
    export MEGATRON_LLAMA_STATUS=$PWD/$logs/status
    printf '\n== %s: job %s, restart %s, on %s, %s tasks per node\n== logs in %s\n' "$(date '+%F %T')" "$SLURM_JOB_ID" \
        "${SLURM_RESTART_COUNT:-0}" "$SLURM_JOB_NODELIST" "$tasks" "$logs"
    : >"$logs/task_0.txt"
    if [ "$asked" = 1 ]; then    # nothing has started
        trap '' USR1 TERM
        status=143 said=''
        return
    fi
    # A failing task ends all tasks; a hanging task is killed 60 s after the others have ended.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" --ntasks-per-node="$tasks" \
        --cpu-bind=none --kill-on-bad-exit=1 --wait=60 --open-mode=append --output="$logs/task_%t.txt" \
        "$PYTHON" "$@" &
    step=$!
    [ "$asked" = 0 ] || kill -USR1 "$step" 2>/dev/null    # the signal arrived between the two lines above
    tail -n +1 -F --pid="$step" "$logs/task_0.txt" 2>/dev/null &
    shown=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"; status=$?
    while kill -0 "$shown" 2>/dev/null; do wait "$shown"; done
    trap '' USR1 TERM
    said=$(head -n 1 "$MEGATRON_LLAMA_STATUS" 2>/dev/null)
    if [ "$status" != 0 ] && [ "$said" != 75 ] && [ "$said" != 2 ]; then show_failures; fi
}

# Print the last output of failed tasks other than the first task; the first to fail comes last.
show_failures() {
    local file
    # shellcheck disable=SC2046
    for file in $(grep -lE 'Traceback|Fatal|failed|rror' $(ls -t "$logs"/task_*.txt) | grep -v /task_0.txt | tail -n 3)
    do
        printf '\n== the end of %s\n' "$file"
        tail -n 40 "$file"
    done
}
