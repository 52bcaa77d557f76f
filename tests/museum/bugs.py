"""Published silent bugs of parallel training: the threads, a mutation with the bug, and a test that fails under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import megatron_llama.model.loss as loss
import megatron_llama.model.norm as norms
import megatron_llama.optim.norm as norm
import megatron_llama.optim.optimizer as optimizer
import megatron_llama.parallel.parallelize as parallelize
import tests.oracle
from megatron_llama.arch.names import Rectangle
from megatron_llama.checkpoint.manifest import State
from megatron_llama.data.batches import Batches
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.model.inputs import InputBuilder, MicroBatch
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel, replicated_gradients
from megatron_llama.parallel.dp1_weight_casts import ComputeCopies
from megatron_llama.parallel.pipeline import TokenTotals, run_schedule
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import RunPosition
from megatron_llama.system.tables import markdown_table
from tests.layouts import tampers
from tests.paths import ROOT

Mutation = Callable[[pytest.MonkeyPatch], None]
Tamper = Callable[[ParallelModel], None]
PAGE = ROOT / "docs/design/silent_bugs.md"
GITHUB = "https://github.com/"
LAYOUT = "tests/layouts/test_layouts.py::test_layout_equals_one_process"
RESUME = "tests/checkpoint/test_resume.py::test_losses_after_a_resume_are_the_uninterrupted_runs"
DOCUMENTS = "tests/data/test_batches.py::test_loss_and_gradients_are_those_of_each_document_alone"
DIFFERS = "AssertionError: .*(differ|'losses': |ranks disagree|depends on the layout)"
"""Output of a layout test that fails."""

ASSERTS = "(?m)^E +(assert |AssertionError|.*RankFailed)"


@dataclass(frozen=True)
class Bug:
    """A published bug and this project's test for it."""

    name: str
    """The wrong behavior, one line."""
    threads: tuple[str, ...]
    """Issues and pull requests that describe it, as owner/name#number."""
    mutation: Mutation
    test: str
    """Node id of the test that fails under the mutation."""

    @property
    def symptom(self) -> str:
        """Regular expression that the output of the failing test contains."""
        return DIFFERS if self.test.startswith(LAYOUT) else ASSERTS

    @property
    def links(self) -> str:
        """Markdown links of the threads."""
        texts = []
        for thread in self.threads:
            repository, _, number = thread.partition("#")
            texts.append(f"[{repository.partition('/')[2]} {number}]({GITHUB}{repository}/issues/{number})")
        return ", ".join(texts)

    @property
    def function(self) -> str:
        """Name of the mutation, which is the id of the entry."""
        return self.mutation.__name__


BUGS: list[Bug] = []


def bug(name: str, *threads: str, test: str) -> Callable[[Mutation], Mutation]:
    """Enter a mutation with a published bug; the arguments are the fields of ``Bug``."""

    def enter(mutation: Mutation) -> Mutation:
        BUGS.append(Bug(name, threads, mutation, test))
        return mutation

    return enter


def tampered(tamper: Tamper) -> Mutation:
    """Return a mutation that changes each model of several ranks after it is built (tests/layouts/tampers.py)."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        build = tests.oracle.build_model

        def build_and_tamper(plan: Plan, *arguments: Any) -> ParallelModel:
            model = build(plan, *arguments)
            if plan.world_size > 1:
                tamper(model)
            return model

        patch.setattr(tests.oracle, "build_model", build_and_tamper)

    mutate.__name__ = tamper.__name__

    return mutate


@bug(
    "Norm weights of q and k have a part of the gradient on each tp rank, which is summed with sp only",
    "NVIDIA/Megatron-LM#7452",
    test=f"{LAYOUT}[tp2, qwen3]",
)
def norms_summed_under_sp_only(patch: pytest.MonkeyPatch) -> None:
    is_summed = replicated_gradients.is_summed_over_tp
    patch.setattr(
        replicated_gradients, "is_summed_over_tp", lambda name, *, sp, **more: sp and is_summed(name, sp=sp, **more)
    )


bug(
    "Gradients of norms are not summed over tp ranks with sp",
    "NVIDIA-NeMo/RL#3716",
    "NVIDIA/Megatron-LM#1446",
    "NVIDIA/TransformerEngine#435",
    test=f"{LAYOUT}[tp2+sp]",
)(tampered(tampers.no_sequence_parallel_sum))


@bug(
    "The loss of gathered logits counts the vocabulary once per tp rank: log(tp) too high",
    "NVIDIA/Megatron-LM#7452",
    test=f"{LAYOUT}[tp2]",
)
def exponentials_of_gathered_logits(patch: pytest.MonkeyPatch) -> None:
    softmax = loss._losses_and_gradients

    def counted(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, spec: loss.LossSpec) -> Any:
        ranks = 1 if spec.group is None else torch.distributed.get_world_size(spec.group)

        def statistics(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            largest, total = spec.softmax.statistics(values)
            return largest, ranks * total

        return softmax(logits, labels, weights, replace(spec, softmax=spec.softmax._replace(statistics=statistics)))

    patch.setattr(loss, "_losses_and_gradients", counted)


bug(
    "A dp rank normalizes the loss by its own token count",
    "NVIDIA/Megatron-LM#7452",
    "NVIDIA/Megatron-LM#4590",
    test=f"{LAYOUT}[dp2, zero 1]",
)(tampered(tampers.local_token_count))
bug(
    "Rows that pad a vocabulary, which tp does not divide, are in the loss",
    "NVIDIA/Megatron-LM#1754",
    test=f"{LAYOUT}[tp2+sp, odd vocabulary]",
)(tampered(tampers.padding_in_the_loss))
bug(
    "The gradient of a context-parallel run is divided by the number of ranks",
    "NVIDIA/Megatron-LM#673",
    test=f"{LAYOUT}[cp2]",
)(tampered(tampers.mean_over_data_parallel_ranks))
bug(
    "The gradients of replicated shards are averaged, so that their norm is off by the number of ranks",
    "pytorch/torchtitan#2318",
    "meta-pytorch/torchtune#2172",
    test=f"{LAYOUT}[dp2, zero 0]",
)(tampered(tampers.mean_over_data_parallel_ranks))


@bug(
    "A pipeline's gradients are not divided by the tokens; the reported loss is",
    "pytorch/torchtitan#2972",
    test=f"{LAYOUT}[pp2]",
)
def loss_not_divided_in_pipelines(patch: pytest.MonkeyPatch) -> None:
    def schedule(chunks: Any, plan: Plan, batches: Any, total: torch.Tensor, *more: Any) -> torch.Tensor:
        if plan.config.trainer.pp == 1:
            return run_schedule(chunks, plan, batches, total, *more)
        return run_schedule(chunks, plan, batches, torch.ones_like(total), *more) / total

    patch.setattr(parallelize, "run_schedule", schedule)


@bug(
    "Gradient accumulation averages the means of micro batches",
    "huggingface/transformers#34191",
    "hiyouga/LlamaFactory#7443",
    test=f"{LAYOUT}[micro batches of 8]",
)
def mean_of_microbatch_means(patch: pytest.MonkeyPatch) -> None:
    def schedule(chunks: Any, plan: Plan, batches: Sequence[MicroBatch], total: torch.Tensor, *more: Any) -> Any:
        parts = len(batches) * plan.dp
        means = [
            replace(batch, loss_mask=batch.loss_mask / batch.loss_mask.sum().clamp(min=1) * total / parts)
            for batch in batches
        ]
        return run_schedule(chunks, plan, means, total, *more)

    patch.setattr(parallelize, "run_schedule", schedule)


@bug(
    "The loss counts a token once per tp rank",
    "huggingface/transformers#45994",
    "huggingface/transformers#39674",
    test=f"{LAYOUT}[tp2]",
)
def tokens_counted_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    count = ParallelModel.count

    def counted(model: ParallelModel, batches: Sequence[MicroBatch]) -> TokenTotals:
        counts = count(model, batches)
        return counts._replace(with_loss=counts.with_loss * model.plan.config.trainer.tp)

    patch.setattr(ParallelModel, "count", counted)


@bug(
    "Context parallelism divides the token count of parts of a sequence by the number of ranks",
    "huggingface/transformers#46775",
    test=f"{LAYOUT}[cp2]",
)
def tokens_divided_by_context_parallel_ranks(patch: pytest.MonkeyPatch) -> None:
    count = ParallelModel.count

    def counted(model: ParallelModel, batches: Sequence[MicroBatch]) -> TokenTotals:
        counts = count(model, batches)
        return counts._replace(with_loss=counts.with_loss // model.plan.config.trainer.cp)

    patch.setattr(ParallelModel, "count", counted)


@bug(
    "The backward pass of norms gives their weights no gradient",
    "paiml/entrenar#257",
    test="tests/layouts/test_layouts.py::test_every_weight_moves",
)
def norms_without_gradient(patch: pytest.MonkeyPatch) -> None:
    gradients = norms.norm_gradients

    def of_the_input(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grad_input, grad_weight = gradients(*arguments)
        assert grad_weight is not None
        return grad_input, torch.zeros_like(grad_weight)

    patch.setattr(norms, "norm_gradients", of_the_input)


@bug(
    "Attention ignores the boundaries of packed documents", "AI-Hypercomputer/maxtext#4476", test=f"{DOCUMENTS}[plain]"
)
def documents_ignored(patch: pytest.MonkeyPatch) -> None:
    whole = InputBuilder.__call__

    def build(self: InputBuilder, tokens: torch.Tensor, documents: Any = None, subsets: Any = None) -> Any:
        inputs = whole(self, tokens, documents, subsets)
        return inputs if documents is None else replace(inputs, visible=whole(self, tokens).visible)

    patch.setattr(InputBuilder, "__call__", build)


@bug(
    "Documents of packed sequences begin one token late, because the end token is a label only",
    "pytorch/torchtitan#3130",
    test=f"{DOCUMENTS}[plain]",
)
def documents_begin_one_token_late(patch: pytest.MonkeyPatch) -> None:
    build = Documents.of.__func__  # type: ignore[attr-defined]

    def shifted(kind: type[Documents], ids: torch.Tensor) -> Documents:
        documents: Documents = build(kind, torch.cat((ids[:, :1], ids[:, :-1]), dim=1))
        return documents

    patch.setattr(Documents, "of", classmethod(shifted))


@bug(
    "Positions continue after the end of a document",
    "swiss-ai/Megatron-LM#40",
    "alibaba/Pai-Megatron-Patch#406",
    test="tests/devices/test_attention_inputs.py::test_positions_and_borders_by_hand",
)
def positions_continue_after_the_end_of_a_document(patch: pytest.MonkeyPatch) -> None:
    def positions(self: Documents) -> torch.Tensor:
        length = self.ids.shape[1]
        return torch.arange(length, device=self.ids.device).expand(len(self.ids), length)

    patch.setattr(Documents, "positions", positions)


bug(
    "Context parallelism loses the boundaries of packed documents",
    "hiyouga/LlamaFactory#10787",
    test=f"{LAYOUT}[cp2, documents]",
)(tampered(tampers.documents_joined_at_a_chunk_boundary))
bug(
    "Context parallelism: gradients of keys and values are not summed over ranks",
    "NVIDIA/Megatron-LM#1464",
    test=f"{LAYOUT}[cp2]",
)(tampered(tampers.key_gradients_of_each_rank_alone))


@bug(
    "Shards of a matrix have the same initial values on each tp rank", "modelscope/ms-swift#7944", test=f"{LAYOUT}[tp2]"
)
def same_values_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    values = parallelize.initial_values

    def of_the_first_rank(rectangle: Rectangle, *more: Any) -> torch.Tensor:
        return values(replace(rectangle, offset=(0,) * len(rectangle.offset)), *more)

    patch.setattr(parallelize, "initial_values", of_the_first_rank)


@bug(
    "Dropout masks differ between tp ranks that share activations",
    "NVIDIA/Megatron-LM#206",
    test="tests/finetuning/test_lora.py::test_ranks_with_the_same_activations_share_dropout_masks[false-seeds0]",
)
def other_masks_on_each_tensor_parallel_rank(patch: pytest.MonkeyPatch) -> None:
    seed = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda number: seed(number + 100 * torch.distributed.get_rank()))


@bug(
    "Dropout masks are equal on ranks with different tokens",
    "NVIDIA/Megatron-LM#1256",
    "tenstorrent/tt-metal#55947",
    test="tests/finetuning/test_lora.py::test_ranks_with_the_same_activations_share_dropout_masks[true-seeds1]",
)
def same_masks_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    seed = torch.manual_seed
    patch.setattr(torch, "manual_seed", lambda number: seed(0))


@bug(
    "The learning rate advances once per micro batch",
    "huggingface/accelerate#963",
    "starVLA/starVLA#210",
    test="tests/optim/test_optimizer.py::test_one_process_equals_torch",
)
def scheduler_stepped_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    advance = Optimizer.advance

    def advanced(self: Optimizer, updated: bool = True) -> None:
        advance(self, updated)
        for _ in range(self.model.plan.num_microbatches - 1):
            self.scheduler.step()

    patch.setattr(Optimizer, "advance", advanced)


@bug(
    "Weight decay applies to norms",
    "ServiceNow/Fast-LLM#542",
    "huggingface/transformers#35927",
    test="tests/optim/test_optimizer.py::test_one_process_equals_torch",
)
def norms_decay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer, "decays", lambda name: True)


@bug(
    "Gradients of micro batches are added in bf16",
    "pytorch/pytorch#106395",
    "hiyouga/LlamaFactory#9769",
    test="tests/parallel/test_data_parallel.py::test_a_run_is_bit_identical_to_fully_shards[1-layout0]",
)
def microbatches_summed_in_bf16(patch: pytest.MonkeyPatch) -> None:
    init = ComputeCopies.__init__

    def initialized(self: ComputeCopies, *arguments: Any) -> None:
        init(self, *arguments)
        self._sums_in_bf16 = True

    patch.setattr(ComputeCopies, "__init__", initialized)


bug(
    "The gradients of tied embeddings are not summed over the first and last stage",
    "NVIDIA/Megatron-LM#844",
    "NVIDIA/Megatron-LM#656",
    test=f"{LAYOUT}[pp2, tied]",
)(tampered(tampers.no_tied_sum))
bug(
    "The gradients of a kv head that tp ranks share are not summed",
    "bigcode-project/Megatron-LM#35",
    test=f"{LAYOUT}[tp4+sp, kv heads < tp]",
)(tampered(tampers.no_kv_copy_sum))
bug(
    "The gradient norm counts a replicated weight once per tp rank",
    "ROCm/TransformerEngine#715",
    test=f"{LAYOUT}[tp2+sp]",
)(tampered(tampers.norms_count_copies))


@bug(
    "The gradient norm of a rank is the norm of its shard",
    "hiyouga/LlamaFactory#10640",
    "pytorch/pytorch#170862",
    test=f"{LAYOUT}[dp2, zero 3]",
)
def norm_of_the_local_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(norm, "_global_norm", lambda norms, device: torch.cat(norms).norm())


bug("The gradient of the head's input is not summed over tp ranks", "NovaSky-AI/SkyRL#1886", test=f"{LAYOUT}[tp2]")(
    tampered(tampers.head_gradient_not_summed)
)


@bug(
    "Each dp rank reads the same samples",
    "huggingface/datasets#8568",
    test="tests/data/test_batches.py::test_a_step_is_its_samples_each_once",
)
def same_samples_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    of_rank = Batches._micro_batch

    def of_the_first(self: Batches, indices: range, *more: Any) -> MicroBatch:
        back = self.topology.place["dp"] * len(indices)
        return of_rank(self, range(indices.start - back, indices.stop - back), *more)

    patch.setattr(Batches, "_micro_batch", of_the_first)


@bug(
    "The data restarts after a resume",
    "huggingface/datasets#8308",
    "huggingface/datasets#7538",
    "pytorch/torchtitan#3907",
    test=f"{RESUME}[one]",
)
def data_restarts_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "position", property(lambda state: RunPosition(state.step, 0, 0)))


@bug("Adam's step count restarts after a resume", "paiml/entrenar#257", test=f"{RESUME}[one]")
def updates_restart_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    restore = Optimizer.restore
    patch.setattr(Optimizer, "restore", lambda self, updates, steps: restore(self, 0, steps))


@bug(
    "The learning-rate schedule restarts after a resume",
    "paiml/entrenar#257",
    "starVLA/starVLA#210",
    test=f"{RESUME}[one]",
)
def schedule_restarts_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    restore = Optimizer.restore
    patch.setattr(Optimizer, "restore", lambda self, updates, steps: restore(self, updates, 0))


def table() -> str:
    cells = []
    for bug in BUGS:
        path, _, name = bug.test.rpartition("/")[2].partition("::")
        cells.append((bug.name, bug.links, f"`{bug.function}`", f"`{path}`: `{name}`"))
    return "\n".join(markdown_table(("bug", "thread", "mutation", "test"), cells))
