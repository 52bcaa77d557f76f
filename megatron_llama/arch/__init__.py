"""A Llama as numbers, without torch: shapes, names of tensors, FLOPs, the attention pattern."""
