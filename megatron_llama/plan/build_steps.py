"""The steps that build a rank's model, in order. parallel/assembly.py executes them; plan.txt lists them."""

from __future__ import annotations

from megatron_llama.devices import find_device
from megatron_llama.plan.plan import COPIES, SHARDS, Plan
from megatron_llama.system.tables import plural


def recomputation(plan: Plan) -> str:
    """Describe trainer.recompute, such as "recompute full in 1 of 2 blocks"."""
    trainer = plan.config.trainer
    often = f" in 1 of {trainer.recompute_every} blocks" if trainer.recompute_every > 1 else ""
    return f"recompute {trainer.recompute}{often}"


def build_steps(plan: Plan) -> dict[str, str]:
    """Return the text of each step, such as "tp 2 with sp", by name, in order. Empty if the plan does not take it."""
    trainer, finetune, device = plan.config.trainer, plan.config.finetune, find_device(plan.config.device.name)
    fuses = device is not None and device.fuses_eager_blocks and not (trainer.compile or trainer.exact)
    lora = "DoRA" if finetune.use_dora else "LoRA"
    rows = len(finetune.trainable_token_indices)
    kinds = {COPIES: f"{plan.precision.compute_format} copies of weights", SHARDS: f"zero {trainer.zero}"}
    return {
        # The layout, which determines the shapes of a rank's matrices, then the parts of blocks.
        "tp": f"tp {trainer.tp}{' with sp' * plan.sp}" if trainer.tp > 1 else "",
        "pp": f"pp {trainer.pp}{f' x {trainer.vpp}' * (trainer.vpp > 1)}" if trainer.pp > 1 else "",
        "cp": f"cp {trainer.cp} by {trainer.cp_comm}" if trainer.cp > 1 else "",
        "exact": "exact" if trainer.exact else "",
        "preference": {"sft": "", "dpo": f"dpo {finetune.loss_type}"}.get(finetune.objective, finetune.objective),
        "token rows": f"rows of {rows} {plural(rows, 'token')}" if rows else "",
        "NEFTune": "" if finetune.neftune_noise_alpha is None else f"NEFTune {finetune.neftune_noise_alpha:g}",
        "QK-Clip": "" if plan.config.optim.qk_clip is None else "QK-Clip",
        "fused operators": "fused operators" if fuses else "",
        "quantized": f"{plan.quantized} matrices" if plan.quantized else "",
        "float8": f"float8 {trainer.float8}" if trainer.float8 else "",
        "LoRA": f"{lora} {finetune.lora_rank}" if finetune.method == "lora" else "",
        # Wrappers, the innermost first. The compiled forward includes recomputation. Random-LTD and offload wrap the
        # compiled forward, and offload also moves the indices that random-LTD saves.
        "MLP chunks": f"MLP in {trainer.mlp_chunks} chunks" if trainer.mlp_chunks > 1 else "",
        "recompute": "" if trainer.recompute == "none" else recomputation(plan),
        "compile": f"compile{' with async_tp' * bool(trainer.async_tp)}" if trainer.compile else "",
        "random-LTD": "" if plan.random_ltd is None else "random-LTD",
        "offload": "offload activations" if "activations" in trainer.offload else "",
        # Built chunks. The hooks of ``fully_shard`` cannot be compiled, so they are outside of all wrappers.
        "data parallel": kinds.get(plan.storage.kind, ""),
    }


def applied_steps(plan: Plan) -> dict[str, str]:
    """Return the texts of the steps that the plan takes, by name, in order."""
    return {name: text for name, text in build_steps(plan).items() if text}
