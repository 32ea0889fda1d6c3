"""Learning: one policy, its optimiser, and the GRPO step that improves it, on one rank or many.

For other rooms: `adapters`: *; `advantages`: Completions, advantages; `batch`: AcceptedGroups,
Batch, check_rewards, rollout_batch, share_rows, trained_rows; `data_files`: find_files; `descent`:
descend; `durable`: delete_unfinished, whole_folder; `examples`: Encoder, draw_tasks,
encode_examples, read_examples, stop_id, tokenizer_key; `formulas`: Tokens; `lead`: follow, lead;
`learner`: Learner; `metrics`: *, Metrics; `mixture`: Mixture, Permutation, Place, shares;
`objective`: *, Totals; `packing`: *, PASS_TOKENS_MAX, Rows, lay_out; `plan`: *, Model, Workload,
fit, machine_of, of_rounds, sharding_of; `policy`: TrainedPolicy, blank_model, score_passes;
`ranks`: Launch, LearnerThread, Ranks; `reading`: check_file, read_groups; `scorer`: Scorer;
`settings`: LearnerSettings, learning_rate; `sharding`: local, rest, whole; `state_format`: STATES;
`states`: *; `stored`: Slices, StoredWeights, slices_of; `token_file`: Tokens, tokenized;
`training_settings`: TrainingSettings; `trial`: with_digest; `values`: give_values
"""
