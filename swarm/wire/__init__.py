"""What peers say to each other: identities, signed envelopes, and the messages.

| File | What it holds |
|---|---|
| `identity.py` | Ed25519 keys and peer ids |
| `envelope.py`, `kinds.py` | signed, expiring messages, and the gate that checks all of them |
| `messages.py`, `manifest.py`, `turns.py`, `outer.py` | the messages |
| `messenger.py` | signed requests and replies |
| `protocol.py`, `succession.py` | versions; who may sign a manifest |

For other rooms, by the names in docs/rooms.md: `envelope`, `identity`, `manifest`, `messages`,
`messenger`, `outer`, `protocol`, `succession`, `turns`
"""
