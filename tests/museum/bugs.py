"""Published silent bugs of parallel training: for each the thread, a mutation with the bug, and a test that fails."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.system.tables import markdown_table
from tests.layouts import tampers
from tests.museum import mutations
from tests.museum.mutations import Mutation, tampered
from tests.paths import ROOT

PAGE = ROOT / "docs/design/silent_bugs.md"
GITHUB = "https://github.com/"
LAYOUT = "tests/layouts/test_layouts.py::test_layout_equals_one_process"
RESUME = "tests/checkpoint/test_resume.py::test_losses_after_a_resume_are_the_uninterrupted_runs"
DOCUMENTS = "tests/data/test_document_mask.py::test_loss_and_gradients_are_those_of_each_document_alone"
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
    symptom: str = DIFFERS
    """Regular expression that the output of the failing test contains."""
    quick: bool = False
    """Whether it runs with each `make test`."""

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


BUGS = (
    Bug(
        "Norm weights of q and k have a part of the gradient on each tp rank, which is summed with sp only",
        ("NVIDIA/Megatron-LM#7452",),
        mutations.norms_summed_under_sp_only,
        f"{LAYOUT}[tp2, qwen3]",
        quick=True,
    ),
    Bug(
        "Gradients of norms are not summed over tp ranks with sp",
        ("NVIDIA-NeMo/RL#3716", "NVIDIA/Megatron-LM#1446", "NVIDIA/TransformerEngine#435"),
        tampered(tampers.no_sequence_parallel_sum),
        f"{LAYOUT}[tp2+sp]",
    ),
    Bug(
        "The loss of gathered logits counts the vocabulary once per tp rank: log(tp) too high",
        ("NVIDIA/Megatron-LM#7452",),
        mutations.exponentials_of_gathered_logits,
        f"{LAYOUT}[tp2]",
        quick=True,
    ),
    Bug(
        "A dp rank normalizes the loss by its own token count",
        ("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#4590"),
        tampered(tampers.local_token_count),
        f"{LAYOUT}[dp2, zero 1]",
    ),
    Bug(
        "Rows that pad a vocabulary, which tp does not divide, are in the loss",
        ("NVIDIA/Megatron-LM#1754",),
        tampered(tampers.padding_in_the_loss),
        f"{LAYOUT}[tp2+sp, odd vocabulary]",
    ),
    Bug(
        "The gradient of a context-parallel run is divided by the number of ranks",
        ("NVIDIA/Megatron-LM#673",),
        tampered(tampers.mean_over_data_parallel_ranks),
        f"{LAYOUT}[cp2]",
    ),
    Bug(
        "The gradients of replicated shards are averaged, so that their norm is off by the number of ranks",
        ("pytorch/torchtitan#2318", "meta-pytorch/torchtune#2172"),
        tampered(tampers.mean_over_data_parallel_ranks),
        f"{LAYOUT}[dp2, zero 0]",
    ),
    Bug(
        "A pipeline's gradients are not divided by the tokens; the reported loss is",
        ("pytorch/torchtitan#2972",),
        mutations.loss_not_divided_in_pipelines,
        f"{LAYOUT}[pp2]",
    ),
    Bug(
        "Gradient accumulation averages the means of micro batches",
        ("huggingface/transformers#34191", "hiyouga/LlamaFactory#7443"),
        mutations.mean_of_microbatch_means,
        f"{LAYOUT}[micro batches of 8]",
        quick=True,
    ),
    Bug(
        "The loss counts a token once per tp rank",
        ("huggingface/transformers#45994", "huggingface/transformers#39674"),
        mutations.tokens_counted_on_each_tensor_parallel_rank,
        f"{LAYOUT}[tp2]",
    ),
    Bug(
        "Context parallelism divides the token count of parts of a sequence by the number of ranks",
        ("huggingface/transformers#46775",),
        mutations.tokens_divided_by_context_parallel_ranks,
        f"{LAYOUT}[cp2]",
    ),
    Bug(
        "The backward pass of norms gives their weights no gradient",
        ("paiml/entrenar#257",),
        mutations.norms_without_gradient,
        "tests/layouts/test_layouts.py::test_every_weight_moves",
        ASSERTS,
    ),
    Bug(
        "Attention ignores the boundaries of packed documents",
        ("AI-Hypercomputer/maxtext#4476",),
        mutations.documents_ignored,
        f"{DOCUMENTS}[plain]",
        ASSERTS,
        quick=True,
    ),
    Bug(
        "Documents of packed sequences begin one token late, because the end token is a label only",
        ("pytorch/torchtitan#3130",),
        mutations.documents_begin_one_token_late,
        f"{DOCUMENTS}[plain]",
        ASSERTS,
    ),
    Bug(
        "Positions continue after the end of a document",
        ("swiss-ai/Megatron-LM#40", "alibaba/Pai-Megatron-Patch#406"),
        mutations.positions_continue_after_the_end_of_a_document,
        "tests/devices/test_visibility.py::test_positions_and_borders_by_hand",
        ASSERTS,
        quick=True,
    ),
    Bug(
        "Context parallelism loses the boundaries of packed documents",
        ("hiyouga/LlamaFactory#10787",),
        tampered(tampers.documents_joined_at_a_chunk_boundary),
        f"{LAYOUT}[cp2, documents]",
    ),
    Bug(
        "Context parallelism: gradients of keys and values are not summed over ranks",
        ("NVIDIA/Megatron-LM#1464",),
        tampered(tampers.key_gradients_of_each_rank_alone),
        f"{LAYOUT}[cp2]",
    ),
    Bug(
        "Shards of a matrix have the same initial values on each tp rank",
        ("modelscope/ms-swift#7944",),
        mutations.same_values_on_each_tensor_parallel_rank,
        f"{LAYOUT}[tp2]",
        quick=True,
    ),
    Bug(
        "Dropout masks differ between tp ranks that share activations",
        ("NVIDIA/Megatron-LM#206",),
        mutations.other_masks_on_each_tensor_parallel_rank,
        "tests/finetuning/test_lora.py::test_ranks_with_the_same_activations_share_dropout_masks[false-seeds0]",
        ASSERTS,
    ),
    Bug(
        "Dropout masks are equal on ranks with different tokens",
        ("NVIDIA/Megatron-LM#1256", "tenstorrent/tt-metal#55947"),
        mutations.same_masks_on_each_rank,
        "tests/finetuning/test_lora.py::test_ranks_with_the_same_activations_share_dropout_masks[true-seeds1]",
        ASSERTS,
        quick=True,
    ),
    Bug(
        "The learning rate advances once per micro batch",
        ("huggingface/accelerate#963", "starVLA/starVLA#210"),
        mutations.scheduler_stepped_per_microbatch,
        "tests/optim/test_optimizer.py::test_one_process_equals_torch",
        ASSERTS,
    ),
    Bug(
        "Weight decay applies to norms",
        ("ServiceNow/Fast-LLM#542", "huggingface/transformers#35927"),
        mutations.norms_decay,
        "tests/optim/test_optimizer.py::test_one_process_equals_torch",
        ASSERTS,
    ),
    Bug(
        "Gradients of micro batches are added in bf16",
        ("pytorch/pytorch#106395", "hiyouga/LlamaFactory#9769"),
        mutations.microbatches_summed_in_bf16,
        "tests/parallel/test_fsdp.py::test_a_run_is_bit_identical_to_fully_shards[1-layout0]",
        ASSERTS,
    ),
    Bug(
        "The gradients of tied embeddings are not summed over the first and last stage",
        ("NVIDIA/Megatron-LM#844", "NVIDIA/Megatron-LM#656"),
        tampered(tampers.no_tied_sum),
        f"{LAYOUT}[pp2, tied]",
        quick=True,
    ),
    Bug(
        "The gradients of a kv head that tp ranks share are not summed",
        ("bigcode-project/Megatron-LM#35",),
        tampered(tampers.no_kv_copy_sum),
        f"{LAYOUT}[tp4+sp, kv heads < tp]",
    ),
    Bug(
        "The gradient norm counts a replicated weight once per tp rank",
        ("ROCm/TransformerEngine#715",),
        tampered(tampers.norms_count_copies),
        f"{LAYOUT}[tp2+sp]",
    ),
    Bug(
        "The gradient norm of a rank is the norm of its shard",
        ("hiyouga/LlamaFactory#10640", "pytorch/pytorch#170862"),
        mutations.norm_of_the_local_shard,
        f"{LAYOUT}[dp2, zero 3]",
    ),
    Bug(
        "The gradient of the head's input is not summed over tp ranks",
        ("NovaSky-AI/SkyRL#1886",),
        tampered(tampers.head_gradient_not_summed),
        f"{LAYOUT}[tp2]",
    ),
    Bug(
        "Each dp rank reads the same samples",
        ("huggingface/datasets#8568",),
        mutations.same_samples_on_each_rank,
        "tests/data/test_batches.py::test_a_step_is_its_samples_each_once",
        ASSERTS,
        quick=True,
    ),
    Bug(
        "The data restarts after a resume",
        ("huggingface/datasets#8308", "huggingface/datasets#7538", "pytorch/torchtitan#3907"),
        mutations.data_restarts_after_a_resume,
        f"{RESUME}[one]",
        ASSERTS,
    ),
    Bug(
        "Adam's step count restarts after a resume",
        ("paiml/entrenar#257",),
        mutations.updates_restart_after_a_resume,
        f"{RESUME}[one]",
        ASSERTS,
    ),
    Bug(
        "The learning-rate schedule restarts after a resume",
        ("paiml/entrenar#257", "starVLA/starVLA#210"),
        mutations.schedule_restarts_after_a_resume,
        f"{RESUME}[one]",
        ASSERTS,
    ),
)


def table() -> str:
    """Return the entries as a Markdown table."""
    cells = []
    for bug in BUGS:
        path, _, name = bug.test.rpartition("/")[2].partition("::")
        cells.append((bug.name, bug.links, f"`{bug.function}`", f"`{path}`: `{name}`"))
    return "\n".join(markdown_table(("bug", "thread", "mutation", "test"), cells))
