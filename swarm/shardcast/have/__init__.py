"""Which peer has which pieces: neighbours announce to each other what they hold.

Protocol `/swarm/have/1.0.0`, framing SWARM, one stream each way; its receiver only listens. A
frame is a msgpack array of tagged entries, each about one checkpoint, named by its manifest's
digest:

    ["bitmap", manifest, bytes]    every piece held: bit i % 8 of byte i / 8 is piece i
    ["pieces", manifest, indices, count]  more pieces, and how many the sender holds in all
    ["complete", manifest]         all pieces; sent at once
    ["gone", manifest]             none any more

A peer looks for eight neighbours, for sixteen while it is late, for more while its uplink is not
used, and announces to those that chose it as well.

- `messages`: the frames
- `claims`: what the neighbours say they hold
- `announcing`: what to announce to which neighbour, and when
- `exchange`: the streams, and the choice of neighbours
"""
