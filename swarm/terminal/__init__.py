"""What every command line shares: options, output, exit statuses, progress.

| File | What it holds |
|---|---|
| `options.py` | options that several commands have, and the files of their words |
| `output.py` | text and JSON, and files that are written whole |
| `exit.py` | exit statuses, error sentences, and output that never ends in a traceback |
| `interrupt.py` | Ctrl-C |
| `extras.py` | optional packages that a command needs |
| `progress.py` | progress bars |
| `figures.py` | bytes, rates and curves as text |

For other rooms, by the names in docs/rooms.md: `crash`, `exit`, `extras`, `figures`, `interrupt`,
`options`, `output`, `progress`, `screen`, `tables`, `untrusted`
"""
