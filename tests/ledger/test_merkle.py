from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger import merkle

# The seven leaves and roots of the Certificate Transparency reference tests.
CT_LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
CT_ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


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


def test_roots_of_the_certificate_transparency_vectors() -> None:
    tree = Tree(CT_LEAVES)
    peaks = merkle.Peaks()
    assert merkle.root(0, tree.node).hex() == (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    for size, expected in enumerate(CT_ROOTS, start=1):
        peaks.append(merkle.leaf_hash(CT_LEAVES[size - 1]))
        assert merkle.root(size, tree.node).hex() == expected
        assert peaks.root().hex() == expected


def test_proofs_of_the_certificate_transparency_vectors() -> None:
    tree = Tree(CT_LEAVES)
    assert [h.hex() for h in merkle.inclusion_proof(5, 8, tree.node)] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [h.hex() for h in merkle.consistency_proof(6, 8, tree.node)] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


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
