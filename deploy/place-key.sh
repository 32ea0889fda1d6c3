#!/bin/sh
# place-key FILE HOME: put a peer's key into its home, before the peer starts.
#
# Secrets are mounted as links that a group may read, and a peer refuses a key that others can read.
# A key that is there already stays: another one would be another peer.
set -eu
key=$2/identity.key
if [ ! -e "$key" ]; then
    part=$(mktemp "$2/identity.XXXXXX")
    cat "$1" >"$part"
    chmod 0600 "$part"
    mv -n "$part" "$key"
    rm -f "$part"
fi
cmp -s "$1" "$key" || {
    echo "error: $key is not the key in $1; move it away, or give the peer another home" >&2
    exit 2
}
