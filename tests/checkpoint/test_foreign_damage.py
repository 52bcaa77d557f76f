"""Hostile and damaged files of other programs: bounded work, one message, no value read twice or as another type."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_llama.arch.foreign_tensor_layouts import megatron_names
from megatron_llama.arch.recognize_format import recognize
from megatron_llama.checkpoint.foreign import unpickle
from megatron_llama.checkpoint.foreign.describe import describe
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.foreign.unpickle import load_metadata, load_pickle
from megatron_llama.checkpoint.tensor_source import CorruptFile, check_cover
from megatron_llama.config import ConfigError
from scripts import inspect_checkpoint
from tests.checkpoint.runner import rejection
from tests.checkpoint.source_settings import our_model
from tests.messages import raises_with_message


def _nested_key(levels: int) -> bytes:
    """A key of nested pairs; each pair holds the previous one twice, so that its hash takes 2^levels steps."""
    return b"\x80\x02}(" + b")" + b"2\x86" * levels + b"Nu."


def _shared(levels: int) -> Any:
    value: Any = {"lr": 1.0}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return value


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


PICKLES: dict[str, tuple[bytes, str]] = {
    "memo": (b"\x80\x02Nr\xff\xff\xff\x3f0N.", "is not the metadata"),
    "hash": (_nested_key(60), "nested key"),
    "sharing": (pickle.dumps(_shared(40)), "it stands for"),
    "depth": (b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "more than 64 nested values"),
    "cycle": (pickle.dumps(_cycle()), "it contains itself"),
    "length": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "an opcode that neither torch.save nor DCP writes"),
    "quantized": (b"\x80\x02ctorch._utils\n_rebuild_qtensor\n.", "_rebuild_qtensor, an unknown kind of tensor"),
    "size": (b"\x80\x02" + b"N0" * 600 + b"N.", "more than 1,000 bytes"),
    "code": (pickle.dumps(print), "builtins.print, which can execute code"),
    "list of pairs": (b"\x80\x02ccollections\nOrderedDict\n](NNe\x85R.", "builds a dictionary"),
}


@pytest.mark.parametrize(("content", "words"), PICKLES.values(), ids=PICKLES)
def test_pickles_take_bounded_work(content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickle is .metadata, or inside a file of torch.save, whose reader has no such limits."""
    if "1,000 bytes" in words:
        monkeypatch.setattr(unpickle, "MOST_BYTES", 1000)
    (tmp_path / ".metadata").write_bytes(content)
    with raises_with_message(CorruptFile, words):
        load_metadata(tmp_path / ".metadata")
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/version", b"3\n")
    if words != "is not the metadata":
        with raises_with_message(CorruptFile, words):
            load_pickle(tmp_path / "common.pt", tmp_path / "common.pt", namespace=True)


def _rezip(path: Path, compression: int, change: Callable[[str, bytes], bytes] = lambda _, content: content) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, change(name, content))


def _shorter(name: str, content: bytes) -> bytes:
    return content[:-4] if "/data/" in name else content


def test_archives_are_checked_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    _rezip(path, zipfile.ZIP_STORED)
    assert load_pickle(path, path)["a"].shape == (1000,)
    _rezip(path, zipfile.ZIP_DEFLATED)
    with raises_with_message(CorruptFile, "is compressed"):
        load_pickle(path, path)
    _rezip(path, zipfile.ZIP_STORED, _shorter)
    with raises_with_message(CorruptFile, "has fewer than 4000 bytes"):
        load_pickle(path, path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data.pkl")), b"N.")
    with raises_with_message(CorruptFile, "two entries of one name"):
        load_pickle(path, path)


@pytest.mark.parametrize("zipped", [True, False])
def test_settings_and_random_states_of_megatron_are_inert(zipped: bool, tmp_path: Path) -> None:
    """Files of ranks contain NumPy's random state. Files of torch before 1.6 are five pickles."""
    content = {
        "args": argparse.Namespace(lr=1.0, params_dtype=torch.bfloat16),
        "rng_state": [{"np_rng_state": np.random.RandomState(0).get_state(), "torch_rng_state": torch.zeros(8)}],
    }
    path = tmp_path / "model_optim_rng.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    loaded = load_pickle(path, path, namespace=True)
    assert loaded["args"].params_dtype == torch.bfloat16 and loaded["rng_state"][0]["torch_rng_state"].shape == (8,)
    with raises_with_message(CorruptFile, "argparse.Namespace, which can execute code"):
        load_pickle(path, path)


ALL, LEFT, RIGHT = ((0, 0), (4, 6)), ((0, 0), (4, 3)), ((0, 3), (4, 3))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([ALL], ""),
        ([RIGHT, LEFT], ""),
        ([LEFT, ((0, 3), (2, 3)), ((2, 3), (2, 3)), ((0, 0), (0, 6))], ""),
        ([LEFT, LEFT], "twice"),
        ([LEFT, ((0, 2), (4, 3))], "twice"),
        ([LEFT], "has 12 of 24 values"),
        ([], "has 0 of 24 values"),
        ([LEFT, ((0, 3), (4, 4))], "exceeds the tensor"),
        ([ALL, ((-1, 0), (1, 6))], "exceeds the tensor"),
        ([((0,), (24,))], "exceeds the tensor"),
        ([ALL, ((9, 0), (0, 6))], "exceeds the tensor"),
    ],
)
def test_chunks_cover_a_tensor_once(chunks: list[Any], words: str) -> None:
    if not words:
        check_cover("w", (4, 6), chunks)
        return
    with raises_with_message(CorruptFile, words):
        check_cover("w", (4, 6), chunks)


def test_many_chunks_take_linear_time() -> None:
    """No two chunks overlap: comparing all pairs would exceed the time limit of a test."""
    count = 20_000
    with raises_with_message(CorruptFile, f"has {count * (count + 1) // 2} of {count**2} values of w"):
        check_cover("w", (count, count), [((at, at), (count - at, 1)) for at in range(count)])
    with raises_with_message(CorruptFile, "40 dimensions"):
        check_cover("w", (1,) * 40, [((0,) * 40, (1,) * 40)])


def test_a_scalar_has_one_chunk() -> None:
    check_cover("step", (), [((), ())])
    with raises_with_message(CorruptFile, "twice"):
        check_cover("step", (), [((), ()), ((), ())])


NORM = "decoder.final_layernorm.weight"
SQUARES = f"optimizer.state.exp_avg_sq.{NORM}"


def _source(folder: Path, **changes: Any) -> Path:
    """Write a torch_dist folder with moments; ``changes`` replaces tensors by name."""
    shapes = megatron_names(our_model(), stacked=True).shapes
    state = {name: torch.ones(shape) for name, shape in shapes.items()}
    kinds = ("exp_avg", "exp_avg_sq")
    state |= {f"optimizer.state.{kind}.{name}": torch.ones(shape) for kind in kinds for name, shape in shapes.items()}
    dcp.save({**state, **changes}, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 3}, folder / "common.pt")
    return folder


def _one_wrong(value: float) -> torch.Tensor:
    values = torch.ones(32)
    values[5] = value
    return values


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (NORM, torch.ones(32), ""),
        (NORM, torch.ones(32, dtype=torch.bfloat16), ""),
        (NORM, torch.ones(32, dtype=torch.int32), "has dtype int32"),
        (NORM, torch.ones(32, dtype=torch.complex64), "has dtype complex64"),
        (NORM, _one_wrong(float("nan")), "has nan at [5]"),
        (SQUARES, torch.ones(32, dtype=torch.int64), "has dtype int64"),
        (SQUARES, _one_wrong(float("nan")), "has nan at [5]"),
        (SQUARES, _one_wrong(-1.0), "has -1.0 at [5]"),
        (SQUARES.replace("_sq", ""), _one_wrong(-1.0), ""),
        (SQUARES.replace("_sq", ""), _one_wrong(float("inf")), "has inf at [5]"),
    ],
)
def test_dtypes_and_values(name: str, values: torch.Tensor, words: str, tmp_path: Path) -> None:
    answer = rejection(_source(tmp_path / "source", **{name: values}), our_model())
    assert words in answer and bool(answer) == bool(words)


def _edit(folder: Path, edit: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _repeat_a_chunk(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata[NORM].chunks
    chunks.append(chunks[0])


def _share_bytes(metadata: Any) -> None:
    storage = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[storage[SQUARES]] = metadata.storage_data[storage[NORM]]


def _lose_a_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata[NORM].chunks.clear()


def _exceed_the_file(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).length = 10**30


def _overlap(metadata: Any) -> None:
    """Two chunks of 16 values at 0 and at 8, each with its own bytes."""
    entry = metadata.state_dict_metadata[NORM]
    (index,) = [index for index in metadata.storage_data if index.fqn == NORM]
    first = metadata.storage_data[index]
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size([at]), torch.Size([16])) for at in (0, 8)]
    half = replace(first, length=first.length // 2)
    metadata.storage_data[index] = half
    second = replace(half, offset=half.offset + half.length)
    metadata.storage_data[MetadataIndex(NORM, torch.Size([8]))] = second


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_overlap, f"has values of {NORM} at [8] twice"),
        (_repeat_a_chunk, "twice"),
        (_share_bytes, "twice"),
        (_lose_a_chunk, "has 0 of 32 values"),
        (_exceed_the_file, "bytes"),
    ],
)
def test_metadata_of_a_folder_is_checked(edit: Callable[[Any], None], words: str, tmp_path: Path) -> None:
    folder = _source(tmp_path / "source")
    assert not rejection(folder, our_model())
    _edit(folder, edit)
    assert words in rejection(folder, our_model())


def test_an_expanded_chunk_is_rejected(tmp_path: Path) -> None:
    """A chunk of one stored value with the shape of many."""
    folder = _source(tmp_path / "source")
    stored = io.BytesIO()
    torch.save(torch.ones(1).expand(32), stored)
    (folder / "one.distcp").write_bytes(stored.getvalue())

    def point_to_it(metadata: Any) -> None:
        (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == NORM]
        info.relative_path, info.offset, info.length = "one.distcp", 0, len(stored.getvalue())

    _edit(folder, point_to_it)
    assert "several values in the same bytes" in rejection(folder, our_model())


def _ranks(folder: Path, **model: Any) -> Path:
    path = folder / "mp_rank_00/model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model, "iteration": 3}, path)
    return folder


def test_two_tensors_of_a_rank_in_the_same_bytes(tmp_path: Path) -> None:
    values = torch.zeros(64)
    with raises_with_message(CorruptFile, "a and b are in the same bytes"):
        describe(_ranks(tmp_path, a=values[:40], b=values[30:]))
    assert describe(_ranks(tmp_path, a=values[:32], b=values[32:])).rows


def test_a_pointer_that_is_a_pipe(tmp_path: Path) -> None:
    """The pipe is ignored: opening it would block."""
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    assert recognize(tmp_path) is None
    _source(tmp_path / "iter_0000003")
    assert recognize(tmp_path) is not None


def test_a_layer_of_a_large_number(tmp_path: Path) -> None:
    """The list of absent layers is short, and made without counting to the number."""
    names = {f"decoder.layers.{number}.x": torch.zeros(2) for number in (0, 900_000)}
    dcp.save(names, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for folder in (_ranks(tmp_path, **names), tmp_path / "dcp"):
        (missing,) = [part for part in describe(folder).missing if part.startswith("layers")]
        assert missing == "layers 1, 2, 3, 4, 5, 6, 7, 8 and 899991 more"


def test_text_of_a_checkpoint_does_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _source(tmp_path / "source")
    torch.save(
        {"iteration": 3, "args": argparse.Namespace(split="\x1b]0;x\x07\u202e", norm_epsilon=1e-5)},
        folder / "common.pt",
    )
    monkeypatch.setattr("sys.argv", ["inspect_checkpoint", str(folder)])
    assert inspect_checkpoint.main() == 0
    output = capsys.readouterr().out
    assert "\\x1b]0;x\\x07\\u202e" in output and not set("\x1b\x07\u202e") & set(output)


ODD: tuple[Any, ...] = (None, True, -1, 10**400, float("nan"), "x", "\x1b[31m", [], [None])
ODD += ({}, {"a": {}}, (1,), torch.zeros(2), 1 + 2j)


def test_odd_values_in_files_of_megatron(tmp_path: Path) -> None:
    """Values of any type in the place of numbers, groups and names: an answer or one message."""
    folder = _source(tmp_path / "source")
    places: list[Callable[[Any], dict[str, Any]]] = [
        lambda odd: {"iteration": odd, "consumed": {"consumed_samples": odd}},
        lambda odd: {"optimizer": odd},
        lambda odd: {"optimizer": {"param_groups": odd}},
        lambda odd: {"optimizer": {"param_groups": [{"lr": odd, "betas": odd, "step": odd, "wd_mult": odd}]}},
        lambda odd: {"args": argparse.Namespace(**{name: odd for name in ("lr", "split", "seed", "window_size")})},
        lambda odd: {"args": argparse.Namespace(**{name: odd for name in ("rotary_base", "swiglu", "vocab_size")})},
        lambda odd: {"args": argparse.Namespace(num_query_groups=odd, scale_factor=odd, train_iters=odd)},
        lambda odd: {"args": argparse.Namespace(global_batch_size=odd, train_iters=odd, hidden_dropout=odd)},
    ]
    for place in places:
        for odd in ODD:
            torch.save({"iteration": 3, **place(odd)}, folder / "common.pt")
            for read in (lambda: describe(folder), lambda: open_foreign(folder, our_model(), resumes=True)):
                try:
                    read()
                except (ConfigError, CorruptFile) as error:
                    assert str(error)
