"""RFC 6962 Merkle trees: hashes, proofs and their verification.

A tree of n leaves is stored as its *complete* subtrees: node (level l, index i) is the hash of
leaves [i * 2^l, (i + 1) * 2^l). Appending a leaf completes one node, plus one for each trailing
1-bit of n. A root or a proof reads O(log n) nodes. Proofs are built as in RFC 6962 §2.1 and
verified by the algorithms of RFC 9162 §2.1.3.2 and §2.1.4.2."""

import hashlib
from collections.abc import Callable, Sequence

Node = Callable[[int, int], bytes]
"""The stored hash of the complete subtree (level, index)."""

EMPTY_ROOT = hashlib.sha256().digest()
PROOF_LENGTH_MAX = 128
"""Most hashes in a proof; 2 * 53 suffice for any log of at most 2^53 entries."""


def leaf_hash(data: bytes) -> bytes:
    """SHA-256 of 0x00 and the entry."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256 of 0x01 and both children."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def completed_by(size: int, leaf: bytes, node: Node) -> list[tuple[int, int, bytes]]:
    """The nodes (level, index, hash) completed by appending leaf hash `leaf` to `size` leaves."""
    level, index, value = 0, size, leaf
    completed = [(level, index, value)]
    while index % 2 == 1:
        value = node_hash(node(level, index - 1), value)
        level, index = level + 1, index // 2
        completed.append((level, index, value))
    return completed


def peaks_of(size: int) -> list[tuple[int, int]]:
    """(level, index) of the largest complete subtrees of `size` leaves, from left to right."""
    return [
        (level, (size >> level) - 1)
        for level in reversed(range(size.bit_length()))
        if size >> level & 1
    ]


class Peaks:
    """Computes the root of a growing tree in O(log n) memory from its largest complete subtrees."""

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        """`peaks` are the hashes at `peaks_of(size)`."""
        self.size = size
        self._peaks = list(peaks)

    def append(self, leaf: bytes) -> None:
        self._peaks.append(leaf)
        index = self.size
        while index % 2 == 1:
            right, left = self._peaks.pop(), self._peaks.pop()
            self._peaks.append(node_hash(left, right))
            index //= 2
        self.size += 1

    def root(self) -> bytes:
        if not self._peaks:
            return EMPTY_ROOT
        value = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            value = node_hash(peak, value)
        return value


def _split(size: int) -> int:
    """The largest power of two below `size` (at least 2)."""
    return 1 << ((size - 1).bit_length() - 1)


def _subtree(start: int, size: int, node: Node) -> bytes:
    """MTH of leaves [start, start + size); `start` is a multiple of the power of two ≥ `size`."""
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return node(level, start >> level)
    left = _split(size)
    return node_hash(_subtree(start, left, node), _subtree(start + left, size - left, node))


def root(size: int, node: Node) -> bytes:
    """The Merkle tree hash of the first `size` leaves."""
    return _subtree(0, size, node) if size else EMPTY_ROOT


def inclusion_proof(index: int, size: int, node: Node) -> list[bytes]:
    """PATH(index, D[size]): hashes from the leaf's sibling upwards; raises `ValueError`."""
    if not 0 <= index < size:
        raise ValueError(f"no leaf {index} in a tree of {size}")
    path: list[bytes] = []
    start = 0
    while size > 1:
        left = _split(size)
        if index - start < left:
            path.append(_subtree(start + left, size - left, node))
            size = left
        else:
            path.append(_subtree(start, left, node))
            start, size = start + left, size - left
    return path[::-1]


def consistency_proof(old: int, new: int, node: Node) -> list[bytes]:
    """PROOF(old, D[new]): proves that the first `old` of `new` leaves did not change.

    Empty when `old` is 0 or `new`; raises `ValueError` when `old` exceeds `new`."""
    if not 0 <= old <= new:
        raise ValueError(f"a tree of {new} leaves does not extend one of {old}")
    if old in (0, new):
        return []
    path: list[bytes] = []
    start, size, whole = 0, new, True
    """`whole`: the old tree starts at the start of this subtree (b in RFC 6962)."""
    while old - start != size:
        left = _split(size)
        if old - start <= left:
            path.append(_subtree(start + left, size - left, node))
            size = left
        else:
            path.append(_subtree(start, left, node))
            start, size, whole = start + left, size - left, False
    if not whole:
        path.append(_subtree(start, size, node))
    return path[::-1]


def verify_inclusion(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], root_hash: bytes
) -> bool:
    """Whether `proof` proves leaf hash `leaf` at `index` under `root_hash` (RFC 9162 §2.1.3.2)."""
    if not 0 <= index < size:
        return False
    first, last, value = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if first % 2 == 1 or first == last:
            value = node_hash(sibling, value)
            while first % 2 == 0 and first != 0:
                first, last = first >> 1, last >> 1
        else:
            value = node_hash(value, sibling)
        first, last = first >> 1, last >> 1
    return last == 0 and value == root_hash


def verify_consistency(
    old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]
) -> bool:
    """Whether `proof` proves that the new tree extends the old tree (RFC 9162 §2.1.4.2)."""
    if not 0 <= old <= new:
        return False
    if old == new:
        return not proof and old_root == new_root
    if old == 0:
        return not proof and old_root == EMPTY_ROOT
    path = list(proof)
    # A whole subtree, whose root is `old_root`: the proof leaves out what the verifier has.
    if old & (old - 1) == 0:
        path.insert(0, old_root)
    if not path:
        return False
    first, last = old - 1, new - 1
    while first % 2 == 1:
        first, last = first >> 1, last >> 1
    from_old = from_new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if first % 2 == 1 or first == last:
            from_old = node_hash(sibling, from_old)
            from_new = node_hash(sibling, from_new)
            while first % 2 == 0 and first != 0:
                first, last = first >> 1, last >> 1
        else:
            from_new = node_hash(from_new, sibling)
        first, last = first >> 1, last >> 1
    return last == 0 and from_old == old_root and from_new == new_root
