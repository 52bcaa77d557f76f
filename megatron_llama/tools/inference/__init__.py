"""Generation and evaluation from a training checkpoint of any layout, a run, or a Hugging Face folder, without export.

saved_model.py opens a path. chat.py renders conversations and prints text as it comes. generator.py runs the model with
a key-value cache (kv_cache.py) and chooses the next id. evaluation.py evaluates. The tokenizer is text/tokenizer.py's.
Ranks share the matrices (tp); there is no pipeline here.
"""
