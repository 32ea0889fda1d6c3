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

For other rooms: `chain`: Deltas; `delta`: encode, make; `fetch.fetcher`: Fetcher; `fetch.job`:
source_mark; `have.claims`: Complete, PROTOCOL, encode; `have.streams`: HaveExchange; `held`:
Change, Held, is_right; `jobs`: DeltaEncoded, DeltaService, EncodeDelta, MakePieces, PieceToMake,
PiecesMade; `limits`: *; `manifest`: BASE_NAME, BadManifest, CheckpointManifest, build, is_mirror,
parse, piece_size_for; `mirror`: fetch, folder; `mirror.fetch`: fetch; `mirror.folder`: BASE_FOLDER,
Progress; `mirror.publish`: export, serve; `rarity`: draw; `service`: BlobService; `store`:
CheckpointConflict, CheckpointStore; `uploads`: Uploads
"""
