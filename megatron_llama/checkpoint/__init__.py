"""Checkpoints under Hugging Face's names and shapes: any layout to any layout, from Hugging Face and back.

    checkpoints/step_00000100/checkpoint.json           what it is, where each value lies, a hash for each block
                              rank_00000.safetensors    what rank 0 owned; a plain safetensors file
    checkpoints/latest                                  the name of the newest

checkpointer.py is what the loop calls; state.py says what is saved of a rank, as rectangles.py describes it;
storage.py reads and writes them under torch.distributed.checkpoint; manifest.py and files.py are the format;
folder.py makes checkpoints appear and disappear whole; saving.py does it beside training.
"""

# Imports nothing: export needs neither the model nor megatron-core, and should start at once.
