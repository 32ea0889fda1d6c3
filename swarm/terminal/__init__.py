"""What every command line shares: options, output, exit statuses, progress.

| File | What it holds |
|---|---|
| `options.py` | options that several commands have, and their checks |
| `output.py` | text and JSON, and files that are written whole |
| `exit.py` | exit statuses and error sentences |
| `interrupt.py` | Ctrl-C |
| `streams.py` | output that never ends in a traceback |
| `extras.py` | optional packages that a command needs |
| `progress.py` | progress bars |
| `figures.py` | bytes, rates and curves as text |
"""
