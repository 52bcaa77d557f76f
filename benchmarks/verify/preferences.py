"""Compare DPO and KTO with TRL: the same weights, examples and batches, step by step; print a Markdown page.

    make demo-data && python -m benchmarks.verify.preferences

The pairs have the fields of Dahoas/rm-static and are made from the demo's text, Python's sources: the chosen answer
continues a file, the rejected one has its words in random order. KTO trains on both answers of a pair, with labels.
Takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import Peer, interpreter
from benchmarks.results import ROOT, conditions, run_program
from megatron_llama.config.data_settings import LABELLED, MASK_SUFFIX, REJECTED
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Unpacked
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

CORPUS = ROOT / "corpora" / "python_stdlib"
TRL = Peer("trl", ("trl==1.16.0",), "benchmarks.peers.train_trl")
STEPS, BATCH, LENGTH, LR, SEED = 50, 8, 320, 3e-4, 1234
TOLERANCE = 1e-5
"""Largest difference in the first five steps. Later, Adam amplifies rounding errors: gradients near 0 have any sign."""
METRICS = {
    "dpo": {"loss": "loss", "rewards/margins": "margin", "rewards/accuracies": "accuracy"},
    "kto": {"loss": "loss", "rewards/margins": "margin", "kl": "KL"},
}
FORMATS = {"dpo": "pairs", "kto": "unpaired"}
BASE = "model=llama_2m model.vocab_size=384 device=cpu logging.tensorboard=false optim=constant optim.warmup_steps=0"
TUNED = (
    f"data=chat data.pack=false data.seq_length={LENGTH} data.split='1,0,0' trainer.val_every_steps=0 trainer.tp=2 "
    f"trainer.steps={STEPS} trainer.global_batch_size={BATCH} finetune=full optim.lr={LR} "
    "optim.weight_decay=0"
)


def write_pairs(path: Path) -> None:
    """Write a pair for each sample of the run to ``path``.jsonl, and its two answers to ``path``_unpaired.jsonl."""
    rng = random.Random(SEED)
    with (CORPUS / "python_stdlib.jsonl").open(encoding="utf-8") as lines:
        texts = [text for line in lines if len(text := json.loads(line)["text"]) > 2000]
    unpaired = path.with_name(f"{path.name}_unpaired.jsonl").open("w", encoding="utf-8")
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file, unpaired:
        for _ in range(STEPS * BATCH):
            text, words, prompt = rng.choice(texts), list[str](), ""
            while len({*words}) < 4 or not prompt.strip():
                middle = text.find("\n", rng.randrange(100, len(text) - 1000)) + 1
                words = text[middle : middle + 60].split()
                prompt = text[middle - 80 : middle]
            chosen = rejected = " ".join(words)
            while rejected == chosen:
                rejected = " ".join(rng.sample(words, len(words)))
            record = {"prompt": prompt, "response": chosen, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(record) + "\n")
            for answer, label in ((chosen, True), (rejected, False)):
                unpaired.write(json.dumps({"prompt": prompt, "completion": answer, "label": label}) + "\n")


def read_examples(objective: str, prefix: str) -> list[dict[str, Any]]:
    """Return the examples' token ids, by TRL's names, in the order of training."""
    tokens, masks, examples = IndexedDataset(prefix), IndexedDataset(prefix + MASK_SUFFIX), []
    order = Unpacked(len(tokens), SEED)

    def split(number: int) -> tuple[list[int], list[int], bool]:
        ids, mask = tokens.sequence(number), masks.sequence(number)
        start = int((mask % REJECTED).argmax())
        return ids[:start].tolist(), ids[start:].tolist(), bool(mask[0] < LABELLED + REJECTED)

    for index in range(STEPS * BATCH):
        (number,) = order.examples(index)
        if objective == "kto":
            prompt, answer, label = split(number)
            (_, other, _) = split((number - 1) % len(tokens))
            example = {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label}
        else:
            ids, mask = tokens.sequence(number), masks.sequence(number)
            chosen, start = mask < REJECTED, int((mask % REJECTED).argmax())
            sides = {"prompt_ids": ids[:start], "chosen_ids": ids[chosen][start:], "rejected_ids": ids[~chosen][start:]}
            example = {name: side.tolist() for name, side in sides.items()}
        examples.append(example)
    return examples


def run_both(objective: str, folder: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Train by both programs from the model in ``folder``/hf; return their metrics of each step."""
    name = folder / f"pairs{'_unpaired' * (objective == 'kto')}"
    words: list[object] = ["--format", FORMATS[objective], "--chat-template", "plain", "--input", f"{name}.jsonl"]
    words += ["--tokenizer-model", CORPUS / "tokenizer.model", "--seq-length", LENGTH, "--output-prefix", name]
    run_program("data_prep/sft.py", *words)
    run = folder / objective
    tuned = [f"finetune.objective={objective}", f"data.prefixes=[{name}_sft]", f"init_from={folder}/hf"]
    run_program("train.py", *BASE.split(), *TUNED.split(), *tuned, f"run.dir={run}")
    ours = [{**step, "loss": step["reduced_train_loss"]} for step in read_metrics(run / METRICS_FILE)]
    arguments = {"output_dir": f"{folder}/trl", "per_device_train_batch_size": BATCH, "learning_rate": LR}
    task: dict[str, Any] = {"objective": objective, "model": f"{folder}/hf", "arguments": arguments}
    task["examples"] = read_examples(objective, f"{name}_sft")
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    command = [str(interpreter(TRL)), "-m", TRL.program, str(folder / "task.json")]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    theirs = [{name: float(value) for name, value in record.items()} for record in json.loads(printed.splitlines()[-1])]
    return ours, theirs


def show(objective: str, folder: Path) -> float:
    """Print an objective's table; return the largest difference in the first five steps."""
    metrics, pairs = METRICS[objective], list(zip(*run_both(objective, folder), strict=True))
    differences = [max(abs(one.get(name, 0) - other.get(name, 0)) for name in metrics) for one, other in pairs]
    largest = {steps: max(differences[:steps]) for steps in (5, STEPS // 2, STEPS)}
    rows = []
    for first in range(0, STEPS, 10):
        sides = [list(side) for side in zip(*pairs[first : first + 10], strict=True)]
        means = [sum(step.get(name, 0) for step in side) / 10 for name in metrics for side in sides]
        rows.append((f"{first + 1} to {first + 10}", *(f"{mean:.4f}" for mean in means)))
    heads = [f"{name}, {program}" for name in metrics.values() for program in ("ours", "TRL")]
    print(f"\n{objective.upper()}: largest difference in the first ", end="")
    print(f"{', '.join(f'{steps} steps {value:.1e}' for steps, value in largest.items())}. Means of ten steps:\n")
    print("\n".join(markdown_table(("steps", *heads), rows)), flush=True)
    return largest[5]


def main() -> int:
    """Run both programs and print the page; return 0 if all values are within the tolerance."""
    folder = Path(tempfile.mkdtemp(prefix="preferences"))
    write_pairs(folder / "pairs")
    text = f"data=python_stdlib data.prefixes=[{CORPUS}/python_stdlib_text_document] trainer.steps=300 optim.lr=3e-3"
    run_program("train.py", *BASE.split(), *text.split(), f"run.dir={folder}/base", "trainer.global_batch_size=4")
    run_program("scripts/export_hf.py", folder / "base", folder / "hf")
    print(conditions())
    return int(max(show(objective, folder) for objective in METRICS) > TOLERANCE)


if __name__ == "__main__":
    run_main(main)
