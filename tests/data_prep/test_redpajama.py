"""RedPajama: download against a local server, prepare of every subset's layout, V2's quality signals, the config."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from data_prep.lib.download import LLAMA_SHARES
from data_prep.redpajama import DEFAULT_CONF
from megatron_llama.system.files import try_lock
from tests.data_prep.helpers import (
    assert_refused,
    listing,
    manifest,
    output_of,
    outputs,
    reference,
    run_script,
    some_texts,
)
from tests.paths import ROOT

zstandard = pytest.importorskip("zstandard")
yaml = pytest.importorskip("yaml")


class Server(http.server.ThreadingHTTPServer):
    """Server with Range and ETag that can break connections and change a file, and records requests."""

    files: dict[str, bytes] = {}
    break_after: dict[str, list[int]] = {}
    requests: list[tuple[str, str | None]] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        start = 0
        range_header = self.headers.get("Range")
        if range_header and self.headers.get("If-Range") == tag:
            start = int(range_header.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        limits = self.server.break_after.get(self.path, [])
        body = data[start:]
        if limits:
            body = body[: limits.pop(0)]
            self.close_connection = True
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.files, server.break_after, server.requests = {}, {}, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def serve(server: Server) -> str:
    """Serve seven files of three subsets and their list; return the list's URL."""
    base = f"http://127.0.0.1:{server.server_address[1]}/v1.0.0/"
    names = ["arxiv/arxiv_0.jsonl", "book/book.jsonl", *(f"c4/c4-train.{n}.jsonl" for n in range(5))]
    for number, name in enumerate(names):
        server.files["/v1.0.0/" + name] = (
            json.dumps({"text": f"document {number}", "meta": {}}) + "\n"
        ).encode() * 5000
    server.files["/v1.0.0/urls.txt"] = "\n".join(base + name for name in names).encode()
    return base + "urls.txt"


def download(url: str, folder: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run_script("redpajama.py", "download", "--url-list", url, "--output", folder, *more)


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_download_subsets_sample_and_hashes(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name[8:]}\n" for name, data in server.files.items())
    (tmp_path / "SHA256SUMS").write_text(sums)
    more = ("--subsets", "c4", "books", "--sample", 2)
    output = output_of(download(url, tmp_path / "d", *more, "--sha256sums", tmp_path / "SHA256SUMS"))
    assert tree(tmp_path / "d") == ["book/book.jsonl", "c4/c4-train.0.jsonl", "c4/c4-train.2.jsonl"]
    assert "3 of 7 files, 3 with a sha256" in output and output.count("sha256 verified") == 3
    for name in tree(tmp_path / "d"):
        assert (tmp_path / "d" / name).read_bytes() == server.files["/v1.0.0/" + name]
    assert output_of(download(url, tmp_path / "d", *more)).count("already downloaded") == 3


def test_download_resumes_after_broken_connections(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    name = "/v1.0.0/arxiv/arxiv_0.jsonl"
    server.break_after[name] = [1000, 70_000, 5]
    output_of(download(url, tmp_path, "--subsets", "arxiv"))
    assert (tmp_path / "arxiv/arxiv_0.jsonl").read_bytes() == server.files[name]
    assert tree(tmp_path) == ["arxiv/arxiv_0.jsonl"]
    sent = [range_header for path, range_header in server.requests if path == name]
    assert sent == [None, "bytes=1000-", "bytes=71000-", "bytes=71005-"]


def test_a_part_of_a_file_that_changed_is_not_continued(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    name = "/v1.0.0/arxiv/arxiv_0.jsonl"
    server.break_after[name] = [1000] + [0] * 9
    assert_refused(download(url, tmp_path, "--subsets", "arxiv"), "arxiv_0.jsonl", "Rerun the same command", status=1)
    assert (tmp_path / "arxiv/arxiv_0.jsonl.part").stat().st_size == 1000
    server.break_after.clear()
    server.files[name] = b'{"text": "another"}\n' * 300
    with patch.object(Path, "write_text", side_effect=KeyboardInterrupt):  # killed when it notes the version
        assert download(url, tmp_path, "--subsets", "arxiv").returncode == 130
    assert not (tmp_path / "arxiv/arxiv_0.jsonl.part").exists()
    output_of(download(url, tmp_path, "--subsets", "arxiv"))
    assert (tmp_path / "arxiv/arxiv_0.jsonl").read_bytes() == server.files[name]


def test_missing_files_and_wrong_hashes_are_reported_last(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    del server.files["/v1.0.0/book/book.jsonl"]
    done = download(url, tmp_path / "a")
    assert_refused(done, "1 of 7 downloads failed", "book.jsonl", "404")
    assert len(tree(tmp_path / "a")) == 6
    (tmp_path / "sums").write_text("0" * 64 + "  arxiv/arxiv_0.jsonl\n")
    done = download(url, tmp_path / "b", "--subsets", "arxiv", "--sha256sums", tmp_path / "sums")
    assert_refused(done, "sha256", status=1)
    assert tree(tmp_path / "b") == ["arxiv/arxiv_0.jsonl.part.json"] or tree(tmp_path / "b") == []


def test_unreadable_lists_are_refused(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    assert_refused(download(url, tmp_path / "d", "--subsets", "c5"), "c5", "arxiv, book, c4")
    assert_refused(download(url.replace("urls.txt", "none.txt"), tmp_path / "d"), "none.txt")
    assert_refused(download("http://127.0.0.1:1/urls.txt", tmp_path / "d"), "cannot read")
    assert listing(tmp_path / "d") == []


def write_1t(folder: Path) -> dict[str, list[str]]:
    """Write every subset in the layout of 1T; return the texts."""
    texts = {name: some_texts(20, seed=number) for number, name in enumerate(LLAMA_SHARES)}
    places = {
        "common_crawl": "common_crawl/2019-30/en_head_0000.json.gz.dedup.classifier.jsonl.zst",
        "c4": "c4/c4-train.00000-of-01024.jsonl",
        "github": "github/filtered_0a.sampled.jsonl",
        "arxiv": "arxiv/arxiv_023.jsonl",
    }
    for name, texts_of_subset in texts.items():
        more = {"pred_label": "__label__cc"} if name == "common_crawl" else {"meta": {"url": "x"}}
        data = "".join(json.dumps({**more, "text": text}) + "\n" for text in texts_of_subset).encode()
        path = folder / places.get(name, f"{name}/{name}.jsonl")
        path.parent.mkdir(parents=True)
        path.write_bytes(zstandard.compress(data) if name == "common_crawl" else data)
    return texts


def prepare(tmp_path: Path, tokenizer: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run_script(
        *("redpajama.py", "prepare", "--input", tmp_path / "rp", "--output", tmp_path / "out", "--workers", 1),
        *("--tokenizer-model", tokenizer, "--conf", tmp_path / "conf/redpajama.yaml", *more),
    )


def test_prepare_every_subset_and_write_the_blend(tmp_path: Path, tokenizer: Path) -> None:
    texts = write_1t(tmp_path / "rp")
    output_of(prepare(tmp_path, tokenizer))
    for name, expected in texts.items():
        assert outputs(tmp_path / "out" / name) == reference(tokenizer, expected), name
    conf = yaml.safe_load((tmp_path / "conf/redpajama.yaml").read_text())
    assert conf["prefixes"][1::2] == [str(tmp_path / f"out/{name}_text_document") for name in LLAMA_SHARES]
    assert conf["prefixes"][0::2] == [0.67, 0.15, 0.045, 0.045, 0.045, 0.025, 0.02]
    assert conf["name"] == "redpajama" and conf["split"] == "980,10,10" and conf["tokenizer"] == str(tokenizer)
    assert prepare(tmp_path, tokenizer).stdout.count("already complete") == 7
    assert "/" + str(DEFAULT_CONF.parent.relative_to(ROOT)) + "/" in (ROOT / ".gitignore").read_text().split()
    assert_refused(prepare(tmp_path, tokenizer, "--subsets", "gutenberg"), "gutenberg", "common_crawl")


def write_v2(folder: Path, count: int = 40, drop: int | None = None) -> list[str]:
    """Two files of V2 with their signals; ``drop`` omits a line of the second signals file."""
    texts = [text or "x" for text in some_texts(2 * count)]
    for number in range(2):
        shard = f"2023-06/{number:04}/en_head"
        part = texts[number * count : (number + 1) * count]
        documents = [json.dumps({"url": "u", "raw_content": text, "language": "en"}) for text in part]
        signals = []
        for line, text in enumerate(part):
            words = float(len(text.split()))
            spans = {"rps_doc_word_count": [[0, len(text), words]], "ccnet_perplexity": [[0, len(text), 100.0 + line]]}
            signals.append(json.dumps({"id": f"{shard}.json.gz/{line}", "quality_signals": json.dumps(spans)}))
        if drop is not None and number == 1:
            del signals[drop]
        for kind, lines, end in (
            ("documents", documents, ".json.gz"),
            ("quality_signals", signals, ".signals.json.gz"),
        ):
            path = folder / kind / (shard + end)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return texts


def test_v2_with_and_without_quality_rules(tmp_path: Path, tokenizer: Path) -> None:
    texts = write_v2(tmp_path / "rp")
    done = prepare(tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out/v2", "raw_content") == reference(tokenizer, texts)
    conf = yaml.safe_load((tmp_path / "conf/redpajama.yaml").read_text())
    assert conf["prefixes"] == [1.0, str(tmp_path / "out/v2_raw_content_document")]
    rules = ("--quality", "rps_doc_word_count>=5", "ccnet_perplexity<130")
    output = output_of(prepare(tmp_path, tokenizer, *rules, "--output", tmp_path / "good"))
    expected = [text for line, text in enumerate(texts) if len(text.split()) >= 5 and line % 40 < 30]
    assert 0 < len(expected) < len(texts)
    assert outputs(tmp_path / "good/v2", "raw_content") == reference(tokenizer, expected)
    assert f"80 documents = {len(expected)} kept" in output
    assert manifest(tmp_path / "good/v2", "raw_content")["documents_read"] == len(expected)
    assert_refused(prepare(tmp_path, tokenizer, "--quality", "x>1", "--output", tmp_path / "good"), "other rules")


@pytest.mark.parametrize("drop", [0, 20, 39])
def test_mismatched_signals_are_rejected(tmp_path: Path, tokenizer: Path, drop: int) -> None:
    write_v2(tmp_path / "rp", drop=drop)
    done = prepare(tmp_path, tokenizer, "--quality", "rps_doc_word_count>=5")
    assert_refused(done, "0001", "lines are missing" if drop < 39 else "quality signals differ")
    assert not (tmp_path / "conf").exists()


def test_wrong_quality_rules_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    write_v2(tmp_path / "rp")
    assert_refused(prepare(tmp_path, tokenizer, "--quality", "words=5"), "words=5", "SIGNAL>=NUMBER")
    assert_refused(prepare(tmp_path, tokenizer, "--quality", "no_such>5"), "no_such", "ccnet_perplexity")


def test_a_part_that_another_process_downloads_is_not_written(tmp_path: Path, server: Server) -> None:
    url = serve(server)
    (tmp_path / "arxiv").mkdir()
    part = tmp_path / "arxiv" / "arxiv_0.jsonl.part"
    with open(part, "wb") as file:
        file.write(b"half")
        file.flush()
        assert try_lock(file) is True
        assert_refused(download(url, tmp_path, "--subsets", "arxiv"), "another process is downloading it", status=1)
        assert part.read_bytes() == b"half"
    output_of(download(url, tmp_path, "--subsets", "arxiv"))
    assert not part.exists()
