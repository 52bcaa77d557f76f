"""What a checkpoint keeps of its run's data, as JSON: which datasets, read how, and where each one stands.

    {"order": "epochs",                          how sample n is found; "megatron" is megatron-core's order
     "consumed_samples": 4096,
     "kind": "pretrain", "seed": 1234, "split": "969,30,1", "seq_length": 256, "pack": false,
     "chat_template": "own", "template": null, "curriculum": [],
     "levels": [[0, {"vocab_rarity": 20}]],       of a run with a curriculum: (first sample, difficulties) so far
     "datasets": {prefix: {"sequences", "tokens", "bin_bytes", "fingerprint", "tokenizer_sha256"}},
     "training": [prefix],                        those that are not only validated on
     "segments": [{"first", "weights", "starts", "order", "shuffled"}]}     corpus/blend.py's, the last one in effect

Datasets are known by what is in them: one that was moved is the same dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_llama.config.data_settings import list_paths, split_weights
from megatron_llama.corpus.blend import EPOCHS, BlendTimeline, same_shares, segments_from_json
from megatron_llama.corpus.epochs import planned_timeline
from megatron_llama.corpus.indexed_format import dataset_facts, same_dataset
from megatron_llama.plan import Plan

Record = dict[str, Any]
READING = {
    "kind": "data.kind",
    "seed": "trainer.seed",
    "split": "data.split",
    "seq_length": "data.seq_length",
    "pack": "data.pack",
    "chat_template": "data.chat_template",
    "template": "data.template",
    "curriculum": "data.curriculum",
}
"""Entries of a record by the settings that they come from."""


def make_record(plan: Plan) -> Record:
    """The record of a run that starts anew with this plan, later blends included. Raises OSError or ValueError."""
    data = plan.config.data
    is_stream = data.kind == "pretrain" and not data.mock
    return {
        "order": EPOCHS,
        "consumed_samples": 0,
        "kind": "mock" if data.mock else data.kind,
        **{key: getattr(data, key) for key in READING if key not in ("kind", "seed")},
        "seed": plan.config.trainer.seed,
        "datasets": {} if data.mock else {path: dataset_facts(path) for _, path in list_paths(data)},
        "training": [] if data.mock else split_weights(data.prefixes)[1],
        "segments": [asdict(segment) for segment in planned_timeline(data).segments] if is_stream else [],
    }


def advanced(record: Record, timeline: BlendTimeline, consumed_samples: int) -> Record:
    """A record after ``consumed_samples`` of a stream."""
    segments = timeline.up_to(consumed_samples).segments
    stored = [asdict(segment) for segment in segments]
    return {**record, "order": segments[-1].order, "consumed_samples": consumed_samples, "segments": stored}


def moved_datasets(saved: Record, now: Record) -> dict[str, str]:
    """{prefix in ``saved``: prefix in ``now``} of the datasets of equal content that lie elsewhere now."""
    ours, moved = now["datasets"], {}
    for prefix, facts in saved["datasets"].items():
        if facts and not (prefix in ours and same_dataset(facts, ours[prefix])):
            new = [path for path in ours if path not in saved["datasets"] and same_dataset(facts, ours[path])]
            if new:
                moved[prefix] = new[0]
    return moved


def differences(saved: Record, now: Record) -> list[tuple[str, Any, Any, str]]:
    """(setting, saved value, new value, kind) of all in which ``now``, the record of a plan, differs from the record of
    the checkpoint that it goes on from.

    Kinds: ``reading`` changes what sample n is for all n (seed, split, length of a sequence, ...); ``content``: other
    data lies at the path of a dataset; ``blend``: other datasets or weights from here on, in which every dataset goes
    on where it stood; ``moved``: the same dataset lies elsewhere, which changes nothing.
    """
    saved = {"curriculum": [], **saved}  # records of before there was one
    found = [
        (setting, saved[key], now[key], "reading")
        for key, setting in READING.items()
        if key in saved and saved[key] != now[key]
    ]
    moved = moved_datasets(saved, now)
    found += [("data.prefixes", before, after, "moved") for before, after in moved.items()]
    for prefix, facts in saved["datasets"].items():
        if prefix not in moved and prefix in now["datasets"] and not same_dataset(facts, now["datasets"][prefix]):
            found.append(("data.prefixes", {prefix: facts}, {prefix: now["datasets"][prefix]}, "content"))
    before, after = _blend_in_effect(saved, saved), _blend_in_effect(now, saved)
    known = {moved.get(prefix, prefix): weight for prefix, weight in before.items()}
    if before and after and not same_shares(known, after):
        found.append(("data.prefixes", before, after, "blend"))
    theirs, ours = (record.get("training", [*record["datasets"]]) for record in (saved, now))
    if not before and not after and [moved.get(path, path) for path in theirs] != ours:
        found.append(("data.prefixes", theirs, ours, "reading"))
    return found


def changes_reading(saved: Record, now: Record) -> bool:
    """Whether sample n is another one for all n."""
    return any(kind == "reading" for *_, kind in differences(saved, now))


def _blend_in_effect(record: Record, saved: Record) -> Mapping[str, float]:
    """The weights that a record gives to the sample that comes next in ``saved``."""
    timeline = BlendTimeline(segments_from_json(record["segments"]))
    if not timeline.segments:
        return {}
    return timeline.segments[timeline.segment_of(saved["consumed_samples"])].weights
