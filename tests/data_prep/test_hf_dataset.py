"""Downloaded Hugging Face datasets: files of the selected split, and reasons for the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.lib.input_files import InputFiles, find_sources
from data_prep.lib.sources import read_lines
from megatron_llama.system.errors import UserError
from tests.data_prep.columns import write_arrow, write_parquet

TRAIN = ["one", "two"], ["three"]


def texts(inputs: InputFiles) -> list[str]:
    return [json.loads(line)["text"] for source in inputs.sources for line in read_lines(source)]


def reasons(inputs: InputFiles) -> dict[str, str]:
    return {Path(path).name: reason for path, reason in inputs.not_taken.items()}


def records(names: list[str]) -> list[dict[str, str]]:
    return [{"text": name} for name in names]


def saved(folder: Path, shards: tuple[list[str], ...]) -> None:
    """Write a split in the layout of datasets.save_to_disk."""
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, part in zip(names, shards, strict=True):
        write_arrow(folder / name, records(part))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_save_to_disk_layout(tmp_path: Path) -> None:
    saved(tmp_path / "one", TRAIN)
    write_arrow(tmp_path / "one/cache-0123456789abcdef.arrow", records(["of a map"]))
    inputs = find_sources([str(tmp_path / "one")])
    assert texts(inputs) == ["one", "two", "three"]
    assert reasons(inputs) == {
        "cache-0123456789abcdef.arrow": "not listed in state.json",
        "dataset_info.json": "dataset description",
        "state.json": "dataset description",
    }
    saved(tmp_path / "all/train", TRAIN)
    saved(tmp_path / "all/test", (["held out"],))
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    inputs = find_sources([str(tmp_path / "all")])
    assert texts(inputs) == ["one", "two", "three"]
    assert reasons(inputs)["data-00000-of-00001.arrow"] == "split test; only the split train is used"
    assert texts(find_sources([str(tmp_path / "all/test")])) == ["held out"], "what is named is taken"
    (tmp_path / "one/data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="lists data-00001-of-00002.arrow, which does not exist"):
        find_sources([str(tmp_path / "one")])


def hub(folder: Path, **files: list[str]) -> Path:
    """Write a repository in the layout of the hub cache, with links into blobs."""
    for number, (name, part) in enumerate(files.items()):
        path = folder / "snapshots/0a1b" / name.replace("__", "/")
        blob = write_parquet(folder / "blobs" / f"b{number}", records(part))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".parquet").symlink_to(blob)
    (folder / "snapshots/0a1b/.gitattributes").write_text("*.parquet filter=lfs")
    return folder / "snapshots/0a1b"


SHARDS = {f"data__train-{n:05}-of-00002": part for n, part in enumerate(TRAIN)} | {"data__test-00000-of-00001": ["t"]}


def test_shards_by_name(tmp_path: Path) -> None:
    inputs = find_sources([str(hub(tmp_path, **SHARDS))])
    assert texts(inputs) == ["one", "two", "three"]
    assert reasons(inputs) == {
        ".gitattributes": "hidden",
        "test-00000-of-00001.parquet": "split test; only the split train is used",
    }


def test_configs_of_the_readme(tmp_path: Path) -> None:
    folder = hub(tmp_path, **SHARDS, more__x=["more"], more__y=["validation"], z=["unknown"])
    config = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: more
  %s
  data_files: {train: more/x.parquet, validation: [more/y.parquet]}
---
# Dataset
"""
    (folder / "README.md").write_text(config % "")
    with pytest.raises(UserError, match=r"several configs \(main, more\) and no default"):
        find_sources([str(folder)])
    (folder / "README.md").write_text(config % "default: true")
    inputs = find_sources([str(folder)])
    assert texts(inputs) == ["more"]
    assert reasons(inputs) == {
        ".gitattributes": "hidden",
        "README.md": "unsupported suffix",
        "test-00000-of-00001.parquet": "config main; only more is used",
        "train-00000-of-00002.parquet": "config main; only more is used",
        "train-00001-of-00002.parquet": "config main; only more is used",
        "y.parquet": "split validation; only the split train is used",
        "z.parquet": "not a data file in README.md",
    }
    assert texts(find_sources([f"{folder}/data/train-*"])) == ["one", "two", "three"], "a pattern names the file itself"
