"""The tokenizers of data preparation's tests: text is one subject with it."""

from __future__ import annotations

from tests.data_prep.helpers import folder, preprocess, tokenizer  # noqa: F401  fixtures
