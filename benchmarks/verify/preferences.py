"""Compare DPO with TRL: the same weights, pairs and batches, step by step; print a Markdown page.

    make demo-data && python -m benchmarks.verify.preferences

The pairs have the fields of Dahoas/rm-static and are made from the demo's text, Python's sources: the chosen answer
continues a file, the rejected one has its words in random order. Takes ten minutes on two cores.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from pathlib import Path

from benchmarks.harness.environments import Peer, interpreter
from benchmarks.results import ROOT, conditions, run_program
from megatron_llama.config.data_settings import MASK_SUFFIX, REJECTED
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Unpacked
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

CORPUS = ROOT / "corpora" / "python_stdlib"
TRL = Peer("trl", ("trl==1.16.0",), "benchmarks.peers.train_trl")
STEPS, BATCH, LENGTH, LR, SEED = 100, 8, 320, 3e-4, 1234
TOLERANCE = 1e-5
"""Largest difference in the first five steps. Later, Adam amplifies rounding errors: gradients near 0 have any sign."""
METRICS = {"loss": "loss", "rewards/margins": "margin", "rewards/accuracies": "accuracy"}
BASE = "model=llama_2m model.vocab_size=384 device=cpu logging.tensorboard=false optim=constant optim.warmup_steps=0"
DPO = (
    f"data=chat data.pack=false data.seq_length={LENGTH} data.split='1,0,0' trainer.val_every_steps=0 trainer.tp=2 "
    f"trainer.steps={STEPS} trainer.global_batch_size={BATCH} finetune=full finetune.objective=dpo optim.lr={LR} "
    "optim.weight_decay=0"
)


def write_pairs(path: Path) -> None:
    """Write a pair for each sample of the run to a JSONL file."""
    rng = random.Random(SEED)
    with (CORPUS / "python_stdlib.jsonl").open(encoding="utf-8") as lines:
        texts = [text for line in lines if len(text := json.loads(line)["text"]) > 2000]
    with path.open("w", encoding="utf-8") as file:
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


def read_pairs(prefix: str) -> list[dict[str, list[int]]]:
    """Return the pairs' token ids, by TRL's names, in the order of training."""
    tokens, masks, pairs = IndexedDataset(prefix), IndexedDataset(prefix + MASK_SUFFIX), []
    order = Unpacked(len(tokens), SEED)
    for index in range(STEPS * BATCH):
        (number,) = order.examples(index)
        ids, mask = tokens.sequence(number), masks.sequence(number)
        chosen, start = mask < REJECTED, int((mask % REJECTED).argmax())
        sides = {"prompt_ids": ids[:start], "chosen_ids": ids[chosen][start:], "rejected_ids": ids[~chosen][start:]}
        pairs.append({name: side.tolist() for name, side in sides.items()})
    return pairs


def main() -> int:
    """Run both programs and print the page; return 0 if all values are within the tolerance."""
    folder = Path(tempfile.mkdtemp(prefix="preferences"))
    write_pairs(folder / "pairs.jsonl")
    words = ["--format", "pairs", "--tokenizer-model", CORPUS / "tokenizer.model", "--chat-template", "plain"]
    words += ["--input", folder / "pairs.jsonl", "--seq-length", LENGTH, "--output-prefix", folder / "pairs"]
    run_program("data_prep/sft.py", *words)
    text = f"data=python_stdlib data.prefixes=[{CORPUS}/python_stdlib_text_document] trainer.steps=300 optim.lr=3e-3"
    run_program("train.py", *BASE.split(), *text.split(), f"run.dir={folder}/base", "trainer.global_batch_size=4")
    run_program("scripts/export_hf.py", folder / "base", folder / "hf")
    tuned = [f"data.prefixes=[{folder}/pairs_sft]", f"init_from={folder}/hf", f"run.dir={folder}/dpo"]
    run_program("train.py", *BASE.split(), *DPO.split(), *tuned)
    ours = read_metrics(folder / "dpo" / METRICS_FILE)
    arguments = {"output_dir": f"{folder}/trl", "per_device_train_batch_size": BATCH, "learning_rate": LR}
    task = {"model": f"{folder}/hf", "pairs": read_pairs(f"{folder}/pairs_sft"), "arguments": arguments}
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    command = [str(interpreter(TRL)), "-m", TRL.program, str(folder / "task.json")]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    theirs = [{name: float(value) for name, value in record.items()} for record in json.loads(printed.splitlines()[-1])]
    pairs = list(zip([{**step, "loss": step["reduced_train_loss"]} for step in ours], theirs, strict=True))
    differences = [max(abs(one[name] - other[name]) for name in METRICS) for one, other in pairs]
    largest = {steps: max(differences[:steps]) for steps in (5, STEPS // 2, STEPS)}
    rows = []
    for first in range(0, STEPS, 10):
        means = [
            sum(step[name] for step in side) / 10
            for name in METRICS
            for side in zip(*pairs[first : first + 10], strict=True)
        ]
        rows.append((f"{first + 1} to {first + 10}", *(f"{mean:.4f}" for mean in means)))
    heads = [f"{name}, {program}" for name in METRICS.values() for program in ("ours", "TRL")]
    print(f"{conditions()}\n\nLargest difference in the first ", end="")
    print(f"{', '.join(f'{steps} steps {value:.1e}' for steps, value in largest.items())}. Means of ten steps:\n")
    print("\n".join(markdown_table(("steps", *heads), rows)))
    return int(largest[5] > TOLERANCE)


if __name__ == "__main__":
    run_main(main)
