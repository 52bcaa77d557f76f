"""Export a checkpoint as a Hugging Face folder: python scripts/export_hf.py CHECKPOINT OUT

A LoRA checkpoint becomes a PEFT adapter or, with --merge, the full model with the adapter merged. --format dcp and
torch_dist write the weights for torchtitan and Megatron. Needs no GPU and streams the weights block by block.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def read_arguments() -> argparse.Namespace:
    """Return the command's arguments. Exits with status 2 for invalid ones."""
    from megatron_llama.system.object_store import location
    from megatron_llama.system.programs import name_commands
    from megatron_llama.system.rerun_command import ArgumentParser

    parser = ArgumentParser(description=name_commands(__doc__.splitlines()[0]))
    about = "checkpoint folder, or run folder (its newest checkpoint); with --adapter a model folder"
    parser.add_argument("checkpoint", type=location, help=about)
    parser.add_argument("out", type=Path, help="output folder; must not exist")
    parser.add_argument("--merge", action="store_true", help="LoRA only: write the full model, not the adapter")
    parser.add_argument("--base", type=Path, help="base model of LoRA, if its folder has moved")
    about = "merge an adapter, a PEFT folder or LoRA run, into the model folder; repeat for the sum W + Σ weight · ΔW"
    parser.add_argument("--adapter", action="append", default=[], metavar="FOLDER[=WEIGHT]", help=about)
    parser.add_argument("--average", type=int, default=1, metavar="N", help="mean of the newest N checkpoints")
    about = "with --average: weight of a checkpoint relative to the next newer one (default: 1, equal weights)"
    parser.add_argument("--average-decay", type=float, default=1.0, metavar="D", help=about)
    about = "auto: dtype of init_from; float32 for a run from random weights"
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help=about)
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="maximum file size, 10^9 bytes (default: 5)")
    formats = "hf: a Hugging Face folder; dcp: weights for torchtitan; torch_dist: weights for Megatron (default: hf)"
    parser.add_argument("--format", choices=("hf", "dcp", "torch_dist"), default="hf", help=formats)
    about = "upload the folder to a repository of the Hugging Face hub, new ones private; needs HF_TOKEN"
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help=about)
    arguments = parser.parse_args()
    average, decay = arguments.average, arguments.average_decay
    if average < 1 or not 0 < decay <= 1 or (arguments.format != "hf" and average > 1):
        parser.error("--average must be at least 1 (with --format hf), --average-decay above 0 and at most 1")
    if average == 1 and decay != 1:
        parser.error("--average-decay has no effect without --average of at least 2")
    if not 0 < arguments.max_shard_gb < math.inf:
        parser.error("--max-shard-gb must be above 0 and finite")
    if arguments.push_to_hub is not None and arguments.format != "hf":
        parser.error("--push-to-hub needs --format hf")
    if arguments.adapter and (arguments.merge or arguments.base or average > 1 or arguments.format != "hf"):
        parser.error("--adapter merges into a model folder; omit --merge, --base, --average and --format")
    try:
        arguments.adapter = [parse_adapter(text) for text in arguments.adapter]
    except ValueError as error:
        parser.error(str(error))
    return arguments


TOO_LARGE = 1e18  # as of settings: the product must be finite in float32


def parse_adapter(text: str) -> tuple[Path, float]:
    """Return folder and weight of FOLDER[=WEIGHT], default 1. Raises ValueError for an invalid weight."""
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), 1.0
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not abs(number) < TOO_LARGE:
        rule = f"the weight must be a number below {TOO_LARGE:g}, such as --adapter {folder}=0.5"
        raise ValueError(f"--adapter {text}: {rule}")
    return Path(folder), number


def main() -> int:
    """Run the command; return 0 on success, 1 for a damaged checkpoint, 2 for invalid arguments."""
    arguments = read_arguments()
    average, decay = arguments.average, arguments.average_decay
    # Imported here: --help needs no torch.
    from megatron_llama.checkpoint.export import export, export_merged
    from megatron_llama.checkpoint.folder import find_checkpoint, local_model
    from megatron_llama.checkpoint.lora_adapter import MergedTensors
    from megatron_llama.checkpoint.tensor_source import CorruptFile
    from megatron_llama.config import ConfigError
    from megatron_llama.config.hub import check_upload, resolve_hub_name, upload_folder
    from megatron_llama.system.progress import ProgressBar
    from megatron_llama.system.wrapping import wrap
    from megatron_llama.tools.inference.saved_model import grow_for_adapters, open_adapter_for, open_hf_model

    try:
        checkpoint = (local_model if arguments.adapter else find_checkpoint)(arguments.checkpoint)
        if arguments.push_to_hub is not None:
            check_upload(arguments.push_to_hub)
        largest = int(arguments.max_shard_gb * 1e9)
        base = None if arguments.base is None else Path(resolve_hub_name(str(arguments.base), weights=True))
        with ProgressBar("export", "percent", 100) as bar:
            options: dict[str, Any] = {"merge": arguments.merge, "base": base, "average": average, "decay": decay}
            options["progress"] = lambda written, of: bar.show(100 * written // of)
            if arguments.adapter:
                checkpoint = Path(resolve_hub_name(str(checkpoint), weights=True))
                whole = grow_for_adapters(open_hf_model(checkpoint), [path for path, _ in arguments.adapter])
                opened = [
                    replace(open_adapter_for(path, whole), weight=weight, path=str(path))
                    for path, weight in arguments.adapter
                ]
                merged = MergedTensors.of(whole.stored, *opened)
                out = (arguments.out, arguments.dtype, largest, whole.tokenizer or checkpoint)
                made = export_merged(checkpoint, whole.model, merged, *out, options["progress"])
            else:
                made = export(checkpoint, arguments.out, arguments.dtype, largest, kind=arguments.format, **options)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except CorruptFile as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:  # a write to an open file has no name, a copy has two
        sys.stderr.write(f"{error.filename2 or error.filename or arguments.out}: {error.strerror or error}\n")
        return 1
    end = f", {'with' if made.tokenizer else 'without'} a tokenizer" if arguments.format == "hf" else ""
    others = f" (averaged with the {average - 1} before it)" if average > 1 else ""
    others += "".join(f" + {weight:g} · {path}" for path, weight in arguments.adapter)
    size = f"{made.bytes / 1e6:,.1f} MB of {made.dtype} in {len(made.files)} file{'s' * (len(made.files) > 1)}"
    sys.stdout.write(wrap(f"{checkpoint}{others} is now {made.folder}: {size}{end}") + "\n")
    if arguments.push_to_hub is not None:
        try:
            sys.stdout.write(f"uploaded: {upload_folder(made.folder, arguments.push_to_hub)}\n")
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    from megatron_llama.system.errors import run_main

    run_main(main)
