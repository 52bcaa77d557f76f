"""A model that writes: from a training checkpoint of any layout, or a Hugging Face folder, without export.

source.py finds out what a path holds, text.py turns text into ids and back; sampling.py chooses the next id, and
generator.py runs the model with a cache of keys and values; stream.py shows text as it comes, chat.py is a
conversation. Ranks share the matrices (tp); there is no pipeline here, whatever layout trained the checkpoint.
"""
