"""Checkpoints of other programs, read by Hugging Face's names: weights, Adam's moments, step and position.

tensors.py is the interface: tensors on disk in chunks, mapped to Hugging Face's names (arch/foreign_names.py).
unpickle.py loads pickles without executing code. dcp_files.py reads torch.distributed.checkpoint's folders, megatron.py
Megatron's, torch_folders.py torchtitan's, accelerate's and the Trainer's. detect.py opens any of them.
"""
