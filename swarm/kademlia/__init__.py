"""A Kademlia DHT over the transport seam, in the wire format of libp2p's kad-dht.

For other rooms: `dht`: Kademlia; `providers`: provider_key; `publishing`: REPUBLISH_SECONDS;
`records`: InvalidRecord, NAMESPACE, RecordInfo, SignedValues, Validator, data_of, sign_value;
`routing_table`: BUCKET_SIZE, key_id, node_id; `wire`: *
"""
