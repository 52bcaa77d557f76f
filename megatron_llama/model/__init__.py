"""The Llama model, and parts that attach to its blocks."""
