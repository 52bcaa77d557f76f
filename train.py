"""Trains a Llama: ``python train.py model=llama7b trainer.tp=8``; ``python train.py --help`` says more."""

import sys

from megatron_llama.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
