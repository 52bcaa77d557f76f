"""The fixtures of this folder; tests/text uses them too."""

from tests.data_prep.helpers import folder, preprocess, tokenizer  # noqa: F401
