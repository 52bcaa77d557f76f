"""Bad lines: --on-bad-line error stops, skip counts and quarantines. No document is lost silently."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pytest

from data_prep.lib import records
from data_prep.lib.records import REASONS, REPEATED_KEY
from megatron_llama.text.conversation import RecordError
from tests.data_prep.helpers import Run, assert_refused, listing, manifest, output_of, outputs, reference

BAD: dict[str, tuple[bytes, str]] = {
    "lone surrogate": (rb'{"text": "a \ud83d b"}', "lone_surrogate"),
    "second half of a surrogate pair": (rb'{"text": "\ude00"}', "lone_surrogate"),
    "null": (b'{"text": null}', "null_text"),
    "missing": (b'{"meta": {}}', "missing_text"),
    "number": (b'{"text": 5}', "text_not_a_string"),
    "list": (b'{"text": ["a", "b"]}', "text_not_a_string"),
    "a list for a record": (b'["text"]', "not_an_object"),
    "a string for a record": (b'"text"', "not_an_object"),
    "a number for a record": (b"17", "not_an_object"),
    "null for a record": (b"null", "not_an_object"),
    "bad UTF-8": (b'{"text": "caf\xe9"}', "bad_utf8"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\x80"}', "bad_utf8"),
    "overlong UTF-8": (b'{"text": "\xc0\xaf"}', "bad_utf8"),
    "truncated": (b'{"text": "hello wor', "bad_json"),
    "two records": (b'{"text": "a"}{"text": "b"}', "bad_json"),
    "raw control character": (b'{"text": "a\x01b"}', "bad_json"),
    "zeros": (bytes(40), "bad_json"),
    "nested deeper than any parser goes": (b'{"text": ' + b"[" * 200_000, "bad_json"),
    "too long": (b'{"text": "' + b"x" * 300_000 + b'"}', "line_too_long"),
}
ARGS = ("--max-line-mib", 0.25, "--block-mib", 0.01)


def test_every_reason_is_covered() -> None:
    assert {reason for _, reason in BAD.values()} == set(REASONS)


def with_bad(path: Path, bad: bytes) -> Path:
    path.write_bytes(b'{"text": "first"}\n\n' + bad + b'\n{"text": "last"}\n')
    return path


@pytest.mark.parametrize("name", BAD)
def test_error_names_file_line_and_reason(tmp_path: Path, preprocess: Run, name: str) -> None:
    bad, reason = BAD[name]
    path = with_bad(tmp_path / "a.jsonl", bad)
    done = preprocess("--input", path, "--output-prefix", tmp_path / "out/x", *ARGS)
    assert_refused(done, "a.jsonl, line 3", reason)
    assert listing(tmp_path / "out") == []


@pytest.mark.parametrize("compressed", [False, True])
def test_skip_counts_and_quarantines_each_line(
    tmp_path: Path, preprocess: Run, tokenizer: Path, compressed: bool
) -> None:
    lines: list[bytes] = []
    texts, bad_at = [], {}
    for number, (bad, reason) in enumerate(BAD.values()):
        texts.append(f"good {number} " * (1 + 400 * (number % 3 == 0)))
        lines.append(json.dumps({"text": texts[-1]}).encode())
        bad_at[len(lines) + 1] = (bad, reason)
        lines.append(bad)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    if compressed:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress(path.read_bytes()))
    done = preprocess("--input", path, "--output-prefix", tmp_path / "x", "--on-bad-line", "skip", *ARGS, workers=2)
    output = output_of(done)
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)
    report = manifest(tmp_path / "x")
    assert report["documents_read"] == 2 * len(BAD) == report["documents_written"] + report["documents_skipped"]
    assert report["skipped"] == Counter(reason for _, reason in bad_at.values())
    assert f"{len(BAD)} skipped" in output
    entries = [json.loads(line) for line in (tmp_path / report["quarantine"]).read_bytes().splitlines()]
    assert [(entry["line"], entry["reason"]) for entry in entries] == [
        (line, reason) for line, (_, reason) in bad_at.items()
    ]
    for entry in entries:
        raw = entry["raw"].encode() if "raw" in entry else base64.b64decode(entry["raw_base64"])
        if entry["complete"]:
            assert raw == bad_at[entry["line"]][0]
        else:
            assert bad_at[entry["line"]][0].startswith(raw)


def test_first_bad_line_is_reported_with_any_number_of_workers(tmp_path: Path, preprocess: Run) -> None:
    """A later block may finish first; the message must not depend on that."""
    good = json.dumps({"text": "word " * 300}).encode()
    lines = [good] * 400
    lines[233], lines[380] = b"null", b"{"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b""]))
    for workers in (1, 4):
        done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o/x", *ARGS, workers=workers)
        assert_refused(done, "a.jsonl, line 234", "not_an_object")


def test_bad_text_files(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    for name, data in [("a", b"fine"), ("b", b"caf\xe9"), ("c", b"y" * 300_000), ("d", b"")]:
        (tmp_path / f"{name}.txt").write_bytes(data)
    args = ("--input", tmp_path, "--output-prefix", tmp_path / "out/x", *ARGS)
    assert_refused(preprocess(*args), "b.txt", "bad_utf8")
    output_of(preprocess(*args, "--on-bad-line", "skip"))
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["fine", ""])
    assert manifest(tmp_path / "out/x")["skipped"] == {"bad_utf8": 1, "line_too_long": 1}


def test_repeated_keys_are_counted(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    lines = ['{"text": "a", "text": "b"}', '{"text": "c", "meta": {"text": 1}}', '{"x": 1, "x": "text", "text": "d"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out/x")
    assert f"1 {REPEATED_KEY}" in output_of(done)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["b", "c", "d"])
    assert manifest(tmp_path / "out/x")["changed"] == {REPEATED_KEY: 1}


def test_dump_texts_without_orjson_is_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(map(chr, (*range(0x300), 0x2028, 0x2029, 0xFFFD, 0xFFFF, 0x1F642, 0x10FFFF)))
    examples = [{text: text, "": ""}, [text, "a"], {"a": "caf\udce9"}]
    fast = [records.dump_texts(record) for record in examples]  # type: ignore[arg-type]
    monkeypatch.setattr(records, "_fast_dumps", None)
    assert [records.dump_texts(record) for record in examples] == fast  # type: ignore[arg-type]
    assert fast[2] == b'{"a":"caf\xe9"}'


def test_parsing_without_orjson_is_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [b'{"text": "a\\u00e9\\n\xc3\xa9"}', b' {"text":"", "x": NaN}\r', b'{"text": "a", "text": "b"}']
    lines = good + [bad for bad, reason in BAD.values() if reason != "line_too_long"]

    def parsed(line: bytes) -> list[str] | tuple[str, str]:
        try:
            return records.parse_line(line, ["text"])
        except RecordError as bad:
            return bad.reason, bad.detail

    fast = [parsed(line) for line in lines]
    monkeypatch.setattr(records, "loads", json.loads)
    assert [parsed(line) for line in lines] == fast
    assert fast[: len(good)] == [["aé\né"], [""], ["b"]]
