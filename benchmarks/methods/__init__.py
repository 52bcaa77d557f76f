"""Studies that train a small Llama with a method and without it: loss, FLOPs and processor time over seeds."""
