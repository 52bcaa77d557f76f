"""TRL's DPO on pairs of token ids, for benchmarks/verify/preferences.py: reads the JSON file named by the argument.

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
from trl import DPOConfig, DPOTrainer


class Trainer(DPOTrainer):  # type: ignore[misc]
    """DPO on pairs that are already token ids."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>")
arguments = DPOConfig(
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
trainer = Trainer(model, args=arguments, train_dataset=Dataset.from_list(task["pairs"]), processing_class=unused)
trainer.train()
print(json.dumps([record for record in trainer.state.log_history if "rewards/margins" in record]))
