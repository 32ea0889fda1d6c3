"""A Kademlia DHT over the transport seam, in the wire format of libp2p's kad-dht.

For other rooms, by the names in docs/rooms.md: `dht`, `providers`, `publishing`, `records`,
`routing_table`, `wire`
"""
