from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger import merkle


def literal_root(leaves: list[bytes]) -> bytes:
    """MTH as RFC 6962 §2.1 writes it."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = literal_split(len(leaves))
    return hashlib.sha256(b"\x01" + literal_root(leaves[:k]) + literal_root(leaves[k:])).digest()


def literal_split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def literal_path(m: int, leaves: list[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = literal_split(len(leaves))
    if m < k:
        return [*literal_path(m, leaves[:k]), literal_root(leaves[k:])]
    return [*literal_path(m - k, leaves[k:]), literal_root(leaves[:k])]


def literal_subproof(m: int, leaves: list[bytes], whole: bool) -> list[bytes]:
    if m == len(leaves):
        return [] if whole else [literal_root(leaves)]
    k = literal_split(len(leaves))
    if m <= k:
        return [*literal_subproof(m, leaves[:k], whole), literal_root(leaves[k:])]
    return [*literal_subproof(m - k, leaves[k:], False), literal_root(leaves[:k])]


class Tree:
    """A tree in a dictionary, counting how many nodes are read."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.nodes: dict[tuple[int, int], bytes] = {}
        self.reads = 0
        for size, leaf in enumerate(leaves):
            for level, index, value in merkle.completed_by(size, merkle.leaf_hash(leaf), self.node):
                assert (level, index) not in self.nodes
                self.nodes[(level, index)] = value

    def node(self, level: int, index: int) -> bytes:
        self.reads += 1
        return self.nodes[(level, index)]


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


@given(st.integers(1, 70), st.data())
def test_inclusion_equals_the_literal_algorithm_and_verifies(size: int, data) -> None:
    leaves = numbered(size)
    index = data.draw(st.integers(0, size - 1))
    tree = Tree(leaves)
    root = merkle.root(size, tree.node)
    assert root == literal_root(leaves)
    proof = merkle.inclusion_proof(index, size, tree.node)
    assert proof == literal_path(index, leaves)
    leaf = merkle.leaf_hash(leaves[index])
    assert merkle.verify_inclusion(leaf, index, size, proof, root)
    for wrong in range(size):
        if wrong != index:
            assert not merkle.verify_inclusion(leaf, wrong, size, proof, root)
    assert not merkle.verify_inclusion(merkle.leaf_hash(b"other"), index, size, proof, root)
    assert not merkle.verify_inclusion(leaf, index, size, [*proof, bytes(32)], root)
    if proof:
        assert not merkle.verify_inclusion(leaf, index, size, proof[:-1], root)


@given(st.integers(0, 70), st.data())
def test_consistency_equals_the_literal_algorithm_and_verifies(new: int, data) -> None:
    leaves = numbered(new)
    old = data.draw(st.integers(0, new))
    tree = Tree(leaves)
    roots = [merkle.root(size, tree.node) for size in (old, new)]
    proof = merkle.consistency_proof(old, new, tree.node)
    if 0 < old < new:
        assert proof == literal_subproof(old, leaves, True)
    assert merkle.verify_consistency(old, new, roots[0], roots[1], proof)
    assert not merkle.verify_consistency(old, new, roots[0], roots[1], [*proof, bytes(32)])
    forked = numbered(new)
    if old:
        forked[data.draw(st.integers(0, old - 1))] = b"rewritten"
        fork = Tree(forked)
        lies = merkle.consistency_proof(old, new, fork.node)
        forged = merkle.root(new, fork.node)
        assert not merkle.verify_consistency(old, new, roots[0], forged, lies)
        assert not merkle.verify_consistency(old, new, roots[0], forged, proof)


def test_proofs_read_few_nodes() -> None:
    size = 5000
    tree = Tree(numbered(size))
    tree.reads = 0
    merkle.inclusion_proof(4321, size, tree.node)
    merkle.consistency_proof(3000, size, tree.node)
    merkle.root(size, tree.node)
    assert tree.reads < 6 * size.bit_length()


def test_what_is_not_in_the_tree_has_no_proof() -> None:
    tree = Tree(numbered(3))
    for make in (
        lambda: merkle.inclusion_proof(3, 3, tree.node),
        lambda: merkle.inclusion_proof(-1, 3, tree.node),
        lambda: merkle.consistency_proof(4, 3, tree.node),
    ):
        try:
            make()
        except ValueError:
            continue
        raise AssertionError("a proof of what is not there")
