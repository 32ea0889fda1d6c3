"""A Kademlia DHT over the transport seam, in the wire format of libp2p's kad-dht."""
