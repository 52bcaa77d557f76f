"""``build_model`` builds a rank's model by the steps of plan/build_steps.py (assembly.py), then allocates weights.

Modules are built on the meta device. Weights are last, when each rank's rectangles are determined: no rank ever holds
a whole model.

``ParallelModel`` runs forward and backward passes. ``mcore_config`` returns megatron-core's settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_llama import devices
from megatron_llama.arch.hf_tp_mapping import EMBEDDING, MAGNITUDE, TOKEN_ROWS, is_lora, lora_name
from megatron_llama.arch.lora_targets import layer_adapters, module_name
from megatron_llama.arch.parameters import matrices
from megatron_llama.devices import Device
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.model.init import initial_values, torch_dtype
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.llama import Llama
from megatron_llama.model.preference import SCALE
from megatron_llama.parallel.assembly import Build, block_parts, finish_chunk, layer_parts
from megatron_llama.parallel.compiling import Compiler, use_compile_folder
from megatron_llama.parallel.context_division import Division
from megatron_llama.parallel.data_parallel import allocate, data_groups
from megatron_llama.parallel.dp1_weight_casts import ComputeCopies, filled_copies
from megatron_llama.parallel.exact import ExactSums
from megatron_llama.parallel.groups import Groups, current_groups, group_timeout
from megatron_llama.parallel.pipeline import TokenTotals, run_answer_logps, run_logits, run_schedule
from megatron_llama.parallel.replicated_gradients import ReplicatedGradients
from megatron_llama.parallel.shards import Shard, shards_of
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


@dataclass
class ParallelModel:
    """This rank's chunks of the model and its shard of each parameter."""

    plan: Plan
    chunks: list[Llama]
    shards: list[Shard]
    device: torch.device
    groups: Groups = field(repr=False)
    replicated: ReplicatedGradients | ExactSums = field(repr=False)
    compute_copies: list[ComputeCopies | None] = field(repr=False)
    """Compute-dtype copies of each chunk's weights, if this rank casts them itself."""
    compiler: Compiler | None = None
    """Compiles the blocks and records their graphs; None without compilation."""

    @property
    def trained(self) -> list[Shard]:
        """Shards with gradients and updates: all of them, except with LoRA."""
        return [shard for shard in self.shards if shard.is_trained]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], counts: TokenTotals | None = None, *, train: bool = True
    ) -> torch.Tensor:
        """Run forward, with ``train`` also backward, over the global batch.

        Args:
            microbatches: this rank's part of the global batch.
            counts: the global batch's counts, if the caller has them. Default: ``count(microbatches)``.

        Returns:
            Mean loss per token with loss, fp32 scalar, the same on all ranks. With pairs of answers, the mean loss per
            pair: with ``train`` followed by ``finetune.metrics``, fp32 [1 + metrics], otherwise a scalar.
        """
        return self._pass(microbatches, counts, train=True) if train else self.evaluate(microbatches, counts)[0]

    def evaluate(self, microbatches: Sequence[MicroBatch], counts: TokenTotals | None = None) -> torch.Tensor:
        """Run forward over the global batch.

        Returns:
            fp32 [2]: mean loss per token with loss, and the share of these tokens whose label has the largest logit.
            With pairs, as ``forward_backward``.
        """
        return self._pass(microbatches, counts, train=False)

    def _pass(self, microbatches: Sequence[MicroBatch], counts: TokenTotals | None, *, train: bool) -> torch.Tensor:
        total = (counts or self.count(microbatches)).with_loss.clamp(min=1)
        if microbatches[0].mismatched is not None:
            microbatches = self._with_divergence(microbatches, total)
        with self._batch(microbatches, train=train):
            with filled_copies(self.compute_copies):
                means = run_schedule(self.chunks, self.plan, microbatches, total, train, self.compute_copies)
            if train:
                self.replicated.reduce(self.shards)
            return self.replicated.total_loss(means)

    @contextmanager
    def _batch(self, microbatches: Sequence[MicroBatch], *, train: bool) -> Iterator[None]:
        """Announce the batch's shapes to the compiler, and its end."""
        if self.compiler is None:
            yield
            return
        subsets = microbatches[0].subsets if train else None
        ltd_length = None if subsets is None else subsets.length
        length = microbatches[0].tokens.shape[1] * self.plan.grid.divisor("tokens")
        self.compiler.begin_batch(length, ltd_length, train=train)
        yield
        self.compiler.end_batch()

    def answer_logps(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return ``PreferenceLoss.answer_logps`` of each micro batch, [b, answers]; [] except on the last stage."""
        with self._batch(microbatches, train=False), filled_copies(self.compute_copies):
            return run_answer_logps(self.chunks, self.plan, microbatches)

    def _with_divergence(self, microbatches: Sequence[MicroBatch], total: torch.Tensor) -> list[MicroBatch]:
        """Return the micro batches with ``Pairs.kl``, estimated from ``total`` mismatched answers. A collective.

        KTO's examples have one mismatched answer each, so ``total`` is also their number.
        """
        batches = [batch.mismatched for batch in microbatches if batch.mismatched is not None]
        change = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch, logps in zip(batches, self.answer_logps(batches), strict=False):
            assert batch.pairs is not None and batch.pairs.reference is not None
            change += ((logps - batch.pairs.reference) * (batch.pairs.numbers >= 0)).sum()
        dist.all_reduce(change)
        change //= self.plan.grid.product("tp", "cp")  # equal on these ranks, 0 before the last stage
        kl = (change.float() / SCALE / total).clamp(min=0)
        return [replace(batch, pairs=batch.pairs and replace(batch.pairs, kl=kl)) for batch in microbatches]

    def logits(
        self, tokens: torch.Tensor, documents: Documents | None = None, token_index: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return logits [s, b, vocabulary/t] of token ids [b, s] on the last pipeline stage, None on the others.

        With ``token_index`` [b], int64, return the logits of one token per row, [1, b, vocabulary/t]. Context-parallel
        ranks then divide the sequences; otherwise each of them computes whole sequences.
        """
        stance = nullcontext() if self.compiler is None else torch.compiler.set_stance("force_eager")
        with stance, filled_copies(self.compute_copies):  # eager: each prompt length would need another graph
            if token_index is None or documents is not None or self.plan.config.trainer.cp == 1:
                return run_logits(self.chunks, self.plan, tokens, documents, token_index)
            division = Division(self.plan.topology(dist.get_rank()), self.groups["cp"])
            index, is_here = division.local_index(token_index, tokens.shape[1])
            logits = run_logits(self.chunks, self.plan, division.local(tokens), None, index, is_divided=True)
            return None if logits is None else division.select(logits, is_here)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for shard in self.shards:
            shard.parameter.grad = None

    def count(self, microbatches: Sequence[MicroBatch]) -> TokenTotals:
        """Count the tokens of the global batch. One collective, without a device-to-host sync."""
        with_loss = torch.stack([batch.loss_count for batch in microbatches]).sum().long()
        sizes = torch.stack([batch.token_counts for batch in microbatches]).sum(dim=0)
        counts = torch.cat((with_loss[None], sizes))
        dist.all_reduce(counts)
        # All tensor- and pipeline-parallel ranks of a data-parallel rank have the same micro batches. Context-parallel
        # ranks have parts of loss_mask, and the first has all token_counts.
        return TokenTotals(*(counts // self.plan.grid.product(*self.plan.grid.same_tokens)).unbind())


def mcore_config(plan: Plan) -> TransformerConfig:
    """Return the settings of megatron-core's layers and schedules.

    ``params_dtype`` is the dtype of the master weights. ``fully_shard`` or the rank itself casts them for the layers
    (parallel/dp1_weight_casts.py).
    """
    model, trainer = plan.model, plan.config.trainer
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.head_dim,
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        context_parallel_size=trainer.cp,
        virtual_pipeline_model_parallel_size=trainer.vpp if trainer.vpp > 1 else None,
        sequence_parallel=plan.sp,
        params_dtype=torch_dtype(plan.precision.param_dtype),
        pipeline_dtype=torch_dtype(plan.precision.compute_dtype),
        use_cpu_initialization=True,  # plain torch.empty, so that weights are on the meta device
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        deterministic_mode=trainer.deterministic,
        # Otherwise the schedules divide the loss by local tokens and micro batches. parallel/pipeline.py has divided it
        # by the tokens of the global batch.
        calculate_per_token_loss=True,
        # Over gloo, batched transfers in the interleaved schedule swap activations and gradients
        # (docs/design/parity.md).
        batch_p2p_comm=trainer.vpp == 1,
        overlap_p2p_comm=trainer.vpp > 1,
        # The stream waits for each transfer. Otherwise the host would also wait for the device after each one, for a
        # fault of torch before 2.2 (https://github.com/pytorch/pytorch/pull/82450).
        batch_p2p_sync=False,
    )


def build_model(
    plan: Plan, topology: Topology, device: Device, torch_device: torch.device, compiler: Compiler | None = None
) -> ParallelModel:
    """Build this rank's part of the model with initial weights. ``compiler`` replaces the default of the plan."""
    trainer = plan.config.trainer
    if compiler is None and trainer.compile:
        compiler = Compiler(plan, device)
    if trainer.float8 is not None:
        device.require_float8()
    mcore, groups = mcore_config(plan), current_groups()
    with group_timeout(trainer):
        data_parallel = data_groups(topology, torch_device.type, plan, groups)
        replicated = ReplicatedGradients(plan, topology, groups)
    exact = ExactSums(plan, topology, groups, data_parallel, replicated) if trainer.exact else None
    if compiler is None and device.compiles_code(plan.config):
        use_compile_folder(plan, device)
    kernels = device.kernels(compiled=compiler is not None)
    build = Build(plan, topology, kernels, groups, data_parallel, exact, compiler)
    parts = block_parts(build)
    chunks, shards, compute_copies = list[Llama](), list[Shard](), list[ComputeCopies | None]()
    for stage in topology.virtual_stages():
        with torch.device("meta"):
            chunk = Llama(
                plan.model,
                mcore,
                plan.stage_layers[stage],
                padded_vocab_size=plan.padded_vocab_size,
                parts=parts,
                layer_parts=layer_parts(build),
                is_first=stage == 0,
                is_last=stage == len(plan.stage_layers) - 1,
            )
        finish_chunk(build, chunk)
        copies = allocate(chunk, torch_device, plan)
        shards += shards_of(chunk, plan, topology, copies)
        chunks.append(chunk)
        compute_copies.append(copies)
    if plan.config.finetune.lora_dropout:
        # Dropout masks differ between ranks. Only tensor-parallel ranks without sequence parallelism have the same
        # activations and need the same masks.
        others = [name for name in topology.sizes if name != "tp"]
        place = topology.rank if plan.sp else topology.grid.index(topology.rank, *others)
        torch.manual_seed(trainer.seed + place)
    init_weights(shards, plan)
    return ParallelModel(plan, chunks, shards, torch_device, groups, exact or replicated, compute_copies, compiler)


@torch.no_grad()
def init_weights(shards: list[Shard], plan: Plan) -> None:
    """Fill weights with values that depend only on seed, name and position, and vocabulary padding with zeros.

    bf16 weights are rounded to nearest. With ``init_from`` only LoRA's weights are filled, because the other weights
    are loaded before the first step.
    """
    for shard in shards:
        shard.local.zero_()
        if plan.config.init_from is not None and not is_lora(shard.name):
            continue
        values = shard.values
        for rectangle in shard.rectangles:
            initial = initial_values(rectangle, plan.model, plan.config.trainer.seed)
            values[rectangle.local_slices].copy_(devices.pinned(initial, values.device), non_blocking=True)
        shard.store(values)


@torch.no_grad()
def init_magnitudes(model: ParallelModel) -> None:
    """Set DoRA's magnitudes to the row norms of the frozen matrices, as PEFT at its start.

    A collective over the ranks of a pipeline stage, which together hold whole rows. Without DoRA it does nothing.
    """
    if not model.plan.config.finetune.use_dora:
        return
    # By all names of the stage, not by this rank's: it may hold rows of a matrix and other rows of its magnitudes.
    squares = {name: torch.zeros(rows, device=model.device) for name, rows in _target_rows(model).items()}
    for shard in model.shards:
        for part in shard.rectangles:
            total = squares.get(lora_name(part.name, MAGNITUDE))
            if total is not None and len(part.size) == 2 and shard.is_primary_replica and part.replica == 0:
                rows = slice(part.offset[0], part.offset[0] + part.size[0])
                total[rows] += shard.values[part.local_slices].float().square().sum(dim=1)
    names = sorted(squares)
    if not names:  # no layer of the stage has adapters
        return
    flat = torch.cat([squares[name] for name in names])
    dist.all_reduce(flat, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    norms = dict(zip(names, flat.sqrt().split([len(squares[name]) for name in names]), strict=True))
    for shard in model.shards:
        for part in shard.rectangles if shard.name.endswith(f".{MAGNITUDE}") else ():
            first, last = part.offset[0], part.offset[0] + part.size[0]
            shard.local[part.local_slices] = norms[part.name][first:last].to(shard.local.dtype)


@torch.no_grad()
def init_token_rows(model: ParallelModel) -> None:
    """Set ``TokenRows`` to the frozen embedding's rows, as PEFT at its start. A collective as ``init_magnitudes``."""
    tokens = model.plan.config.finetune.trainable_token_indices
    if all(chunk.embed_rows is None and chunk.head_rows is None for chunk in model.chunks):
        return
    rows = torch.zeros(len(tokens), model.plan.model.hidden_size, device=model.device)
    for shard in model.shards if model.shards[0].is_primary_replica else ():
        for part in shard.rectangles:
            here = [n for n, token in enumerate(tokens) if 0 <= token - part.offset[0] < part.size[0]]
            if part.name == EMBEDDING and here:
                rows[here] += shard.values[part.local_slices][[tokens[n] - part.offset[0] for n in here]]
    dist.all_reduce(rows, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
    for shard in model.shards:
        for part in shard.rectangles:
            if part.name == TOKEN_ROWS:
                shard.local[part.local_slices] = rows[part.offset[0] :][: part.size[0]].to(shard.local.dtype)


def _target_rows(model: ParallelModel) -> dict[str, int]:
    """Return the rows of each adapted matrix of this rank's stage, by the name of its magnitudes."""
    plan = model.plan
    return {
        lora_name(f"{module_name(layer, module)}.weight", MAGNITUDE): matrices(plan.model)[module].shape[0]
        for layer in (int(number) for chunk in model.chunks for number in chunk.layers)
        for module in layer_adapters(plan.model, plan.config.finetune, layer)
    }
