#!/bin/bash
#SBATCH --nodes=2
# A pretraining script in the style of Megatron-LM's examples.
set -euo pipefail
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

SIZE=${SIZE:-8B}
CHECKPOINTS=${1:?checkpoints}
DATA=${2:-}          # prefix, or empty
GPUS_PER_NODE=8; NODES=2
TP=2 PP=$(( 4 / 2 ))
WORLD=$((GPUS_PER_NODE*NODES))

case "$SIZE" in
  8B|8b) LAYERS=32; HIDDEN=4096; FFN=14336; HEADS=32; GROUPS_KV=8 ;;
  70B) LAYERS=80; HIDDEN=8192; FFN=28672; HEADS=64; GROUPS_KV=8 ;;
  *) echo "unknown $SIZE"; exit 1 ;;
esac

MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size "$HIDDEN"
    --ffn-hidden-size ${FFN}   # SwiGLU
    --num-attention-heads $HEADS
    --group-query-attention --num-query-groups $GROUPS_KV
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5
    --attention-dropout 0.0 --hidden-dropout 0.0
    --untie-embeddings-and-output-weights --disable-bias-linear
    --no-masked-softmax-fusion --attention-backend auto
)
TRAINING_ARGS="
    --micro-batch-size 1 --global-batch-size 128
    --train-iters 20000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --lr-decay-iters 18000 --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce"
if [[ $PP -gt 1 && "$SIZE" != "70B" ]]; then
    TRAINING_ARGS+=" --num-layers-per-virtual-pipeline-stage 4"
elif [ -z "$DATA" ]; then
    TRAINING_ARGS+=" --never"
else
    TRAINING_ARGS+=" --never"
fi
DATA_ARGS=()
if [ -n "$DATA" ]; then
    DATA_ARGS+=(--data-path 0.3 "$DATA/a_text_document" 0.7 "$DATA/b_text_document")
else
    DATA_ARGS+=("--mock-data")
fi
DATA_ARGS+=("--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model meta-llama/Meta-Llama-3-8B" "--split '99,1,0'")
[[ -n "${WANDB_PROJECT_NAME:-}" ]] && DATA_ARGS+=(--wandb-project "$WANDB_PROJECT_NAME")

launch() {
    torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES \
        --rdzv_endpoint "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500" \
        pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAINING_ARGS ${DATA_ARGS[@]} "$@" \
        --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
        --eval-interval 1000 --eval-iters 32 --save-interval 500 --log-interval 1 \
        --save "$CHECKPOINTS" --load "$CHECKPOINTS" --seed $RUN_SEED \
        --my-own-flag 3 --tensorboard-dir "$CHECKPOINTS/tb" 2>&1 | tee log.txt
}
for attempt in 1 2 3; do echo $attempt; done
launch
