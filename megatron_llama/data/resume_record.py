"""Data record of a checkpoint, as JSON: the datasets, how they are read, and the position in each.

    {"order": "epochs",                          order of samples; "megatron" is megatron-core's order
     "consumed_samples": 4096,
     "kind": "pretrain", "seed": 1234, "split": "969,30,1", "seq_length": 256, "pack": false,
     "chat_template": "own", "chat_template_kwargs": {}, "template": null, "curriculum": [],
     "levels": [[0, {"vocab_rarity": 20}]],       with a curriculum: (first sample, difficulties) so far
     "datasets": {prefix: {"sequences", "tokens", "bin_bytes", "fingerprint", "tokenizer_sha256",
                           "content" or "content_<MiB>"}},  corpus/content_hash.py; missing in records of older versions
     "training": [prefix],                        training datasets
     "segments": [{"first", "weights", "starts", "order", "shuffled"}]}     corpus/blend.py's, the last one in effect

Datasets are identified by content: a moved dataset is the same dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_llama.config.data_settings import list_paths, split_weights
from megatron_llama.corpus.blend import EPOCHS, BlendTimeline, same_shares, segments_from_json
from megatron_llama.corpus.content_hash import content_facts
from megatron_llama.corpus.indexed_format import dataset_facts, same_dataset
from megatron_llama.corpus.splits import planned_timeline
from megatron_llama.plan import Plan

Record = dict[str, Any]
READING = {
    "kind": "data.kind",
    "seed": "trainer.seed",
    "split": "data.split",
    "seq_length": "data.seq_length",
    "pack": "data.pack",
    "chat_template": "data.chat_template",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "template": "data.template",
    "curriculum": "data.curriculum",
}
"""Settings that determine sample n, by entry of the record."""


def make_record(plan: Plan) -> Record:
    """Return the record of a new run with this plan, including later blends. Hashes the datasets (content_facts).

    Raises OSError or ValueError.
    """
    data = plan.config.data
    is_stream = data.kind == "pretrain" and not data.mock
    hashes = {} if data.mock else content_facts([path for _, path in list_paths(data)])
    return {
        "order": EPOCHS,
        "consumed_samples": 0,
        "kind": "mock" if data.mock else data.kind,
        **{key: getattr(data, key) for key in READING if key not in ("kind", "seed")},
        "seed": plan.config.trainer.seed,
        "datasets": {prefix: {**dataset_facts(prefix), **content} for prefix, content in hashes.items()},
        "training": [] if data.mock else split_weights(data.prefixes)[1],
        "segments": [asdict(segment) for segment in planned_timeline(data).segments] if is_stream else [],
    }


def advance_record(record: Record, timeline: BlendTimeline, consumed_samples: int) -> Record:
    """Return the record after ``consumed_samples`` of a stream."""
    segments = timeline.up_to(consumed_samples).segments
    stored = [asdict(segment) for segment in segments]
    return {**record, "order": segments[-1].order, "consumed_samples": consumed_samples, "segments": stored}


def moved_datasets(saved: Record, now: Record) -> dict[str, str]:
    """Return {prefix in ``saved``: prefix in ``now``} of datasets with equal content and another path."""
    ours, moved = now["datasets"], {}
    for prefix, facts in saved["datasets"].items():
        if facts and not (prefix in ours and same_dataset(facts, ours[prefix])):
            new = [path for path in ours if path not in saved["datasets"] and same_dataset(facts, ours[path])]
            if new:
                moved[prefix] = new[0]
    return moved


def differences(saved: Record, now: Record) -> list[tuple[str, Any, Any, str]]:
    """Compare the record of a checkpoint with ``now``, the record of the resuming plan.

    Returns:
        (setting, saved value, new value, kind) of each difference. Kinds:

        * ``reading``: changes sample n for all n (seed, split, sequence length, ...).
        * ``content``: a path has other data.
        * ``blend``: other datasets or weights from here on. Each dataset continues at its position.
        * ``moved``: the same dataset at another path. No effect.
    """
    saved = {"curriculum": [], **saved}  # records of older versions lack it
    changes = [
        (setting, saved[key], now[key], "reading")
        for key, setting in READING.items()
        if key in saved and saved[key] != now[key]
    ]
    moved = moved_datasets(saved, now)
    training = set(saved.get("training") or saved["datasets"]).union(*[part["weights"] for part in saved["segments"]])
    lists = {prefix: f"data.{'' if prefix in training else 'validation_'}prefixes" for prefix in saved["datasets"]}
    changes += [(lists[before], before, after, "moved") for before, after in moved.items()]
    for prefix, facts in saved["datasets"].items():
        if prefix not in moved and prefix in now["datasets"] and not same_dataset(facts, now["datasets"][prefix]):
            changes.append((lists[prefix], {prefix: facts}, {prefix: now["datasets"][prefix]}, "content"))
    before, after = _blend_in_effect(saved, saved), _blend_in_effect(now, saved)
    known = {moved.get(prefix, prefix): weight for prefix, weight in before.items()}
    if before and after and not same_shares(known, after):
        changes.append(("data.prefixes", before, after, "blend"))
    old_paths, new_paths = (record.get("training", [*record["datasets"]]) for record in (saved, now))
    if not before and not after and [moved.get(path, path) for path in old_paths] != new_paths:
        changes.append(("data.prefixes", old_paths, new_paths, "reading"))
    return changes


def changes_reading(saved: Record, now: Record) -> bool:
    """Whether a change affects sample n for all n (kind ``reading``)."""
    return any(kind == "reading" for *_, kind in differences(saved, now))


def _blend_in_effect(record: Record, saved: Record) -> Mapping[str, float]:
    """Return a record's weights at the next sample of ``saved``."""
    timeline = BlendTimeline(segments_from_json(record["segments"]))
    if not timeline.segments:
        return {}
    return timeline.segments[timeline.segment_of(saved["consumed_samples"])].weights
