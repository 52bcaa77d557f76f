"""What is trained on. The position in the data is a number, not a state: sample i is the same in every layout."""
