"""Settings of all unit tests."""

import torch

# The models here are tiny: a second thread costs more in waiting than it
# computes, most of all on a busy machine.
torch.set_num_threads(1)
