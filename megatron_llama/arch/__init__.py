"""Shapes, tensor names, FLOPs and attention pattern of a Llama, without torch."""
