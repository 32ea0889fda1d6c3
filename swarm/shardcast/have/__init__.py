"""The exchange of piece announcements: neighbours announce to each other what they hold.

docs/protocol.md has the frames, and how many neighbours a peer looks for.

- `claims`: the frames, and what the neighbours claim to hold
- `announcing`: what to announce to which neighbour, and when
- `streams`: the streams, and the choice of neighbours
"""
