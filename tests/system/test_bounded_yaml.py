"""YAML from strangers: small files that stand for much are refused in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.system.files import MOST_BYTES, MOST_VALUES, check_yaml

TENFOLD = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n".join(["a0: &a0 [x]", *TENFOLD]), "values after aliases are expanded"),
        ("a: &a [*a]", "contains itself"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("# " + "x" * MOST_BYTES, "bytes"),
        ("[" + "1," * MOST_VALUES + "1]", "values after aliases are expanded"),
    ],
    ids=["aliases of aliases", "a cycle", "depth", "size", "values"],
)
def test_a_bomb_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        check_yaml(path)


def test_what_people_write_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: &base {lr: 1e-3}\noptim: *base\nsteps: [1, 2, *base]\n", encoding="utf-8")
    check_yaml(path)
    path.write_text("", encoding="utf-8")
    check_yaml(path)
