"""Cases of plan/rules/data.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import FILES, Case

RECORDS = {**FILES, "data.kind": "sft", "data.tokenizer": "t"}
CASES = [
    Case("sequence_fits_model", 1, {"data.seq_length": 4097}, {"data.seq_length": 4096}, "data.seq_length=4096"),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.kind": "sft", "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        {**FILES, "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        "data.schedule=[]",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.kind": "sft", "data.prefixes": [1, "x", 2, "y"]},
        {**FILES, "data.kind": "sft", "data.prefixes": ["x", "y"]},
        "data.prefixes=[x,y]",
    ),
    Case(
        "documents_are_of_pretraining",
        1,
        {**FILES, "data.kind": "sft", "data.document_mask": True},
        {**FILES, "data.document_mask": True},
        "data.document_mask=false",
    ),
    Case(
        "documents_are_of_pretraining",
        1,
        {**FILES, "data.kind": "sft", "data.eod_mask_loss": True},
        {**FILES, "data.eod_mask_loss": True},
        "data.eod_mask_loss=null",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.pack": True},
        {**FILES, "data.pack": True, "data.kind": "sft"},
        "data.kind=sft",
    ),
    Case(
        "fine_tuning_sets_are_whole",
        1,
        {**FILES, "data.validation_prefixes": ["y"]},
        {**FILES, "data.validation_prefixes": ["y"], "data.kind": "sft"},
        "data.validation_prefixes=[]",
    ),
    Case(
        "records_can_be_prepared",
        1,
        {**RECORDS, "data.prefixes": ["x.jsonl"], "data.tokenizer": None},
        {**RECORDS, "data.prefixes": ["x.jsonl"]},
        "data.tokenizer=FOLDER",
    ),
    Case(
        "records_can_be_prepared",
        1,
        {**RECORDS, "data.prefixes": ["x.tsv"]},
        {**RECORDS, "data.prefixes": ["x.tsv"], "data.template": "qnli"},
        "data.template=qnli",
    ),
    Case("records_can_be_prepared", 1, {**RECORDS, "data.template": "qnli"}, RECORDS, "omit data.template"),
    Case(
        "records_can_be_prepared", 1, {**RECORDS, "data.chat_template": "chatml"}, RECORDS, "omit data.chat_template"
    ),
    Case("data_is_there", 1, {"data.mock": False}, {"data.mock": True}, "data=mock"),
    Case(
        "validation_has_documents",
        1,
        {"data.mock": False, "data.prefixes": ["x"], "data.split": "1,0,0", "trainer.val_every_steps": 5},
        {"data.mock": False, "data.prefixes": ["x"], "data.split": "9,1,0", "trainer.val_every_steps": 5},
        "969,30,1",
    ),
    Case(
        "samples_need_a_tokenizer",
        1,
        {"logging.sample_prompts": ["Hello"]},
        {"logging.sample_prompts": ["Hello"], "data.tokenizer": "t.model"},
        "data.tokenizer=",
    ),
]
