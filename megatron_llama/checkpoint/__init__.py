"""Checkpoints under Hugging Face's names and shapes: any layout to any layout, from Hugging Face and back.

    checkpoints/step_00000100/checkpoint.json           the manifest: state of the run, files, a hash for each block
                              rank_00000.safetensors    what rank 0 owned; a plain safetensors file
    checkpoints/latest                                  the name of the newest

checkpointer.py is what the training loop calls. Saving goes through state.py (the rectangles that a rank holds),
saving.py (the thread beside training), storage.py (a rank's file), manifest.py and folder.py (publication). Loading
reads a ``Stored`` of stored_tensors.py: a checkpoint (storage.py), a Hugging Face folder (hf_folder.py), or a model
with its LoRA adapter (adapter.py). export.py writes a Hugging Face folder.
"""

# Imports nothing: export needs neither the model nor megatron-core, and should start at once.
