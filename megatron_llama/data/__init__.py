"""Training data. The position in the data is a sample number, and sample i is the same in every layout."""
