"""One thread for torch in the process that ranks are forked from: a pool of threads does not survive a fork, and who
needs one there waits for ever."""

import torch

torch.set_num_threads(1)
