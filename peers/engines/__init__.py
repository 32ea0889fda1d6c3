"""Engines: what generates and prefills, their models and sampling, episodes. Imports torch.

For other rooms: `adapter`: read_matrices, stored_name, target_names, write_adapter;
`adapter_config`: base_of, is_adapter, read_adapter_config; `architecture`: FULL, SLIDING, describe,
is_described; `batch`: generate, requests_for; `config`: first_line, read_config, read_text_config;
`demo`: EOS_ID, LENGTH_MAX, UNKNOWN_ID, VOCABULARY, make_policy, save_tokenizer; `device`: DTYPES,
available_bytes, find_device, find_dtype, is_out_of_memory, use_hardware; `doctor`:
compute_findings, disk, machine, room, task_findings; `engine`: Capabilities, Engine, Piece,
Prefill, Request; `episodes`: ContinuedTask, Player, Playing, SpanStates, add_states, play;
`experts`: fused_names; `fitting`: facts_of; `install`: install, pip; `installed`: CHILD_NEEDS,
Installed, PREFILLS, Recipe, interpreter_for, python_of, site_packages, why_unusable; `loading`: *,
Head, blank, body_of, caps_scores, decoder_layers, load, load_policy, published; `memory`: need_of;
`model`: *, INDEX_FILE, StoredTensors, count_parameters, open_weights, read_weights, weight_files;
`native`: NativeEngine; `noise`: Drawn, gumbel_noise; `registry`: check_engine, make_engine;
`stored`: readable_as_folder; `tokenizer`: BYTES_MAX, PATTERNS, check_tokenizer, copy_tokenizer,
tokenizer_files, vocabulary; `winners`: margins
"""
