"""Checkpoints to every peer, piece by piece, through hands nobody trusts.

The trainer *publishes* a folder: cut into pieces, each named by its BLAKE3, listed in a manifest
whose own hash the trainer signs. Everybody else *fetches*: the manifest first, then pieces from
several sources at once, each checked and passed on the moment it arrives.

- `manifest`: what a checkpoint consists of, and how a hostile one is refused
- `store`: checkpoints on disk, complete and partial; survives a crash at any point. Its parts are
  `held` (one checkpoint), `index` (which blob is where), `recovery`, `settling` and `seeding`
- `delta`: the file that turns one checkpoint into the next, bit for bit (in a child process)
- `chain`: when a delta is published, and when one is used
- `sources`: which source to ask next
- `fetch`: from an announcement to a complete folder
- `have`: who has which pieces, among neighbours
- `mirror`: checkpoints as plain files on any web server, and back
- `service`: what others may fetch from this peer, and push to it
"""
