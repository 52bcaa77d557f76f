"""Tokenizers, chat templates and conversations, for data_prep, training, inference and export."""
