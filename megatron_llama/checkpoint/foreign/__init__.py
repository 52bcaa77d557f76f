"""Checkpoints of other programs, read by Hugging Face's names: weights, Adam's moments, step and position.

tensors.py         the interface: chunks on disk, mapped to Hugging Face's names (arch/foreign_tensor_layouts.py)
unpickle.py        pickles, loaded without executing code
dcp_files.py       folders of torch.distributed.checkpoint
megatron.py        Megatron-LM, Megatron-Bridge, NeMo 2
torch_folders.py   torchtitan, accelerate, Hugging Face's Trainer
detect.py          opens any of them; the state from which a run resumes
"""
