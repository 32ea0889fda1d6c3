"""Epidemic gossip of one run: spreads signed envelopes to all peers that follow their topic.

docs/protocol.md has the frames. A new envelope is pushed at once to `EAGER` neighbours that follow
its topic and are not known to hold it. The others are offered its digest on the next tick. On
`hello` neighbours offer each other all they hold, the newest states first (anti-entropy; Demers et
al. 1987, eager/lazy as in Plumtree, Leitão et al. 2007).

Queues hold digests, not bytes: first the news for a neighbour, then the envelopes that it asked
for. A digest becomes a frame only when the stream accepts one. So a peer that returns and lacks ten
thousand announcements gets them at the pace of its line, and the newest step order before them.

For other rooms, by the names in docs/rooms.md: `gossip`, `slots`, `store`, `topics`
"""
