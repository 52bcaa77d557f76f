"""Checkpoints with Hugging Face names and shapes: any layout loads in any layout.

    checkpoints/step_00000100/checkpoint.json           manifest: run state, files, one hash per block
                              rank_00000.safetensors    tensors that rank 0 owns; plain safetensors
    checkpoints/latest                                  name of the newest checkpoint

In an object store (checkpoint.dir), a rank's file is several objects, and the manifest is written last.

The training loop calls checkpointer.py. Saving uses state.py (rectangles of a rank), saving.py (background thread),
rank_files.py (file of a rank), manifest.py and folder.py (publication). Loading reads a ``Stored`` of
tensor_source.py: a checkpoint (rank_files.py), a Hugging Face folder (hf_folder.py), or a model with a LoRA adapter
(lora_adapter.py). export.py writes a Hugging Face folder.
"""

# Imports nothing: scripts/export_hf.py then starts without megatron-core.

POINTER, BEST = "latest", "best"
"""Files with the names of the newest and the best checkpoint. Defined here, because launchers do not import torch."""
