"""The Llama model, and the mapping between its parameters and Hugging Face's tensors (names.py)."""
