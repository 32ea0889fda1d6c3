"""Epidemic announcements of one run: signed envelopes only, to everyone who follows their topic.

Protocol `/swarm/gossip/1.0.0`, framing SWARM, one stream per pair of neighbours, opened by the
peer whose id sorts first. Frames are msgpack arrays whose first element is a tag:

- `hello`: run id, wall time in ms, topics followed, some peer records (so that a
  newcomer finds neighbours), the sender's admission if it has one;
- `admission`: the sender's admission, once it has one, and renewed now and then;
- `push`: one envelope;
- `have`: digests of envelopes the sender holds;
- `want`: digests of those the receiver of a `have` lacks; answered with `push`.

A new envelope is pushed at once to `EAGER` neighbours that follow its topic and are not
known to hold it, and offered by digest to the others on the next tick. On `hello` neighbours offer
each other all they hold, the newest states first (anti-entropy; Demers et al. 1987, eager/lazy as
in Plumtree, Leitão et al. 2007).

Nothing waits in line as bytes: what a neighbour is owed is remembered by digest, news before what
it asked for, and becomes a frame when the stream takes one. So a peer that comes back to ten
thousand announcements gets them at the pace of its line, and the newest order before them.
"""
