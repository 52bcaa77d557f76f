# Sourced by run.slurm, compile.slurm and prepare.slurm, in the repository's root: the environment that matters on a cluster, and the
# step that starts the ranks. What you have set yourself (before sbatch, which hands it on) always wins.

# SIGUSR1 comes before the time limit, SIGTERM when the job is cancelled or preempted; each may come at any moment. To
# srun itself SIGTERM would mean: kill the ranks.
asked=0 step=''
trap 'asked=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1 TERM

default() { [ -n "${!1+set}" ] || export "$1=$2"; }

# --- The environment ------------------------------------------------------------------------------------------------
default PYTHON "$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)"
default PYTHONUNBUFFERED 1       # logs grow while the run does
default PYTHONFAULTHANDLER 1     # a crash in C++ leaves the Python stack
# MASTER_ADDR and MASTER_PORT   the launcher derives them: the job's first node, and a port from the job's number.
# What only this job's processes know, so that no other can take a rank's place where they meet. srun hands it on; it is on
# no command line.
default MEGATRON_LLAMA_SECRET "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
# GLOO_SOCKET_IFNAME            the launcher takes, on each node, the interface that leads to the first node.
default NCCL_DEBUG WARN          # what went wrong; INFO also says which network is used
default NCCL_SOCKET_IFNAME "^lo,docker,virbr,cni"   # never these; one name (eth0) takes only that
# Elastic Fabric Adapter (AWS), where there is one. NCCL also needs the aws-ofi-nccl plugin in LD_LIBRARY_PATH.
if readlink /sys/class/infiniband/*/device/driver 2>/dev/null | grep -q '/efa$'; then
    default FI_PROVIDER efa
    default FI_EFA_USE_DEVICE_RDMA 1
    default FI_EFA_FORK_SAFE 1   # ranks start processes (compilers) while memory is registered
fi
# Trainium: where the runtimes of all nodes meet. Not run on hardware.
if [ -e /dev/neuron0 ]; then
    default NEURON_RT_ROOT_COMM_ID "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):62182"
fi

# --- The step -------------------------------------------------------------------------------------------------------
# One task for each GPU; elsewhere one task for each node, which starts the ranks of that node (one for each Trainium or
# Gaudi device, or what tp * pp * dp asks for on a CPU). `sbatch --ntasks-per-node=K` decides it otherwise.
tasks_per_node() {
    local devices=(/dev/nvidia[0-9]*)
    if [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then echo "$SLURM_NTASKS_PER_NODE"
    elif [[ " $* " == *" device=cpu "* ]] || [ ! -e /dev/nvidiactl ]; then echo 1
    else echo "${SLURM_GPUS_ON_NODE:-${#devices[@]}}"; fi
}

# examine ARGUMENT...: the quick part of scripts/doctor.py, on all nodes. Returns 2 where a run is sure to break. Whatever
# else becomes of it is no reason not to start. DOCTOR=0 leaves it out.
examine() {
    [ "${DOCTOR:-1}" = 0 ] || [ "$asked" = 1 ] && return 0
    timeout 180 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        "$PYTHON" scripts/doctor.py --quick "$@"
}

# run_step PROGRAM ARGUMENT...: runs PROGRAM on all nodes and waits for it. Sets
#   status  srun's      said  what the first rank left: its own exit status, or "running", or nothing
#   asked   1 where a signal asked for the end; the ranks have got it too      logs  the folder of what they printed
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
    # A task that ends badly ends all; one that is never heard of again ends 60 s after the others.
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" --ntasks-per-node="$tasks" \
        --cpu-bind=none --kill-on-bad-exit=1 --wait=60 --open-mode=append --output="$logs/task_%t.txt" \
        "$PYTHON" "$@" &
    step=$!
    [ "$asked" = 0 ] || kill -USR1 "$step" 2>/dev/null    # it came between the two lines above
    tail -n +1 -F --pid="$step" "$logs/task_0.txt" 2>/dev/null &
    shown=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"; status=$?
    while kill -0 "$shown" 2>/dev/null; do wait "$shown"; done
    trap '' USR1 TERM
    said=$(head -n 1 "$MEGATRON_LLAMA_STATUS" 2>/dev/null)
    if [ "$status" != 0 ] && [ "$said" != 75 ] && [ "$said" != 2 ]; then show_failures; fi
}

# The end of what tasks other than the first printed about their failure; the first to fail comes last.
show_failures() {
    local file
    # shellcheck disable=SC2046
    for file in $(grep -lE 'Traceback|Fatal|failed|rror' $(ls -t "$logs"/task_*.txt) | grep -v /task_0.txt | tail -n 3)
    do
        printf '\n== the end of %s\n' "$file"
        tail -n 40 "$file"
    done
}
