"""Epidemic gossip of one run: spreads signed envelopes to all peers that follow their topic.

Protocol `/swarm/gossip/2.0.0`, one stream per pair of neighbours, usually opened by
the peer whose id sorts first. Frames are msgpack arrays whose first element is a tag:

- `hello`: run id, wall time in ms, topics followed, some peer records (so that a
  newcomer finds neighbours), the sender's admission if it has one;
- `admission`: the sender's admission, when it gets its first, and renewed from time to time;
- `push`: one envelope;
- `have`: digests of envelopes that the sender holds;
- `want`: digests from a `have` whose envelopes the sender lacks; answered with `push`.

A new envelope is pushed at once to `EAGER` neighbours that follow its topic and are not
known to hold it. The others are offered its digest on the next tick. On `hello` neighbours offer
each other all they hold, the newest states first (anti-entropy; Demers et al. 1987, eager/lazy as
in Plumtree, Leitão et al. 2007).

Queues hold digests, not bytes: first the news for a neighbour, then the envelopes that it asked
for. A digest becomes a frame only when the stream accepts one. So a peer that returns and lacks ten
thousand announcements gets them at the pace of its line, and the newest step order before them.

For other rooms: `gossip`: Gossip; `slots`: NEIGHBOURS_MAX, NEIGHBOURS_WANTED; `store`: EVENTS_MAX;
`topics`: PROTOCOL, Push, RUN, WORK
"""
