"""Tokenizers, chat templates and conversations: one of each, for data_prep, training, inference and export."""
