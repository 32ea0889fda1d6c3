"""Learning: one policy, its optimiser, and the GRPO step that improves it, on one rank or many.

For other rooms, by the names in docs/rooms.md: `adapters`, `advantages`, `batch`, `data_files`,
`descent`, `durable`, `examples`, `formulas`, `lead`, `learner`, `metrics`, `mixture`, `objective`,
`packing`, `plan`, `policy`, `ranks`, `reading`, `scorer`, `settings`, `sharding`, `state_format`,
`states`, `stored`, `token_file`, `training_settings`, `trial`, `values`
"""
