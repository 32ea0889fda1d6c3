"""Test vectors of RFC 6962 and of Certificate Transparency, and properties against a naive tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ledger import merkle
from tests.ledger.test_merkle import Tree, numbered

# --- RFC 6962 §2.1.3: the example tree of seven leaves --------------------------------------------

SEVEN = [f"d{number}".encode() for number in range(7)]


def example_nodes() -> dict[str, bytes]:
    """The nodes as the RFC's drawing names them."""
    names = {name: merkle.leaf_hash(leaf) for name, leaf in zip("abcdefj", SEVEN, strict=True)}
    for name, left, right in (
        ("g", "a", "b"),
        ("h", "c", "d"),
        ("i", "e", "f"),
        ("k", "g", "h"),
        ("l", "i", "j"),
        ("hash", "k", "l"),
        ("hash0", "g", "c"),
        ("hash2", "k", "i"),
    ):
        names[name] = merkle.node_hash(names[left], names[right])
    return names | {"hash1": names["k"]}


NODES = example_nodes()


@pytest.mark.parametrize(("index", "path"), [(0, "bhl"), (3, "cgl"), (4, "fjk"), (6, "ik")])
def test_audit_paths_of_the_rfcs_example(index: int, path: str) -> None:
    proof = merkle.inclusion_proof(index, 7, Tree(SEVEN).node)
    assert proof == [NODES[name] for name in path]
    leaf = merkle.leaf_hash(SEVEN[index])
    assert merkle.verify_inclusion(leaf, index, 7, proof, NODES["hash"])


@pytest.mark.parametrize(
    ("old", "name", "path"), [(3, "hash0", "cdgl"), (4, "hash1", "l"), (6, "hash2", "ijk")]
)
def test_consistency_proofs_of_the_rfcs_example(old: int, name: str, path: str) -> None:
    tree = Tree(SEVEN)
    proof = merkle.consistency_proof(old, 7, tree.node)
    assert proof == [NODES[node] for node in path]
    assert merkle.root(old, tree.node) == NODES[name]
    assert merkle.verify_consistency(old, 7, NODES[name], NODES["hash"], proof)


# --- Certificate Transparency's reference tree of eight leaves ------------------------------------

LEAVES = [
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

LEAF_HASHES = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
    "0298d122906dcfc10892cb53a73992fc5b9f493ea4c9badb27b791b4127a7fe7",
    "07506a85fd9dd2f120eb694f86011e5bb4662e5c415a62917033d4a9624487e7",
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "4271a26be0d8a84f0bd54c8c302e7cb3a3b5d1fa6780a40bcce2873477dab658",
    "b08693ec2e721597130641e8211e7eedccb4c26413963eee6c1e2ed16ffb1a5f",
    "46f6ffadd3d06a09ff3c5860d2755c8b9819db7df44251788c7d8e3180de8eb1",
]

ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
"""Of the first 0 to 8 leaves."""

PATHS = {
    (0, 1): [],
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
"""Inclusion proofs by (index, size)."""

CONSISTENCY = {
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
"""Consistency proofs by (old size, new size)."""


def hexed(hashes: list[bytes]) -> list[str]:
    return [value.hex() for value in hashes]


def test_leaves_and_roots_of_the_reference_tree() -> None:
    tree, peaks = Tree(LEAVES), merkle.Peaks()
    assert hexed([merkle.leaf_hash(leaf) for leaf in LEAVES]) == LEAF_HASHES
    assert hexed([merkle.root(size, tree.node) for size in range(9)]) == ROOTS
    assert peaks.root().hex() == ROOTS[0]
    for size, leaf in enumerate(LEAVES, start=1):
        peaks.append(merkle.leaf_hash(leaf))
        assert peaks.root().hex() == ROOTS[size]


@pytest.mark.parametrize(("index", "size"), PATHS)
def test_inclusion_proofs_of_the_reference_tree(index: int, size: int) -> None:
    proof = merkle.inclusion_proof(index, size, Tree(LEAVES).node)
    assert hexed(proof) == PATHS[index, size]
    leaf = bytes.fromhex(LEAF_HASHES[index])
    assert merkle.verify_inclusion(leaf, index, size, proof, bytes.fromhex(ROOTS[size]))


@pytest.mark.parametrize(("old", "new"), CONSISTENCY)
def test_consistency_proofs_of_the_reference_tree(old: int, new: int) -> None:
    proof = merkle.consistency_proof(old, new, Tree(LEAVES).node)
    assert hexed(proof) == CONSISTENCY[old, new]
    old_root, new_root = (bytes.fromhex(ROOTS[size]) for size in (old, new))
    assert merkle.verify_consistency(old, new, old_root, new_root, proof)


# --- against a naive tree -------------------------------------------------------------------------


@given(st.integers(2, 70), st.data())
def test_a_changed_hash_in_a_proof_proves_nothing(size: int, data) -> None:
    tree = Tree(numbered(size))
    root = merkle.root(size, tree.node)
    index = data.draw(st.integers(0, size - 1))
    old = data.draw(st.integers(1, size - 1))
    inclusion = merkle.inclusion_proof(index, size, tree.node)
    consistency = merkle.consistency_proof(old, size, tree.node)
    leaf, old_root = merkle.leaf_hash(numbered(size)[index]), merkle.root(old, tree.node)
    for proof in (inclusion, consistency):
        at = data.draw(st.integers(0, len(proof) - 1))
        byte = data.draw(st.integers(0, 31))
        changed = bytearray(proof[at])
        changed[byte] ^= 1 << data.draw(st.integers(0, 7))
        proof[at] = bytes(changed)
    assert not merkle.verify_inclusion(leaf, index, size, inclusion, root)
    assert not merkle.verify_consistency(old, size, old_root, root, consistency)


@given(st.integers(2, 70), st.data())
def test_a_node_is_no_leaf(size: int, data) -> None:
    """Leaves and nodes are hashed differently (RFC 6962's second-preimage protection)."""
    tree = Tree(numbered(size))
    pair = data.draw(st.integers(0, size // 2 - 1))
    proof = merkle.inclusion_proof(2 * pair, size, tree.node)[1:]
    children = tree.node(0, 2 * pair) + tree.node(0, 2 * pair + 1)
    root, halved = merkle.root(size, tree.node), (size + 1) // 2
    assert merkle.verify_inclusion(tree.node(1, pair), pair, halved, proof, root)
    assert not merkle.verify_inclusion(merkle.leaf_hash(children), pair, halved, proof, root)
