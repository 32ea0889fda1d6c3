"""Engines: what generates and prefills, their models and sampling, episodes. Imports torch.

For other rooms, by the names in docs/rooms.md: `adapter`, `adapter_config`, `architecture`,
`batch`, `config`, `demo`, `device`, `doctor`, `engine`, `episodes`, `experts`, `fitting`,
`install`, `installed`, `loading`, `memory`, `model`, `native`, `noise`, `registry`, `stored`,
`tokenizer`, `winners`
"""
