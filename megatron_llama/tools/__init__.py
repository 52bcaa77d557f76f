"""User tools outside the training loop: planning, tuning, inference, profiling, comparison and diagnosis."""
