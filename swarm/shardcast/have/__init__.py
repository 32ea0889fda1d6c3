"""The exchange of piece announcements: neighbours announce to each other what they hold.

Protocol `/swarm/have/2.0.0`, one stream each way; the receiver sends nothing on it.
A frame is a msgpack array of tagged entries, each about one checkpoint, named by its manifest's
digest:

    ["bitmap", manifest, bytes]    every piece held: bit i % 8 of byte i / 8 is piece i
    ["pieces", manifest, indices, count]  more pieces, and how many the sender holds in all
    ["complete", manifest]         the sender holds all pieces; sent without delay
    ["gone", manifest]             the sender holds none any more

A peer looks for eight neighbours, for sixteen while it is late, and for more while its uplink is
idle. It also announces to peers that chose it.

- `claims`: the frames, and what the neighbours claim to hold
- `announcing`: what to announce to which neighbour, and when
- `streams`: the streams, and the choice of neighbours
"""
