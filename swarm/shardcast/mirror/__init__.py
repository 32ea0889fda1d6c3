"""Mirrors: checkpoints as plain files that any web server or bucket serves, outside a run.

    <root>/checkpoint.json      which checkpoint this is, by its manifest's digest
    <root>/blob/<hex digest>    its manifest and its pieces

A mirror is not trusted: a fetch checks every blob against its name. Only `checkpoint.json` cannot
be checked by a person who gives nothing but the mirror's address; peers of a run know the manifest
from the trainer's signature.

- `publish`: a folder as a mirror, copied or in place
- `fetch`: fetching from mirrors into a folder
- `folder`: the folder of a fetch, and `checkpoint.json`
"""
