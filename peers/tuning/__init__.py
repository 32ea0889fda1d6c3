"""`swarm sft`: fine-tuning on this machine, without a network.

For other rooms:

- `service`: as_batch
"""
