"""benchmarks/methods/retrieval.py: the task, and its runs in a short form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.methods import retrieval
from benchmarks.methods.retrieval import FILLER, KEYS, MODEL, NOTES, VALUES, VOCABULARY, Study
from megatron_llama.corpus.indexed_format import IndexedDataset


def test_each_value_follows_from_the_note_of_its_key(tmp_path: Path) -> None:
    retrieval.write_set(tmp_path / "set", 3, 256, seed=1)
    tokens, masks = IndexedDataset(str(tmp_path / "set")), IndexedDataset(str(tmp_path / "set_mask"))
    for number in range(3):
        ids, mask = tokens.document(number).astype(int), masks.document(number)
        assert len(ids) == len(mask) == 257 and ids.max() < VOCABULARY
        notes = {int(each) // VALUES: int(each) % VALUES for each in ids[ids < NOTES]}
        assert sorted(notes) == list(range(KEYS)) and (ids >= VOCABULARY - FILLER).sum() >= 256 - 3 * KEYS
        learned = np.flatnonzero(mask)
        assert len(learned) == KEYS and learned[-1] == 255, "the last token of the example is no answer"
        assert {ids[at - 1] - NOTES: ids[at] - NOTES - KEYS for at in learned} == notes


def test_a_short_form_of_the_study(tmp_path: Path) -> None:
    """Context parallelism does not change the losses; YaRN extends the trained weights by a factor of 4."""
    study = Study(tmp_path, 2048, short=2, long=2, extended=1)
    one = study.train("one", 128, 2, 1, MODEL)
    two = study.train("two", 128, 2, 1, MODEL, "trainer.cp=2")
    assert one.losses == pytest.approx(two.losses, abs=1e-5) and len(one.losses) == 2
    start = [*one.further(None), retrieval.YARN]
    unchanged = study.train("before", 512, 1, 1, start, *retrieval.UNCHANGED)
    assert unchanged.losses[0] < 2 * one.losses[-1]
    plan = (tmp_path / "before" / "plan.txt").read_text(encoding="utf-8")
    assert "yarn x 4" in plan and "sequence 512" in plan
