"""Convert a command line of Megatron-LM's pretrain_gpt.py. Tables of its flags: megatron.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.tools.import_config import conversion
from megatron_llama.tools.import_config.conversion import MOST_UNKNOWN, Conversion, Kind, is_count
from megatron_llama.tools.import_config.read_script import Command, ScriptError, read_script

_INTEGER, _NUMBER = re.compile(r"[-+]?\d{1,18}"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?")
_TEXTS = ("--save", "--load", "--data-path", "--train-data-path", "--data-cache-path", "--tokenizer-model", "--split")
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_DEVICES = ("--nproc-per-node", "--nnodes")


def convert_script(path: Path, flags: Sequence[str], given: Mapping[str, str]) -> Conversion:
    """Convert a bash script, a text file of flags, or flags alone (``path`` ends in .py, or does not exist).

    Args:
        path: The script.
        flags: Flags that override the script's.
        given: Variables of the script's environment, and its arguments under "1", "2", ...

    Raises ConfigError with all reasons why the command cannot be converted.
    """
    try:
        command = Command([]) if path.suffix == ".py" else read_script(path, given)
    except ScriptError as error:
        rule = f"cannot be read as a bash script: {error}"
        raise ConfigError([Problem("file", str(path), rule, "write the script that starts training")]) from error
    words = command.words
    start = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    values = _flags([*words[start:], *flags], command.notes)
    converted = MegatronConversion(values, path.stem)
    converted.assumed += command.notes
    processes, nodes = map(_flags(words[:start], []).get, _DEVICES)
    if isinstance(processes, int) and isinstance(nodes, int):
        converted.world_size = processes * nodes
    return converted.run()


def _flags(words: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return {flag: value}. The last of repeated flags counts, as in argparse."""
    given = dict[str, list[str]]()
    last, repeated = list[str](), dict[str, str]()
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            name = name.replace("_", "-") if "opt_param" not in name else name
            if name in given:
                repeated[name] = f"{name} is given several times: the last value counts"
            last = given[name] = [value] if value else []
        else:
            last.append(word)
    notes += list(repeated.values())[:MOST_UNKNOWN]
    if len(repeated) > MOST_UNKNOWN:
        notes.append(f"{len(repeated) - MOST_UNKNOWN:,} more flags are given several times")
    return {name: _value(name, texts) for name, texts in given.items()}


def _value(name: str, texts: list[str]) -> Any:
    values = [text.strip("'\"") for text in texts]
    parsed = values if name in _TEXTS else [_parse(text) for text in values]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def _parse(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else {"true": True, "false": False}.get(text.lower(), text)


class MegatronConversion(Conversion):
    """Conversion of Megatron-LM's flags; each method converts the flags of one subject."""

    tables = conversion.load_tables("megatron", "--")
    relevant = ("--data-path", "--train-data-path", "--load")
    add = "{key} {value} after the file"
    reference = "refers to {first}, which the script does not set; write NAME=VALUE after the file, or the flag"
    unset = "refers to a variable that the script does not set"

    def subjects(self) -> None:
        """Convert all subjects."""
        self.shape()
        self.positions()
        self.length()
        self.lr_schedule()
        self.data()
        self.layout()
        self.precision()
        self.output()
        self.one_to_one()

    def shape(self) -> None:
        """Convert the shape. Megatron's defaults are GPT-2's: each one that is no Llama's is reported."""
        get, settings = self.get, self.settings
        for key in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"):
            if get(key) is None:
                self.require(key)
        if is_count(hidden := get("--hidden-size")):
            settings["model.intermediate_size"] = int(hidden * 8 / 3 / 64) * 64 if get("--swiglu") else 4 * hidden
        settings["model.max_position_embeddings"] = get("--seq-length")
        if get("--group-query-attention"):
            self.convert_key("--num-query-groups", "model.num_key_value_heads", get("--num-query-groups", 1))
        self.record("--num-query-groups", Kind.MEANINGLESS, why="off without --group-query-attention")
        untied = bool(get("--untie-embeddings-and-output-weights"))
        self.convert_key("--untie-embeddings-and-output-weights", "model.tie_word_embeddings", not untied)
        if not get("--disable-bias-linear"):
            settings |= {"model.attention_bias": True, "model.mlp_bias": True}
            self.assumed.append("model.attention_bias and mlp_bias=true: --disable-bias-linear is not given")
        kinds = [key for key in ("--add-qkv-bias", "--qk-layernorm") if get(key)]
        if len(kinds) == 2:
            self.record(kinds[1], Kind.UNSUPPORTED, why="only together with no biases of q, k and v, as in Qwen 3")
        if kinds and (get("--disable-bias-linear") or kinds[0] == "--qk-layernorm"):
            kind = "qwen2" if kinds[0] == "--add-qkv-bias" else "qwen3"
            self.convert_key(kinds[0], "model.model_type", kind)
        self.record_defaults("LayerNorm", "--normalization")
        self.record_defaults(False, "--swiglu")
        self.record_defaults(0.1, "--hidden-dropout", "--attention-dropout")
        size = get("--vocab-size", get("--padded-vocab-size"))
        if size is not None:
            null = "the end-of-document token of NullTokenizer is omitted" if self._tokenizer("Null") else ""
            settings["model.vocab_size"] = size
            self.record("--vocab-size", Kind.RENAMED, f"model.vocab_size={size}", null)
        else:
            names = [get("--tokenizer-model"), get("--tokenizer-type"), get("--vocab-file")]
            size, known_by = conversion.embedding_rows([str(name) for name in names if name])
            settings["model.vocab_size"] = size
            if known_by:
                self.assumed.append(f"model.vocab_size={size}, {known_by}: write --vocab-size N after the file")

    def _tokenizer(self, *kinds: str) -> bool:
        return any(kind in str(self.get("--tokenizer-type")) for kind in kinds)

    def positions(self) -> None:
        """Convert the rotary embedding and the window of attention."""
        if not self.get("--use-rotary-position-embeddings"):
            self.record_defaults("learned_absolute", "--position-embedding-type")
        factor, stretch = self.get("--rope-scaling-factor", 8.0), self.get("--rotary-seq-len-interpolation-factor")
        if self.get("--use-rope-scaling"):
            scaling = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
            self.convert_key("--use-rope-scaling", "model.rope_scaling", scaling)
        elif stretch not in (None, 1):
            scaling = {"rope_type": "linear", "factor": stretch}
            self.convert_key("--rotary-seq-len-interpolation-factor", "model.rope_scaling", scaling)
        if window := self.get("--window-size"):
            left = _parse(str(window[0] if isinstance(window, list) else window).strip("()").partition(",")[0])
            window = left + 1 if is_count(left) and left >= 0 else None
            self.convert_key("--window-size", "model.sliding_window", window, "includes the token itself")

    def length(self) -> None:
        """Convert samples to steps of the global batch."""
        if self._samples("--train-samples") is not None:
            self.convert_key("--train-samples", "trainer.steps", self._samples("--train-samples"))
        self.steps = self.get("--train-iters", self.settings.get("trainer.steps"))

    def _samples(self, key: str) -> int | None:
        """Return the steps of a number of samples."""
        samples, batch = self.get(key), self.get("--global-batch-size")
        return samples // batch if is_count(samples) and is_count(batch) and batch > 0 else None

    def lr_schedule(self) -> None:
        """Convert optimizer and schedule; the defaults are Megatron-LM's."""
        style = self.get("--lr-decay-style", "linear")
        self.schedule = _SCHEDULES.get(style, "cosine")
        if style in _SCHEDULES:
            self.record("--lr-decay-style", Kind.RENAMED, f"optim={self.schedule}")
        rule = "cosine, linear, constant and WSD are supported; cosine is written"
        self.record("--lr-decay-style", Kind.UNSUPPORTED, why=rule)
        if style == "WSD":
            self.record_defaults("exponential", "--lr-wsd-decay-style")
        else:
            self.record("--lr-wsd-decay-style", Kind.MEANINGLESS, why="converted with other flags")
        self.settings |= {"optim.warmup_steps": 0, "optim.constant_steps": 0, "optim.min_lr": 0.0}
        self.settings |= {"optim.weight_decay": 0.01, "optim.name": "adamw"}
        settings = {"decay": "schedule.max_steps", "warmup": "warmup_steps", "wsd-decay": "constant_steps"}
        for key, setting in settings.items():
            steps = self.get(f"--lr-{key}-iters", self._samples(name := f"--lr-{key}-samples"))
            name = f"--lr-{key}-iters" if f"--lr-{key}-iters" in self.values else name
            if steps is not None and (key != "decay" or steps != self.steps):
                self.convert_key(name, f"optim.{setting}", steps)
        fraction, ends = self.get("--lr-warmup-fraction"), self.settings.get("optim.schedule.max_steps", self.steps)
        if isinstance(fraction, float | int) and is_count(ends):
            self.convert_key("--lr-warmup-fraction", "optim.warmup_steps", int(fraction * ends))
        betas = [self.get("--adam-beta1", 0.9), self.get("--adam-beta2", 0.999)]
        self.convert_key("--adam-beta1 --adam-beta2", "optim.betas", betas)
        self.convert_key("--clip-grad", "optim.clip", self.get("--clip-grad", 1.0) or None)

    def data(self) -> None:
        """Convert the dataset and the document mask."""
        key = "--data-path" if self.get("--data-path") else "--train-data-path"
        prefixes = self.get(key) or []
        prefixes = [prefixes] if isinstance(prefixes, str) else [_parse(text) for text in prefixes]
        self.dataset(key, prefixes, is_missing=not self.get("--mock-data"))
        self.settings |= {"data.split": "1,0,0"} if prefixes and key == "--train-data-path" else {}
        if self._tokenizer("SentencePiece", "Llama2") and self.get("--tokenizer-model"):
            self.convert_key("--tokenizer-model", "data.tokenizer", self.get("--tokenizer-model"))
        self.mask_documents("--reset-attention-mask", "--reset-position-ids")

    def layout(self) -> None:
        """Convert the sharding over data-parallel ranks, pipeline stages and recomputation."""
        get, layers, pp = self.get, self.get("--num-layers"), self.get("--pipeline-model-parallel-size", 1)
        zero = int(bool(get("--use-distributed-optimizer")))
        if get("--use-torch-fsdp2"):
            zero = 2 if get("--torch-fsdp2-no-reshard-after-forward") else 3
        elif get("--use-megatron-fsdp") or get("--use-custom-fsdp"):
            zero = _SHARDING.get(get("--data-parallel-sharding-strategy", "no_shard"), 3)
        keys = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp", "--use-distributed-optimizer")
        self.convert_key(next((key for key in keys if get(key)), keys[3]), "trainer.zero", zero)
        chunk = get(key := "--num-layers-per-virtual-pipeline-stage")
        if chunk and is_count(layers) and is_count(pp):
            self.convert_key(key, "trainer.vpp", layers // pp // chunk)
        ends = [get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
        if any(ends) and is_count(layers) and is_count(pp) and pp <= min(layers, 10_000) and not chunk:
            middle = pp - sum(end is not None for end in ends)
            each = (layers - sum(filter(None, ends))) // max(middle, 1)
            stages = [*ends[:1], *[each] * middle, *ends[1:]]
            self.settings["trainer.pipeline_layers"] = [stage for stage in stages if stage is not None]
        layout = "--pipeline-model-parallel-layout --pipeline-model-parallel-split-rank"
        self.record(layout, Kind.SAME_TRAINING, why="write trainer.pipeline_layers=[...], the layers of each stage")
        recompute = get("--recompute-granularity", "selective" if get("--recompute-activations") else "none")
        key = "--recompute-granularity" if get("--recompute-granularity") else "--recompute-activations"
        self.convert_key(key, "trainer.recompute", recompute)

    def precision(self) -> None:
        """Convert the precision; Megatron's bf16 has fp32 master weights and gradient sums."""
        self.settings["trainer.precision"] = "bf16" if self.get("--fp16") or self.get("--bf16") else "fp32"
        self.record("--bf16", Kind.RENAMED, "trainer.precision=bf16", "fp32 master weights and gradient sums")
        self.record("--fp16", Kind.UNSUPPORTED, why="fp16 with loss scaling is not supported; bf16 is written")
        if self.get("--grad-reduce-in-bf16"):
            why = "gradients are sent in bf16; here micro batches are summed in fp32"
            self.convert_key("--grad-reduce-in-bf16", "trainer.grad_reduce", "bf16", why)
        if self.get("--fp8-format") and self.get("--fp8-recipe") == "tensorwise":
            self.convert_key("--fp8-format", "trainer.float8", "tensorwise")
        why = "write trainer.float8=tensorwise, whose scales come from the current tensor"
        self.record("--fp8-format", Kind.UNSUPPORTED, why=why)

    def output(self) -> None:
        """Convert validation, checkpoints and logs."""
        load = self.get("--load")
        if load is not None and load == self.get("--save"):
            self.record("--load", Kind.RENAMED, "checkpoint.resume=auto", "equal to --save")
        why = "not part of a config: write checkpoint.resume=FOLDER, or init_from=FOLDER for its weights"
        self.record("--load", Kind.UNSUPPORTED, why=why)
        validation = self.get("--eval-interval", 1000), self.get("--eval-iters", 100)
        held_out = f"{self.settings.get('data.split') or self.get('--split', '969,30,1')},0".split(",")[1]
        if not all(validation) or not float(held_out):
            validation = None, None
            self.record("--eval-interval --eval-iters", Kind.MEANINGLESS, why="there is no validation")
        self.settings["trainer.val_every_steps"], self.settings["trainer.val_steps"] = validation
        if self.get("--tensorboard-dir"):
            self.convert_key("--tensorboard-dir", "logging.tensorboard", True, "in the run's folder")
        if self.get("--wandb-project"):
            self.settings["logging.wandb"] = "online"
        if self.get(key := "--save-retain-interval"):
            self.settings["checkpoint.keep"] = 1
            self.convert_key(key, "checkpoint.keep_every", self.get(key))
