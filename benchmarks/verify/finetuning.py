"""Fine-tune a real model on QNLI and GSM8K and evaluate it before and after; write a table, a figure and reports.

    python -m benchmarks.verify.finetuning --model SMOLLM2_FOLDER --data FOLDER \\
        --output runs/finetuning

FOLDER contains qnli_dev.tsv and gsm8k_{train,test}.jsonl.

QNLI: full fine-tuning and LoRA; accuracy on held-out lines, compared with the majority class.

GSM8K: full fine-tuning for some steps; share of held-out questions with an answer that ends in `#### number`.

Finished parts are not repeated, so a stopped run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT, figure, run_program
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.loss_curve import moving_average
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

# Two ranks of one thread are faster than one rank of two threads, and compiled blocks are faster than eager ones.
RECIPE = (
    "model=from_hf device=cpu trainer.dp=2 trainer.precision=bf16 trainer.compile=true trainer.micro_batch_size=2 "
    "trainer.global_batch_size=4 optim.warmup_ratio=0.1 trainer.val_every_steps=50 trainer.val_steps=10 "
    "checkpoint.every_steps=50 checkpoint.keep=1 data.pack=true"
).split()
LORA = (
    "finetune=lora finetune.lora_rank=16 finetune.lora_alpha=32 optim.lr=5e-4 "
    "finetune.lora_target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
).split()
FULL = ["finetune=full", "optim.lr=1e-4"]
EVALUATION = ("--chat", "--dtype", "bfloat16", "--device", "cpu")
WINDOW = 10  # steps of the moving average in the figure


def prepare(args: argparse.Namespace) -> None:
    """Prepare the datasets in corpora/ of the output folder, the paths of data=qnli and data=gsm8k."""
    common = ("--tokenizer-model", args.model, "--seq-length", 512, "--on-bad-line", "skip", "--output-prefix")
    if not (args.output / "corpora/qnli/qnli_train_sft.json").exists():
        source = ("--input", args.data / "qnli_dev.tsv", "--template", "qnli", "--split", args.split)
        run_program("data_prep/sft.py", *source, *common, "corpora/qnli/qnli", folder=args.output)
    for part in ("train", "test"):
        if not (args.output / f"corpora/gsm8k/{part}_sft.json").exists():
            records = args.data / f"gsm8k_{part}.jsonl"
            run_program("data_prep/sft.py", "--input", records, *common, f"corpora/gsm8k/{part}", folder=args.output)


def evaluate(model: Path, task: str, report: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the report of scripts/evaluate.py on held-out lines; evaluate unless the report exists."""
    if not report.exists():
        if task == "qnli":
            options = ["--labelled", "corpora/qnli/qnli_validation.tsv", "--template", "qnli"]
        else:
            options = ["--generative", args.data / "gsm8k_test.jsonl", "--template", "gsm8k", "--limit", args.questions]
        run_program("scripts/evaluate.py", model, *options, *EVALUATION, "--output", report, folder=args.output)
    evaluation: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return evaluation


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of results before and after fine-tuning, in Markdown."""

    def words(share: Mapping[str, Any]) -> str:
        return f"{share['share']:.1%} ({share['right']} of {share['of']}; {share['low']:.1%} to {share['high']:.1%})"

    majority = reports["qnli_before"]["majority"]
    qnli = [(f"always `{majority['label']}`", f"{majority['share']:.1%}", "")]
    for name in ("before", "full", "lora"):
        report = reports[f"qnli_{name}"]
        chosen = ", ".join(f"{label} {counts['chosen']}" for label, counts in report["labels"].items())
        qnli.append((name, words(report["accuracy"]), chosen))
    gsm8k = [(name, reports[f"gsm8k_{name}"]) for name in ("before", "full")]
    answers = [(name, words(report["well_formed"]), words(report["exact_match"])) for name, report in gsm8k]
    lines = [
        *markdown_table(("QNLI, held out", "accuracy (95 % interval)", "chosen"), qnli),
        "",
        *markdown_table(("GSM8K, held out", "ends in `#### number`", "correct number"), answers),
    ]
    return "\n".join(lines) + "\n"


def draw(folders: Mapping[str, Path], path: Path) -> None:
    """Plot moving averages of the training losses, and validation losses as dots; a panel per dataset."""
    with figure(path, 1, 2, figsize=(11, 4.2)) as panels:
        for (name, folder), colour in zip(folders.items(), ("#2563eb", "#ea580c", "#0d9488"), strict=True):
            axes = panels[int(name.startswith("gsm8k"))]
            records = read_metrics(folder / METRICS_FILE)
            steps, losses = ([record[name] for record in records] for name in ("step", "reduced_train_loss"))
            middles, smooth = moving_average(steps, WINDOW), moving_average(losses, WINDOW)
            axes.plot(middles, smooth, color=colour, linewidth=1.3, label=name)
            checked = [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]
            axes.plot(*zip(*checked, strict=True), "o", color=colour, markersize=5, label=f"{name}, validation")
        for axes, title in zip(panels, ("QNLI", "GSM8K"), strict=True):
            axes.set(title=title, xlabel="step", ylabel="loss, nats per learned token")
            axes.set_ylim(0, 1.2)  # cuts off the first steps
            axes.legend(frameon=False)


def main(argv: list[str] | None = None) -> int:
    """Prepare, train, evaluate and report; return 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="folder with qnli_dev.tsv and gsm8k_*.jsonl")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "finetuning", help="folder of runs and results")
    parser.add_argument("--split", default="4463,1000", help="QNLI lines to train on and to hold out")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of QNLI (default 1)")
    parser.add_argument("--gsm8k-steps", type=int, default=60, help="optimizer steps on GSM8K (default 60)")
    parser.add_argument("--questions", type=int, default=100, help="GSM8K questions to answer (default 100)")
    args = parser.parse_args(argv)
    for name in ("model", "data", "output"):
        setattr(args, name, getattr(args, name).resolve())
    output: Path = args.output
    output.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    qnli = ["data=qnli", f"trainer.epochs={args.epochs}"]
    runs = {
        "qnli_full": [*qnli, *FULL],
        "qnli_lora": [*qnli, *LORA],
        "gsm8k_full": ["data=gsm8k", f"trainer.steps={args.gsm8k_steps}", *FULL],
    }
    try:
        prepare(args)
        for task in ("qnli", "gsm8k"):
            reports[f"{task}_before"] = evaluate(args.model, task, output / f"{task}_before.json", args)
        for name, overrides in runs.items():
            report = output / f"{name}.json"
            if not report.exists():  # train.py resumes a stopped run
                overrides = [*RECIPE, f"init_from={args.model}", *overrides, f"run.dir={output / name}"]
                run_program("train.py", *overrides, folder=output)
            reports[name] = evaluate(output / name, name.partition("_")[0], report, args)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"status {error.returncode}: {' '.join(map(str, error.cmd))}\n")
        return 1
    (output / "finetuning.md").write_text(table(reports), encoding="utf-8")
    draw({name: output / name for name in runs}, output / "finetuning.png")
    print(table(reports))
    return 0


if __name__ == "__main__":
    run_main(main)
