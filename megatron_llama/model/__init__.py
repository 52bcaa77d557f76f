"""The Llama model, and features that attach to its blocks."""
