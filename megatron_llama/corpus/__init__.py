"""Datasets without torch: Megatron's files, blends, packing, difficulty indexes, epochs."""
