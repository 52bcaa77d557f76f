"""TRL's DPO or KTO on token ids, for benchmarks/verify/preferences.py: reads the JSON file named by the argument.

Runs in an environment with trl and its dependencies alone; prints the log of all steps as a JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer


def unchanged(trainer: Any, dataset: Dataset, *_: Any) -> Dataset:
    """Return the dataset, which has token ids already."""
    return dataset


CLASSES = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}
task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>")
config, trainer_class = CLASSES[task["objective"]]
arguments = config(
    **{
        **task["arguments"],
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
    },
    **{"max_length": None, "bf16": False, "gradient_checkpointing": False, "use_cpu": True},
    **{"logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
)
model = LlamaForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
prepared = type("Prepared", (trainer_class,), {"_prepare_dataset": unchanged})
trainer = prepared(model, args=arguments, train_dataset=Dataset.from_list(task["examples"]), processing_class=unused)
trainer.train()
print(
    json.dumps(
        [record for record in trainer.state.log_history if "logps/chosen" in record or "logps/rejected" in record]
    )
)
