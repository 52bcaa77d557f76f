"""Generation and evaluation from a training checkpoint of any layout, a run, or a Hugging Face folder, without export.

saved_model.py opens what a path holds, prompts.py renders conversations, the tokenizer is text/tokenizer.py's,
generator.py runs the model with a key-value cache, sampling.py chooses the next id, stream.py prints it as it comes.
perplexity.py, accuracy.py and eval_data.py evaluate. Ranks share the matrices (tp); there is no pipeline here.
"""
