"""Distribution of checkpoints to every peer, piece by piece, through untrusted peers.

The trainer *publishes* a folder. It is cut into pieces, each named by its BLAKE3 hash; a manifest
lists them, and the trainer signs the manifest's hash. All other peers *fetch*: the manifest first,
then pieces from several sources at once. Each piece is checked when it arrives, and served to
others at once.

- `manifest`: what a checkpoint consists of, and how a hostile manifest is refused
- `store`: checkpoints on disk, complete and partial; survives a crash at any point. Its part
  `held` is one checkpoint, which of them holds a blob, and their recovery at a start
- `delta`: the file that turns one checkpoint into the next, bit for bit (in a child process)
- `chain`: when a delta is published, and when one is used
- `sources`: which source to ask next
- `fetch`: from an announcement to a complete folder
- `have`: announcements of pieces among neighbours
- `mirror`: checkpoints as plain files on any web server, and fetching them from there
- `service`: what others may fetch from this peer, and push to it

For other rooms, by the names in docs/rooms.md: `chain`, `delta`, `fetch.fetcher`, `fetch.job`,
`have.claims`, `have.streams`, `held`, `jobs`, `limits`, `manifest`, `mirror`, `mirror.fetch`,
`mirror.folder`, `mirror.publish`, `rarity`, `service`, `store`, `uploads`
"""
