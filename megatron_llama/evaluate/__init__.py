"""How good a model is: perplexity on a dataset, accuracy on a labelled set, answers that are right word for word.

Every figure depends on the model and the set alone: greedy, in batches by length, the same on any number of ranks.
"""
