import torch

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower
