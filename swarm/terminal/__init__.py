"""What every command line shares: options, output, exit statuses, progress.

| File | What it holds |
|---|---|
| `options.py` | options that several commands have, and their checks |
| `output.py` | text and JSON, and files that are written whole |
| `exit.py` | exit statuses, error sentences, and output that never ends in a traceback |
| `interrupt.py` | Ctrl-C |
| `extras.py` | optional packages that a command needs |
| `progress.py` | progress bars |
| `figures.py` | bytes, rates and curves as text |

For other rooms: `crash`: crashes_reported, foreign_package; `exit`: FAILED, exit_with, exits,
speak; `extras`: EXTRA_OF_ROLE, require_extra; `figures`: DIM, ROLE_STYLES, STATE_STYLES, figure,
readable_bytes, readable_seconds; `interrupt`: run_until_interrupted; `options`: *, AsJson,
Bootstrap, EnvironmentOptions, LedgerSource, TokenizerFolder, UNGRADABLE_MAX, Version, Weights,
WhichRun, absolute, check_dtype, environment_options; `output`: STANDARD_OUTPUT, check_writable,
plain, print_json, removed_on_failure, say_event, say_json, to_json, write_json, write_text;
`progress`: progress_bar; `tables`: option_texts, read_toml, struct_from_mapping; `untrusted`:
PrintableFormatter, printable, shown
"""
