"""Generation and evaluation from a training checkpoint of any layout, a run, or a Hugging Face folder, without export.

saved_model.py opens a path. chat.py renders conversations and streams text. generator.py runs the model with a KV cache
(kv_cache.py) and samples the next id. evaluation.py evaluates. Supports tensor parallelism, not pipeline parallelism.
"""
