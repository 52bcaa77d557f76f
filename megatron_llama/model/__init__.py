"""The Llama and the names of its tensors."""
