"""Rules on what is trained on: datasets, files of records, tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.data_prefixes import (
    has_columns,
    is_table,
    record_files,
    tokenizer_of_records,
    weights_and_paths,
)
from megatron_llama.config.problems import Problem, shown, typed
from megatron_llama.config.settings import LABEL_TEMPLATES, Config, DataConfig
from megatron_llama.plan.rules.rule import reads


@reads("data.seq_length", "model.max_position_embeddings")
def sequence_fits_model(config: Config, world_size: int) -> Iterator[Problem]:
    """Positions beyond the model's longest sequence need that setting to be raised explicitly."""
    length, longest = config.data.length, config.model.max_position_embeddings
    if length > longest:
        advice = f"write data.seq_length={longest}, or model.max_position_embeddings={length}"
        yield Problem("data.seq_length", length, f"is longer than model.max_position_embeddings={longest}", advice)


@reads("data.kind", "data.pack", "data.document_mask", "data.eod_mask_loss")
def documents_are_of_pretraining(config: Config, world_size: int) -> Iterator[Problem]:
    """Fine-tuning sets say themselves which tokens belong together and which have loss."""
    data = config.data
    if data.kind == "sft" and data.document_mask:
        rule = "is for pretraining; packed examples never attend to each other"
        yield Problem("data.document_mask", True, rule, "write data.document_mask=false, and data.pack=true to pack")
    if data.kind == "sft" and data.eod_mask_loss:
        rule = "is for pretraining; in fine-tuning the set's own masks say what is learned"
        yield Problem("data.eod_mask_loss", True, rule, "write data.eod_mask_loss=null")


@reads("data.kind", "data.pack", "data.prefixes", "data.schedule", "data.validation_prefixes")
def fine_tuning_sets_are_whole(config: Config, world_size: int) -> Iterator[Problem]:
    """Packing and validation sets work on examples, which pretraining data does not have."""
    data = config.data
    weights, paths = weights_and_paths(data.prefixes)
    if data.kind == "sft":
        if weights:
            advice = f"write data.prefixes={shown(paths)}; a set that is named twice counts twice"
            yield Problem(
                "data.prefixes", data.prefixes, "fine-tuning sets have no weights: each is seen whole", advice
            )
        if data.schedule:
            rule = "is for pretraining; fine-tuning sets are seen whole, epoch by epoch"
            yield Problem("data.schedule", data.schedule, rule, "write data.schedule=[]")
        return
    advice = "or data.kind=sft, for a dataset that data_prep/sft.py made"
    if data.pack:
        rule = "packs examples, and data.kind=pretrain has none"
        yield Problem("data.pack", True, rule, f"write data.pack=false, {advice}")
    if data.validation_prefixes:
        rule = "are for data.kind=sft; pretraining validates on data.split's second share"
        advice = f"write data.validation_prefixes=[], {advice}"
        yield Problem("data.validation_prefixes", data.validation_prefixes, rule, advice)


@reads("data.prefixes", "data.mock")
def data_is_there(config: Config, world_size: int) -> Iterator[Problem]:
    """Training needs tokens from somewhere."""
    if not config.data.mock and not config.data.prefixes:
        advice = "write data.prefixes=[path/to/dataset_text_document], data=python_stdlib, or data=mock"
        yield Problem("data.prefixes", config.data.prefixes, "names no dataset", advice)


@reads("data.split", "data.validation_prefixes", "trainer.val_every_steps")
def validation_has_documents(config: Config, world_size: int) -> Iterator[Problem]:
    """Validation needs documents that training does not use."""
    every, split = config.trainer.val_every_steps, config.data.split
    own = config.data.mock or config.data.validation_prefixes
    if every is not None and not own and float(split.split(",")[1]) == 0:
        rule = f"trainer.val_every_steps={every} needs documents for validation, the second share"
        yield Problem(
            "data.split", split, rule, f"write data.split={typed(DataConfig.split)}, or trainer.val_every_steps=null"
        )


@reads("logging.sample_prompts", "data.tokenizer")
def samples_need_a_tokenizer(config: Config, world_size: int) -> Iterator[Problem]:
    """Prompts are text and must be encoded."""
    if config.logging.sample_prompts and config.data.tokenizer is None:
        advice = "write data.tokenizer=path/to/tokenizer.model, or logging.sample_prompts=[]"
        yield Problem("logging.sample_prompts", config.logging.sample_prompts, "needs data.tokenizer", advice)


@reads("data.prefixes", "data.validation_prefixes", "data.kind", "data.tokenizer", "data.template", "init_from")
def records_can_be_prepared(config: Config, world_size: int) -> Iterator[Problem]:
    """Files of records are text: they need a tokenizer, and tables a prompt as well."""
    data, files = config.data, record_files(config.data)
    if files and tokenizer_of_records(config) is None:
        rule = f"{files[0][1]} is text, which needs a tokenizer"
        instead = "write data.tokenizer=FOLDER (Hugging Face) or tokenizer.model, or init_from=FOLDER"
        yield Problem("data.tokenizer", None, rule, instead)
    tables = [path for _, path in files if is_table(path)]
    if tables and data.template is None:
        rule = f"{tables[0]} is a table, and no prompt for its lines is given"
        yield Problem("data.template", None, rule, f"write data.template={' or '.join(LABEL_TEMPLATES)}")
    if data.template is not None and not any(has_columns(path) for _, path in files):
        rule = "is for files with columns (.tsv, .csv, .parquet), and data.prefixes names none"
        yield Problem("data.template", data.template, rule, "leave data.template out")
    if data.chat_template != DataConfig.chat_template and not files:
        rule = "is for files of records; a dataset was made with its template"
        yield Problem("data.chat_template", data.chat_template, rule, "leave data.chat_template out")
